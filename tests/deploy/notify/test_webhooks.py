"""Webhooks, against a real HTTP receiver."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from deploy.config import root
from deploy.config.root import ConfigError, Settings
from deploy.loop import promotion, records
from deploy.loop.records import CycleRecord, Stage
from deploy.notify import webhooks
from deploy.notify.events import Event, Position, end, since
from deploy.notify.webhooks import FAILED, FOLDER, SIGNATURE, TIMESTAMP, failures, notifying, payload
from loadtests.server import free_port
from serve.policies.experiments import Experiments
from tests.deploy.display.test_live_report import begin
from tests.http_receiver import receiving

SECRET = "a secret of the receiver's"


@dataclass
class Receiver:
    """What came: (path, headers, body). ``answers``: statuses to answer with, one a request; then 200."""

    url: str = ""
    came: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    holds: threading.Event = field(default_factory=threading.Event)

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, _, body in self.came]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()

    def take(path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str]]:
        found.came.append((path, headers, body))
        if path == "/slow":
            found.holds.wait(120)
        return found.answers.pop(0) if found.answers else 200, {"Location": f"{found.url}/elsewhere"}

    with receiving(take) as found.url:
        yield found
        found.holds.set()


def hooked(settings: Settings, **hooks: dict[str, object]) -> Settings:
    return root.load(settings.snapshot(), [("schedule.webhooks", json.dumps(hooks))], {})


@contextmanager
def told(settings: Settings) -> Iterator[None]:
    """Within, events are sent; those of before are not, unless they are a former run's."""
    with notifying(settings, first_wait_s=0.02, poll_s=0.02):
        files = [settings.path(FOLDER) / f"{name}.json" for name in settings.schedule.webhooks]
        until(lambda: all(file.exists() for file in files))
        yield


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def cycle(settings: Settings, number: int, status: str, reason: str | None = None) -> None:
    at = records.now()
    record = CycleRecord.model_validate(
        {"number": number, "status": status, "reason": reason, "started_at": at, "finished_at": at, "candidate": 2}
    )
    settings.path(settings.cycle.folder).mkdir(exist_ok=True)
    records.write(settings, record)


def moves(settings: Settings, model: Path) -> None:
    """Policy 2 is promoted and rolled back."""
    store = settings.policy_store()
    store.publish(model, parent=1, lineage={}, metrics={})
    store.promote(2, expected=1, who="cycle", why="cycle 1: passed the gate")
    promotion.rollback(store, who="ann", why="it is rude", to=1, override=True)


def test_what_an_error_says_stays_at_home(home_with_policy: Settings, model: Path) -> None:
    settings, text = home_with_policy, "KeyError: 'a prompt of ann' in /srv/secret/rewards.py"
    at = records.now()
    stage = Stage(name="train", started_at=at, ok=False, error=text)
    record = CycleRecord(number=1, status="failed", reason=text, started_at=at, finished_at=at, stages=[stage])
    settings.path(settings.cycle.folder).mkdir()
    records.write(settings, record)
    store = settings.policy_store()
    store.publish(model, parent=1, lineage={}, metrics={})
    moved = store.promote(2, expected=1, who="cycle", why="passed")
    store.move_back(moved, 1, who="replica-0", why=f"policy 2 was refused: {text}")
    begin(Experiments(store.root), state="ended", end={"decision": "failed", "at": "t", "who": "x", "why": text})
    found = [event for _, event in since(settings, Position(move=1)) if event is not None]
    assert [(event.event, event.stage) for event in found] == [
        ("failed", "train"), ("promoted", None), ("rolled_back", None), ("failed", None),
    ]  # fmt: skip
    assert [event.reason for event in found] == [
        "the stage train failed; `millrace status` and logs/cycle-000001-*.log say why",
        "passed",
        "replica-0 could not serve it; `millrace history` says why",
        "`millrace experiment show 1` says why",
    ]
    assert not any("ann" in json.dumps(event.body("home")) or "/srv" in event.text for event in found)


def test_each_of_the_four_is_told_once_and_nothing_of_before(
    home_with_policy: Settings, model: Path, receiver: Receiver
) -> None:
    cycle(home_with_policy, 1, "failed", "of before")
    settings = hooked(home_with_policy, all={"url": f"{receiver.url}/hook?room=1"})
    with told(settings):
        cycle(settings, 2, "refused", "no gain was shown")
        cycle(settings, 3, "skipped")
        cycle(settings, 4, "failed", "train ended with code 1")
        cycle(settings, 5, "running")
        moves(settings, model)
        until(lambda: len(receiver.came) == 4)
    found = {one["event"]: one for one in receiver.told}
    assert found.keys() == {"refused", "failed", "promoted", "rolled_back"}
    assert {path for path, _, _ in receiver.came} == {"/hook?room=1"}
    assert (found["refused"]["cycle"], found["refused"]["policy"]) == (2, 2)
    assert (found["failed"]["id"], found["failed"]["reason"]) == (
        "cycle-4",
        "it failed in none of its stages; `millrace status` and cycles/000004.json say why",
    )
    assert (found["promoted"]["policy"], found["promoted"]["previous"], found["promoted"]["who"]) == (2, 1, "cycle")
    back = found["rolled_back"]
    assert (back["policy"], back["previous"], back["who"], back["reason"]) == (2, 1, "ann", "it is rude")
    assert (found["promoted"]["serving"], back["serving"], back["override"]) == (2, 1, True)
    assert all(one["home"] == str(settings.home) for one in receiver.told)
    # What ends while nobody tells is told by the next start, once.
    cycle(settings, 5, "failed", "its process died")
    kept = settings.path(FOLDER) / "all.json"
    before = kept.read_bytes()

    def ids() -> list[str]:
        # Who was stopped between an answer and the note of it tells once more.
        return list(dict.fromkeys(str(one["id"]) for one in receiver.told))

    with told(settings):
        until(lambda: len(ids()) == 5 and kept.read_bytes() != before)
    with told(settings):
        cycle(settings, 6, "refused")
        until(lambda: len(ids()) == 6)
    assert ids()[4:] == ["cycle-5", "cycle-6"]
    assert failures(settings) == {"all": 0}


def test_an_experiment_that_ends_a_candidate_is_told_and_one_that_moved_the_pointer_only_as_that(
    home_with_policy: Settings,
) -> None:
    store = Experiments(home_with_policy.policy_store().root)
    begin(store)
    before = end(home_with_policy)
    assert list(since(home_with_policy, before)) == []  # it runs
    rolled_back = {"decision": "roll back", "at": "2026-03-01T00:00:00+00:00", "who": "cycle", "why": "harm: errors"}
    store.change(1, lambda one: replace(one, state="ended", end=rolled_back))
    [(after, event)] = since(home_with_policy, before)
    assert event is not None
    assert (event.event, event.experiment, event.policy, event.reason) == ("rolled_back", 1, 2, "harm: errors")
    assert after == replace(before, experiment=1)
    begin(store, number=2)
    store.change(2, lambda one: replace(one, state="ended", end=rolled_back, watched_from=5))
    assert [event for _, event in since(home_with_policy, after)] == [None]


def test_a_webhook_is_told_of_its_events_in_its_form_and_slack_reads_no_markup(
    home_with_policy: Settings, receiver: Receiver
) -> None:
    settings = hooked(home_with_policy, chat={"url": f"{receiver.url}/slack", "form": "slack", "events": ["refused"]})
    with told(settings):
        cycle(settings, 1, "failed", "no gain")
        cycle(settings, 2, "refused", "<!channel> & more")
        until(lambda: len(receiver.came) == 1)
    assert receiver.told == [{"text": f"Cycle 2, policy 2 was refused: &lt;!channel&gt; &amp; more ({settings.home})"}]
    long = Event("cycle-1", "failed", "", "text", "x" * 5000, 1)
    assert len(payload(settings.schedule.webhooks["chat"], long, "home")["text"]) == 1000


def test_requests_are_signed_with_the_environments_secret_which_no_snapshot_has(
    home_with_policy: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = hooked(home_with_policy, all={"url": receiver.url})
    with told(settings):
        cycle(settings, 1, "failed")
        until(lambda: len(receiver.came) == 1)
        assert SIGNATURE not in receiver.came[0][1]
        monkeypatch.setenv("MILLRACE_WEBHOOK_SECRET", SECRET)
        cycle(settings, 2, "failed")
        until(lambda: len(receiver.came) == 2)
    _, headers, body = receiver.came[1]
    key = SECRET.encode().ljust(64, b"\0")  # RFC 2104, by hand
    inner = hashlib.sha256(bytes(k ^ 0x36 for k in key) + headers[TIMESTAMP].encode() + b"." + body).digest()
    assert headers[SIGNATURE] == f"sha256={hashlib.sha256(bytes(k ^ 0x5C for k in key) + inner).hexdigest()}"
    assert abs(int(headers[TIMESTAMP]) - time.time()) < 600
    assert all(SECRET not in file.read_text() for file in settings.path("configs").iterdir())


def test_what_may_pass_is_tried_again_and_what_is_given_up_is_on_record_without_the_address(
    home_with_policy: Settings, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    settings = hooked(home_with_policy, all={"url": f"{receiver.url}/hidden-token", "attempts": 3})
    caplog.set_level(logging.INFO)
    receiver.answers = [503, 429, 200, 500, 500, 500, 404, 302]
    with told(settings):
        for number in (1, 2, 3, 4, 5):
            cycle(settings, number, "failed")
        until(lambda: len(receiver.came) == 9)
    sent = [one["id"] for one in receiver.told]
    assert sent == [*["cycle-1"] * 3, *["cycle-2"] * 3, "cycle-3", "cycle-4", "cycle-5"]
    file = settings.path(FOLDER) / f"all{FAILED}"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["id"], row["attempts"], row["error"]) for row in rows] == [
        ("cycle-2", 3, "it answered 500"),
        ("cycle-3", 1, "it answered 404"),
        ("cycle-4", 1, "it answered 302: redirects are not followed"),
    ]
    assert failures(settings) == {"all": 3}
    assert {path for path, _, _ in receiver.came} == {"/hidden-token"}  # and never /elsewhere
    assert "hidden-token" not in caplog.text + file.read_text()


def test_a_receiver_that_hangs_or_is_gone_holds_up_no_other_and_not_the_end(
    home_with_policy: Settings, receiver: Receiver
) -> None:
    settings = hooked(
        home_with_policy,
        slow={"url": f"{receiver.url}/slow", "timeout_s": 0.2, "attempts": 1},
        gone={"url": f"http://127.0.0.1:{free_port()}", "attempts": 2},
        hangs={"url": f"{receiver.url}/slow", "timeout_s": 300},
        good={"url": f"{receiver.url}/good"},
    )
    with told(settings):
        cycle(settings, 1, "failed")
        until(lambda: "/good" in {path for path, _, _ in receiver.came})
        until(lambda: failures(settings) == {"slow": 1, "gone": 1, "hangs": 0, "good": 0})
        began = time.monotonic()
    assert time.monotonic() - began < 30  # and not the 300 s that one request may still take
    errors = [json.loads((settings.path(FOLDER) / f"{name}{FAILED}").read_text())["error"] for name in ("slow", "gone")]
    assert errors == ["no answer within 0.2 s", "ConnectError"]


def test_what_was_delivered_is_not_sent_again_while_a_full_disk_keeps_no_position(
    home_with_policy: Settings, receiver: Receiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = hooked(home_with_policy, all={"url": receiver.url})
    with told(settings):
        monkeypatch.setattr(webhooks, "replace_file", _no_space)
        cycle(settings, 1, "failed")
        until(lambda: "No space left" in caplog.text)
        cycle(settings, 2, "failed")
        until(lambda: len(receiver.came) > 1)
        monkeypatch.undo()
        cycle(settings, 3, "failed")
        until(lambda: "cycle-3" in [one["id"] for one in receiver.told])
    assert [one["id"] for one in receiver.told] == ["cycle-1", "cycle-2", "cycle-3"]


def _no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_proxies_of_the_environment_are_not_used(
    home_with_policy: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    settings = hooked(home_with_policy, all={"url": receiver.url})
    with told(settings):
        cycle(settings, 1, "failed")
        until(lambda: len(receiver.came) == 1)


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        ({"url": "file:///etc/passwd"}, "no http or https address"),
        ({"url": "ftp://example.org/x"}, "no http or https address"),
        ({"url": "http:///nobody"}, "no http or https address"),
        ({"url": "https://example.org/secret@\n"}, "no http or https address"),
        ({"url": "https://example.org:port/secret@"}, "no http or https address"),
        ({"url": "https://xn--a/secret@"}, "no http or https address"),
        ({"url": "https://ann:secret@example.org/x"}, "a user name or password"),
        ({"url": "https://example.org", "events": ["exploded"]}, "events"),
        ({"url": "https://example.org", "secret_variable": "MILLRACE__X"}, "secret_variable"),
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_starts(
    settings: Settings, hook: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        hooked(settings, all=hook)
    assert "secret@" not in str(refused.value)


def test_an_address_is_masked_where_settings_are_shown(settings: Settings) -> None:
    from deploy.config import describe

    hook = hooked(settings, all={"url": "https://hooks.example/T0/B0/xyz"})
    assert "xyz" not in describe.to_yaml(hook)


def test_without_webhooks_nothing_is_started(settings: Settings) -> None:
    before = threading.active_count()
    with notifying(settings):
        assert threading.active_count() == before
    assert not settings.path(FOLDER).exists()
    assert end(settings) == Position()


def test_a_record_that_can_not_be_read_is_said_and_told_once_it_can(
    home_with_policy: Settings, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    settings = hooked(home_with_policy, all={"url": receiver.url})
    with told(settings):
        folder = settings.path(settings.cycle.folder)
        folder.mkdir()
        (folder / "000001.json").write_text("{")
        until(lambda: "webhook all: ValidationError" in caplog.text)
        cycle(settings, 1, "failed")
        until(lambda: len(receiver.came) == 1)
    assert caplog.text.count("webhook all:") == 1
    assert records.load_all(settings)[0].started_at + timedelta(hours=1) > records.now()
