"""A server that sleeps while others have its devices: nobody's request is lost, and it never stays asleep."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.tiny_model import make_model_folder
from serve.middleware.api_keys import create_key
from serve.observability.audit import AuditLog
from serve.policies.store import PolicyStore
from tests.serve.conftest import LiveServer, start_server, stop_server

WAIT_S = 6.0


@pytest.fixture(scope="module")
def sleeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that may be asked to sleep. Requests wait for seconds, and no token ends a response."""
    home = tmp_path_factory.mktemp("sleeper")
    store = PolicyStore(home / "policies")
    for number in range(2):
        folder = make_model_folder(home / f"model{number}", number, eos=False, context=4096)
        store.publish(folder, parent=number or None, lineage={"test": True}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    sleep = {"allowed": True, "wait_s": WAIT_S, "drain_timeout_s": 1.5, "waiting_requests": 8}
    live = start_server(home, store, sleep=sleep)
    yield live
    assert stop_server(live) == 0, live.log.read_text()[-3000:]


async def say(client: httpx.AsyncClient, path: str, holder: str = "training", **more: Any) -> dict[str, Any]:
    answer = await client.post(path, json={"holder": holder, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def state(client: httpx.AsyncClient) -> str:
    """By /health, which is open to all."""
    return str((await client.get("/health")).json().get("sleep", "awake"))


async def until(client: httpx.AsyncClient, wanted: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while await state(client) != wanted:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.fixture
async def asked(sleeper: LiveServer) -> Any:
    async with httpx.AsyncClient(base_url=sleeper.url, timeout=60) as client:
        yield client
        for holder in (await say(client, "/server/wake"))["holders"]:
            await say(client, "/server/wake", holder)
        assert await state(client) == "awake"


async def test_requests_wait_while_it_sleeps_and_are_answered_and_recorded_when_it_wakes(
    asked: httpx.AsyncClient, sleeper: LiveServer
) -> None:
    assert (await say(asked, "/server/sleep", lease_s=60, why="a test"))["state"] == "asleep"
    assert await state(asked) == "asleep"
    ready = await asked.get("/ready")
    assert (ready.status_code, "sleeps" in ready.text, ready.headers["retry-after"]) == (503, True, "5")
    body = {"prompt": "wait", "max_tokens": 8, "user": "waits"}
    waiting = [asyncio.create_task(asked.post("/generate", json=body)) for _ in range(3)]
    chat = {"model": "millrace", "prompt": "wait", "max_tokens": 8, "user": "waits"}
    waiting.append(asyncio.create_task(asked.post("/v1/completions", json=chat)))
    streamed = asyncio.create_task(asked.post("/generate", json=body | {"stream": True}))
    await asyncio.sleep(1.0)
    assert not any(task.done() for task in (*waiting, streamed))
    assert (await asked.post("/server/sleep", json={"holder": "training", "lease_s": 60})).json()["waiting"] == 5
    assert "millrace_sleep_asleep 1.0" in (await asked.get("/metrics")).text
    assert (await say(asked, "/server/wake"))["state"] == "awake"
    answers = await asyncio.gather(*waiting, streamed)
    assert [answer.status_code for answer in answers] == [200] * 5
    assert "event: done" in answers[-1].text
    ids = {response["response_id"] for answer in answers[:3] for response in answer.json()["responses"]}
    rows = {row["response_id"]: row for row in sleeper.rows("interactions", "\"user\" = 'waits'")}
    assert len(rows) == 5
    assert ids <= rows.keys()
    assert {row["status"] for row in rows.values()} == {"complete"}


async def test_what_waits_too_long_or_with_too_many_gets_503_with_retry_after(asked: httpx.AsyncClient) -> None:
    await say(asked, "/server/sleep", lease_s=60)
    began = time.monotonic()
    waiting = [asyncio.create_task(asked.post("/generate", json={"prompt": "a", "max_tokens": 2})) for _ in range(8)]
    await asyncio.sleep(0.5)
    ninth = await asked.post("/generate", json={"prompt": "a", "max_tokens": 2})
    assert time.monotonic() - began < WAIT_S
    answers = await asyncio.gather(*waiting)
    assert WAIT_S - 0.1 < time.monotonic() - began < WAIT_S + 20
    for answer in (*answers, ninth):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
        assert "the server sleeps" in answer.json()["detail"]
    chat = await asked.post("/server/wake", json={"holder": "training"})
    assert chat.json()["state"] == "awake"


async def test_a_client_that_leaves_while_it_waits_leaves_its_place_and_is_not_answered(
    asked: httpx.AsyncClient, sleeper: LiveServer
) -> None:
    await say(asked, "/server/sleep", lease_s=60)
    body = {"prompt": "a", "max_tokens": 2, "user": "leaves"}
    for _ in range(12):  # more than may wait
        with pytest.raises(httpx.ReadTimeout):
            await asked.post("/generate", json=body, timeout=0.2)
    for _ in range(50):
        if not (waiting := (await say(asked, "/server/sleep", lease_s=60))["waiting"]):
            break
        await asyncio.sleep(0.1)
    assert waiting == 0
    await say(asked, "/server/wake")
    assert (await asked.post("/generate", json=body | {"user": "stays"})).status_code == 200
    assert len(sleeper.rows("interactions", "\"user\" = 'stays'")) == 1
    assert not sleeper.rows("interactions", "\"user\" = 'leaves'")


async def test_who_lets_go_before_it_sleeps_has_it_awake_behind_that(asked: httpx.AsyncClient) -> None:
    long = {"prompt": "l", "max_tokens": 4000, "temperature": 0}
    at_work = [asyncio.create_task(asked.post("/generate", json=long)) for _ in range(6)]
    await asyncio.sleep(0.5)
    sleeping = asyncio.create_task(say(asked, "/server/sleep", lease_s=600))
    await asyncio.sleep(0.3)  # it has begun to, and waits for those
    assert (await say(asked, "/server/wake"))["state"] == "awake"
    await sleeping
    assert await state(asked) == "awake"
    await asyncio.gather(*at_work)


async def test_a_client_that_does_not_read_does_not_keep_it_awake(
    asked: httpx.AsyncClient, sleeper: LiveServer
) -> None:
    host = httpx.URL(sleeper.url)
    body = json.dumps({"prompt": "a", "max_tokens": 3000, "n": 8, "stream": True}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: {host.host}\r\nContent-Type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host.host, host.port or 80))
        client.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await asyncio.sleep(3.0)
        assert (await say(asked, "/server/sleep", lease_s=60))["state"] == "asleep"
        await say(asked, "/server/wake")
    assert (await asked.post("/generate", json={"prompt": "a", "max_tokens": 2})).status_code == 200


async def test_a_lease_that_is_not_renewed_ends_by_itself_and_one_that_is_lasts(asked: httpx.AsyncClient) -> None:
    await say(asked, "/server/sleep", lease_s=1.5)
    for _ in range(4):
        await asyncio.sleep(0.7)
        assert (await say(asked, "/server/sleep", lease_s=1.5))["state"] == "asleep"
    waits = asyncio.create_task(asked.post("/generate", json={"prompt": "a", "max_tokens": 2}))
    await until(asked, "awake", 20)  # and nobody has told it
    assert (await waits).status_code == 200
    assert (await say(asked, "/server/wake"))["state"] == "awake", "to let go twice is no error"


async def test_it_sleeps_while_anybody_holds_a_lease(asked: httpx.AsyncClient) -> None:
    await say(asked, "/server/sleep", "training", lease_s=60)
    assert (await say(asked, "/server/sleep", "scoring", lease_s=60))["holders"].keys() == {"training", "scoring"}
    found = await say(asked, "/server/wake", "training")
    assert (found["state"], list(found["holders"])) == ("asleep", ["scoring"])
    assert (await say(asked, "/server/wake", "scoring"))["state"] == "awake"


async def test_requests_at_work_end_first_and_those_that_take_too_long_are_aborted_with_their_tokens_on_record(
    asked: httpx.AsyncClient, sleeper: LiveServer
) -> None:
    short = {"prompt": "short", "max_tokens": 20, "user": "drained", "stop_token_ids": []}
    quick = [asyncio.create_task(asked.post("/generate", json=short)) for _ in range(4)]
    await asyncio.sleep(0.02)
    assert (await say(asked, "/server/sleep", lease_s=60))["state"] == "asleep"
    assert {answer.status_code for answer in await asyncio.gather(*quick)} == {200}
    await say(asked, "/server/wake")

    long = {
        "prompt": "l",
        "max_tokens": 4000,
        "temperature": 0,
        "user": "cut",
    }  # a greedy response goes round in circles
    slow = [asyncio.create_task(asked.post("/generate", json=long | {"stream": i % 2 == 0})) for i in range(6)]
    await asyncio.sleep(0.5)
    assert (await say(asked, "/server/sleep", lease_s=60))["state"] == "asleep"
    for i, answer in enumerate(await asyncio.gather(*slow)):
        assert answer.status_code == (200 if i % 2 == 0 else 503)
        assert "cut off" in answer.text
    rows = sleeper.rows("interactions", "\"user\" = 'cut'")
    assert [row["status"] for row in rows] == ["aborted"] * 6, "each is on record, as far as it came"
    assert any(row["response_token_ids"] for row in rows)
    await say(asked, "/server/wake")
    assert (await asked.post("/generate", json=short)).status_code == 200


async def test_what_is_promoted_while_it_sleeps_is_served_when_it_is_awake(
    asked: httpx.AsyncClient, sleeper: LiveServer
) -> None:
    await say(asked, "/server/sleep", lease_s=60)
    pointer = sleeper.promote(2)
    await asyncio.sleep(0.5)
    assert (await asked.get("/policy")).json()["version"] == 1
    await say(asked, "/server/wake")
    policy = await asyncio.to_thread(sleeper.settle, pointer)
    assert (policy["version"], policy["failed"]) == (2, None)
    answer = await asked.post("/generate", json={"prompt": "a", "max_tokens": 4})
    assert answer.json()["policy_version"] == 2


async def test_who_has_it_sleep_is_in_the_audit_log_and_renewals_are_not(
    asked: httpx.AsyncClient, sleeper: LiveServer
) -> None:
    log = AuditLog(sleeper.home / "audit.jsonl")
    before = len(log.entries())
    for _ in range(3):
        await say(asked, "/server/sleep", "audited", lease_s=60, why="its turn")
    await say(asked, "/server/wake", "audited")
    slept, woke = log.entries()[before:]
    assert (slept.action, slept.outcome) == ("server.sleep", "done")
    assert (slept.subject["holder"], slept.subject["why"]) == ("audited", "its turn")
    assert (woke.action, woke.subject, woke.outcome) == ("server.wake", {"holder": "audited"}, "done")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/server/sleep", {"holder": "h"}, "lease_s"),
        ("/server/sleep", {"holder": "h", "lease_s": 0}, "lease_s"),
        ("/server/sleep", {"holder": "h", "lease_s": 1e6}, "lease_s"),
        ("/server/sleep", {"holder": "", "lease_s": 5}, "holder"),
        ("/server/sleep", {"holder": "h", "lease_s": 5, "level": 2}, "level"),
        ("/server/wake", {}, "holder"),
    ],
)
async def test_a_bad_body_is_refused_by_the_field_and_changes_nothing(
    asked: httpx.AsyncClient, path: str, body: dict[str, Any], field: str
) -> None:
    answer = await asked.post(path, json=body)
    assert answer.status_code == 422
    assert field in json.dumps(answer.json()["errors"])
    assert await state(asked) == "awake"


async def test_a_server_that_was_not_started_to_sleep_says_so(client: httpx.AsyncClient) -> None:
    for path, body in (("/server/sleep", {"holder": "h", "lease_s": 5}), ("/server/wake", {"holder": "h"})):
        answer = await client.post(path, json=body)
        assert answer.status_code == 409
        assert "set devices.use=in_turns" in answer.json()["detail"]


def test_it_stops_while_it_sleeps_and_needs_an_admins_key(tmp_path: Path, model_folders: list[Path]) -> None:
    store = PolicyStore(tmp_path / "policies")
    store.publish(model_folders[0], parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    _, admin = create_key(tmp_path / "keys.json", name="admin", tenant="t", scopes=["admin"])
    _, plain = create_key(tmp_path / "keys.json", name="plain", tenant="t", scopes=["generate"])
    live = start_server(tmp_path, store, sleep={"allowed": True, "wait_s": 120})
    body = {"holder": "h", "lease_s": 600}
    try:
        assert httpx.post(f"{live.url}/server/sleep", json=body, timeout=60).status_code == 401
        assert httpx.post(f"{live.url}/server/sleep", json=body, headers={"X-API-Key": plain}).status_code == 403
        answer = httpx.post(f"{live.url}/server/sleep", json=body, headers={"X-API-Key": admin}, timeout=60)
        assert answer.json()["state"] == "asleep"
    finally:
        began = time.monotonic()
        assert stop_server(live) == 0, live.log.read_text()[-3000:]
    assert time.monotonic() - began < 60
