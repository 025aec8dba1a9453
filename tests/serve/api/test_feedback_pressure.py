"""Feedback while the disk does not keep up, or has failed: refused in time, and harmless to send again.

The routes, the journal, the ledger and the lake are the real ones; the server's engine is not started.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from feedback_rows import interaction, rows

from feedback.config import FeedbackConfig, JournalConfig, LakeConfig
from serve.admission import TokenBudget
from serve.api.answers import EventStream
from serve.api.generate import _events
from serve.app import create_app
from serve.config import ServeConfig
from serve.generation.request import GenerationRequest, Sampling
from serve.http import Problem
from serve.recorded_request import ActiveRequest, EngineSource, RecordedPrompt
from serve.runtime import Server


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Server]]:
    """A client of the routes, and the server behind them, with a journal that has room for four rows."""
    app = create_app(
        ServeConfig(policies=str(tmp_path / "policies"), replicas=str(tmp_path / "replicas")),
        FeedbackConfig(
            journal=JournalConfig(folder=str(tmp_path / "journal"), max_queued_rows=4, append_timeout_s=0.1),
            lake=LakeConfig(uri=str(tmp_path / "lake")),
        ),
    )
    server: Server = app.state.server
    server.lake.create()
    server.journal.open()
    server.ledger.open()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        yield client, server
    server.journal.close()
    server.ledger.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While this is not set, the journal's fdatasync does not return."""
    works = threading.Event()
    works.set()
    fdatasync = os.fdatasync

    def wait(fd: int) -> None:
        assert works.wait(120)
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", wait)
    return works


def thumb(feedback_id: str, value: int = 1) -> dict[str, Any]:
    return {"response_id": "r", "kind": "thumb", "value": value, "feedback_id": feedback_id}


async def test_past_the_journals_room_items_are_refused_and_the_whole_batch_can_be_sent_again(
    app: tuple[httpx.AsyncClient, Server], disk: threading.Event
) -> None:
    client, server = app
    items = [thumb(f"f{i}") for i in range(40)]
    disk.clear()
    asyncio.get_running_loop().call_later(1, disk.set)
    response = await client.post("/feedback/batch", json={"feedback": items})
    assert response.status_code == 200
    results = response.json()["results"]
    statuses = [result["status"] for result in results]
    assert set(statuses) == {201, 503}
    for result, item in zip(results, items, strict=True):
        assert result["feedback_id"] == item["feedback_id"]
        if result["status"] == 503:
            assert result["retry_after"] == pytest.approx(0.1)
            assert "waiting for the disk" in result["detail"]
    assert rows(server.journal.folder, "feedback").num_rows == statuses.count(201)
    while refused := [item for item, status in zip(items, statuses, strict=True) if status == 503]:
        again = (await client.post("/feedback/batch", json={"feedback": items})).json()["results"]
        assert [result["status"] for result, status in zip(again, statuses, strict=True) if status != 503] == [200] * (
            len(items) - len(refused)
        )
        statuses = [200 if result["status"] != 503 else 503 for result in again]
    recorded = rows(server.journal.folder, "feedback").column("feedback_id").to_pylist()
    assert sorted(recorded) == sorted(item["feedback_id"] for item in items)
    assert 'millrace_feedback_total{kind="thumb",verdict="refused"}' in server.metrics.render().decode()


async def test_single_feedback_past_the_journals_room_gets_503_with_retry_after(
    app: tuple[httpx.AsyncClient, Server], disk: threading.Event
) -> None:
    client, _ = app
    disk.clear()
    sent = [asyncio.create_task(client.post("/feedback", json=thumb(f"f{i}"))) for i in range(20)]
    done, _ = await asyncio.wait(sent, timeout=120, return_when="FIRST_COMPLETED")
    disk.set()
    (refused, *_) = done
    assert refused.result().status_code == 503
    assert refused.result().headers["Retry-After"] == "1"
    assert refused.result().headers["content-type"] == "application/problem+json"
    answers = await asyncio.gather(*sent)
    assert {answer.status_code for answer in answers} == {201, 503}


async def test_a_journal_that_is_broken_refuses_each_item_and_an_invalid_one_stays_invalid(
    app: tuple[httpx.AsyncClient, Server],
) -> None:
    client, server = app
    server.journal.close()
    response = await client.post("/feedback/batch", json={"feedback": [thumb("a"), thumb("b", 7), thumb("a", 0)]})
    assert [result["status"] for result in response.json()["results"]] == [503, 422, 503]
    assert response.json()["results"][0]["retry_after"] > 0


async def test_without_its_index_of_ids_feedback_is_refused_and_not_recorded(
    app: tuple[httpx.AsyncClient, Server],
) -> None:
    client, server = app
    server.ledger.close()
    single = await client.post("/feedback", json=thumb("a"))
    assert (single.status_code, single.headers["Retry-After"]) == (503, "5")
    assert "compared with what is recorded" in single.json()["detail"]
    assert rows(server.journal.folder, "feedback").num_rows == 0


async def test_a_server_that_is_stopping_takes_no_feedback(app: tuple[httpx.AsyncClient, Server]) -> None:
    client, server = app
    server.draining = True
    for path, body in (("/feedback", thumb("a")), ("/feedback/batch", {"feedback": [thumb("a")]})):
        response = await client.post(path, json=body)
        assert (response.status_code, response.headers["Retry-After"]) == (503, "5")


async def test_a_streams_end_that_found_no_room_is_recorded_as_an_error_when_there_is_some(
    app: tuple[httpx.AsyncClient, Server], disk: threading.Event
) -> None:
    _, server = app
    begun = [interaction(f"r{i}", response_token_ids=[], logprobs=[], policy_spans=[]) for i in range(12)]
    streams = [await server.recorder.begin(row, lambda row=row: row) for row in begun]  # type: ignore[misc]
    disk.clear()
    ends = [server.recorder.end([stream], [interaction(stream.response_id)]) for stream in streams]
    asyncio.get_running_loop().call_later(1, disk.set)
    results = await asyncio.gather(*ends, return_exceptions=True)
    refused = {stream.response_id for stream, result in zip(streams, results, strict=True) if result is not None}
    assert 0 < len(refused) < 12
    assert all(isinstance(result, Problem) and result.status == 503 for result in results if result is not None)
    async with asyncio.timeout(120):
        while server.journal.stats()["open_streams"]:
            await asyncio.sleep(0.01)
    ended = {row["response_id"]: row["status"] for row in rows(server.journal.folder, "interactions").to_pylist()}
    assert {response_id for response_id, status in ended.items() if status == "error"} == refused
    assert set(ended.values()) == {"error", "complete"}


async def test_where_the_start_of_one_response_is_refused_none_of_the_others_stays_open(
    app: tuple[httpx.AsyncClient, Server], disk: threading.Event
) -> None:
    _, server = app
    request = GenerationRequest(
        request_id="many", endpoint="/generate", replica="r", tenant="t", prompt_token_ids=[1], sampling=Sampling(n=12)
    )
    # The engine imports these when it is first used: seconds of the event loop, in which nothing would be refused.
    for module in ("vllm.inputs.engine", "vllm.sampling_params", "vllm.v1.engine.exceptions"):
        importlib.import_module(module)
    budget = TokenBudget(server.limiter, server.keyring.anonymous)
    with ExitStack() as work:
        active = work.enter_context(ActiveRequest(server.engine, server.recorder, budget, 60))
        prompt = RecordedPrompt(active, request, EngineSource(server.engine, request))
        stream = EventStream(active, _events(prompt, dict), work.pop_all(), lambda problem: b"")
    disk.clear()
    answer = asyncio.create_task(stream({"type": "http"}, asyncio.Event().wait, asyncio.Queue().put))  # type: ignore[arg-type]
    async with asyncio.timeout(120):
        while not server.journal.stats()["refused"]:
            await asyncio.sleep(0.01)
    disk.set()
    with pytest.raises(Problem, match="waiting for the disk"):  # not that the engine is not there
        await answer
    begun = rows(server.journal.folder, "interactions").column("response_id").to_pylist()
    assert 0 < len(set(begun)) < 12
    async with asyncio.timeout(120):
        while server.journal.stats()["open_streams"]:
            await asyncio.sleep(0.01)
    recorded = rows(server.journal.folder, "interactions").to_pylist()
    assert {row["response_id"] for row in recorded if row["status"] == "aborted"} == set(begun)
