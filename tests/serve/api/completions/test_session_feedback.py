"""Feedback on a session, over HTTP: whose responses it is on, once, and when there are none."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from feedback.config import JournalConfig, LakeConfig
from feedback.events import session_rows
from feedback.ingest.idempotency import SeenFeedback
from feedback.ingest.seal import seal
from feedback.journal.writer import Journal
from feedback.lake.tables import Lake
from feedback.maintenance.erasure import Target, erase, finish_erasures
from serve.http import Problem
from serve.observability.metrics import Metrics
from serve.reading.sessions import MOST_RESPONSES
from serve.recorder import Recorder
from tests.feedback.feedback_rows import interaction, put, thumb
from tests.serve.api.test_both_apis import HI, post
from tests.serve.api.test_unstored import ids
from tests.serve.conftest import LiveServer


def turn(server: LiveServer, session: str, path: str = "/generate", **fields: Any) -> str:
    """Another response of a session; its id."""
    prompt: dict[str, Any] = {"messages": HI} if "chat" in path else {"prompt": "go on"}
    return (
        ids(post(server, path, prompt | {"session_id": session} | fields))[0]
        .removeprefix("chatcmpl-")
        .removesuffix(":0")
    )


def give(server: LiveServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/feedback", json={"kind": "thumb", "value": 1} | body, timeout=60)


def recorded(server: LiveServer, feedback_id: str) -> dict[str, str]:
    """Response -> what follows the feedback's id in its row's."""
    rows = server.rows("feedback", f"starts_with(feedback_id, '{feedback_id}')")
    found = {row["response_id"]: row["feedback_id"].removeprefix(feedback_id) for row in rows}
    assert len(found) == len(rows)
    return found


def test_feedback_on_a_session_is_a_row_on_each_response_that_it_has_by_then(server: LiveServer) -> None:
    session, other = (f"{uuid.uuid4()} with 'a space'" for _ in range(2))
    first, second = turn(server, session), turn(server, session, "/v1/chat/completions")
    turn(server, other)
    turn(server, session, store=False)
    answer = give(server, session_id=session, source="ann", text="good talk")
    assert answer.status_code == 201, answer.text
    feedback_id = answer.json()["feedback_id"]
    third = turn(server, session)
    assert recorded(server, feedback_id) == {first: f"~turn:1~{first}", second: "~turn:0"}
    rows = server.rows("feedback", f"starts_with(feedback_id, '{feedback_id}')")
    assert {(row["kind"], row["value"], row["source"], row["text"]) for row in rows} == {
        ("thumb", 1.0, "ann", "good talk")
    }
    later = give(server, session_id=session, value=0).json()["feedback_id"]
    assert recorded(server, later).keys() == {first, second, third}


def test_a_sessions_feedback_that_is_sent_again_is_recorded_once_also_when_the_session_has_gone_on(
    server: LiveServer,
) -> None:
    session, mine = str(uuid.uuid4()), str(uuid.uuid4())
    first = turn(server, session)
    assert give(server, session_id=session, feedback_id=mine).status_code == 201
    turn(server, session)
    again = give(server, session_id=session, feedback_id=mine)
    assert (again.status_code, again.json()["feedback_id"]) == (200, mine)
    assert recorded(server, mine) == {first: "~turn:0"}
    assert give(server, session_id=session, feedback_id=mine, value=0).status_code == 409
    batch = {"feedback": [{"session_id": session, "kind": "thumb", "value": 1, "feedback_id": mine}]}
    assert httpx.post(f"{server.url}/feedback/batch", json=batch, timeout=60).json()["results"][0]["status"] == 200


def test_a_sessions_feedback_that_is_sent_again_is_the_same_when_its_response_is_not_looked_for_any_more(
    server: LiveServer,
) -> None:
    session, other, mine = (str(uuid.uuid4()) for _ in range(3))
    first = turn(server, session)
    turn(server, other)
    assert give(server, session_id=session, feedback_id=mine).status_code == 201
    for _ in range(10):
        body = {"prompt": "go on", "session_id": session, "n": MOST_RESPONSES // 10, "max_tokens": 1}
        assert post(server, "/generate", body).status_code == 200
    assert give(server, session_id=session, feedback_id=mine).status_code == 200
    assert recorded(server, mine) == {first: "~turn:0"}
    assert give(server, session_id=session, feedback_id=mine, value=0).status_code == 409
    assert give(server, session_id=other, feedback_id=mine).status_code == 409
    assert len(recorded(server, give(server, session_id=session).json()["feedback_id"])) == MOST_RESPONSES


def test_the_process_that_looks_for_sessions_may_die_and_shows_no_setting(server: LiveServer) -> None:
    session = str(uuid.uuid4())
    first = turn(server, session)
    assert recorded(server, give(server, session_id=session).json()["feedback_id"]).keys() == {first}
    (worker,) = (
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "serve.reading.session_worker" in child.cmdline()
    )
    assert worker.cmdline()[-1] == "serve.reading.session_worker"
    worker.kill()
    worker.wait(180)
    assert recorded(server, give(server, session_id=session).json()["feedback_id"]).keys() == {first}


def test_a_session_without_a_recorded_response_is_refused_with_404(server: LiveServer) -> None:
    unstored = str(uuid.uuid4())
    turn(server, unstored, store=False)
    for session in (unstored, "never seen", "' OR true --"):
        answer = give(server, session_id=session)
        assert answer.status_code == 404, answer.text
        assert answer.json()["errors"][0]["field"] == "session_id"
        assert "serve.session_days" in answer.json()["detail"]


def test_a_session_whose_responses_are_all_too_old_is_refused_with_404_and_of_others_the_old_ones_do_not_count(
    server: LiveServer,
) -> None:
    """serve.session_days is 7."""
    expired, going_on = str(uuid.uuid4()), str(uuid.uuid4())
    ages = {(expired, "old"): 7.01, (going_on, "old"): 7.01, (going_on, "young"): 6.99}
    rows = []
    for (session, name), days in ages.items():
        at = datetime.now(UTC) - timedelta(days=days)
        rows.append(interaction(f"{name} of {session}", session_id=session, created_at=at, completed_at=at))
    put(Lake(str(server.home / "lake"), LakeConfig()), "interactions", rows)

    answer = give(server, session_id=expired)
    assert answer.status_code == 404, answer.text
    assert answer.json()["errors"][0]["field"] == "session_id"
    assert "in the last 7 days (serve.session_days)" in answer.json()["detail"]
    answer = give(server, session_id=going_on)
    assert answer.status_code == 201, answer.text
    assert recorded(server, answer.json()["feedback_id"]) == {f"young of {going_on}": "~turn:0"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "response_id"),
        ({"session_id": "s", "response_id": "r"}, "response_id"),
        ({"session_id": "s", "kind": "comment", "value": None, "text": "t"}, "session_id"),
        ({"session_id": "s", "kind": "preference", "value": None, "rejected_response_id": "r"}, "session_id"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 201}, "session_id"),
        ({"response_id": "r", "feedback_id": "x~turn:1~r"}, "feedback_id"),
    ],
)
def test_feedback_on_no_or_two_things_is_refused_by_name(server: LiveServer, body: dict[str, Any], field: str) -> None:
    answer = give(server, **body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["field"] == field


async def test_what_a_try_that_was_not_acknowledged_said_of_an_earlier_turn_is_not_contradicted(
    tmp_path: Path,
) -> None:
    folder, lake = tmp_path / "journal", Lake(str(tmp_path / "lake"), LakeConfig(lock_timeout_s=60))
    lake.create()
    journal, seen = Journal(folder, JournalConfig(folder=str(folder)), "r"), SeenFeedback(lake, folder)
    journal.open()
    seen.open()
    recorder = Recorder(journal, seen, Metrics())
    row = thumb("second", 1.0, feedback_id="f")
    earlier, _ = session_rows(row, ["first", "second"])
    assert await recorder.record_feedback(earlier, generated_id=False) == "new"  # and then the disk was full
    said = [
        await recorder.record_session_feedback(row | {"value": value}, ["first", "second"], generated_id=False)
        for value in (0.0, 1.0, 1.0)
    ]
    assert said == ["conflict", "new", "same"]
    journal.close()
    seen.close()


async def test_feedback_on_a_session_that_an_erasure_removes_is_not_acknowledged_as_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that on a response: refused while the erasure is not done, and new behind it."""
    folder, lake = tmp_path / "journal", Lake(str(tmp_path / "lake"), LakeConfig(lock_timeout_s=60))
    lake.create()
    row, responses = thumb("second", 1.0, feedback_id="f", source="eve"), ["first", "second"]
    put(lake, "feedback", session_rows(row, responses))
    with monkeypatch.context() as patch:
        patch.setattr("feedback.maintenance.erasure._drain", interrupt)
        with pytest.raises(KeyboardInterrupt):
            erase(lake, tmp_path / "elsewhere", Target(user="eve"))
    journal, seen = Journal(folder, JournalConfig(folder=str(folder)), "r"), SeenFeedback(lake, folder)
    journal.open()
    seen.open()
    recorder = Recorder(journal, seen, Metrics())
    with pytest.raises(Problem, match="an erasure that has begun may remove it"):
        await recorder.record_session_feedback(row, responses, generated_id=False)
    assert finish_erasures(lake, folder)["feedback"] == 2
    row |= {"created_at": datetime.now(UTC)}
    said = [await recorder.record_session_feedback(row, responses, generated_id=False) for _ in range(2)]
    assert said == ["new", "same"]
    journal.close()
    seen.close()
    seal(lake, folder)
    assert lake.counts()["feedback"] == 2


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt
