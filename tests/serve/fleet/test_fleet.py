"""Two real replicas on a real Ray Serve: routing, a promotion, a canary, a bad policy, a death, the end."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loadtests.event_lines import lines_of
from serve.config import ServeConfig
from serve.fleet.router import in_share
from serve.middleware.api_keys import create_key
from serve.middleware.browser_sessions import COOKIE, BrowserSessions, token_of
from serve.middleware.keyring import Keyring
from serve.policies import probe
from serve.policies.store import Pointer, PolicyStore
from tests.serve.conftest import LiveServer, start_server, stop_server
from tests.serve.middleware.test_connections import MOST, sent_until_closed

PATIENCE_S = 600
KEYS: dict[str, str] = {}
SLOW, POOR = 12, 600  # requests, tokens a minute
PLACES = 64  # in a replica
BODIES = 5 * PLACES  # on their way to a proxy
USER, SSO_HEADER, SSO_PROXY = "ann@example.org", "X-Forwarded-User", "127.0.0.2"
ANOTHER_ADDRESS = "127.0.0.9"  # that no other test has sent bad keys from


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, model_folders: list[Path]) -> Iterator[LiveServer]:
    """Two replicas. Policies 1 to 3 are there, 3 is damaged; 1 serves at first."""
    home = tmp_path_factory.mktemp("fleet")
    store = PolicyStore(home / "policies")
    for number, folder in enumerate(model_folders):
        store.publish(folder, parent=number or None, lineage={}, metrics={})
    weights = store.get(3).path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"evil")
    store.promote(1, expected=None, who="test", why="first")
    keys = home / "keys.json"
    _, KEYS["free"] = create_key(keys, name="free", tenant="acme", scopes=["generate", "admin"])
    _, KEYS["slow"] = create_key(keys, name="slow", tenant="acme", scopes=["generate"], requests_per_minute=SLOW)
    _, KEYS["poor"] = create_key(keys, name="poor", tenant="acme", scopes=["generate"], tokens_per_minute=POOR)
    create_key(keys, name="ann", tenant="acme", scopes=["read", "feedback"], sso=USER)
    live = start_server(
        home,
        store,
        sso={"header": SSO_HEADER, "proxies": [SSO_PROXY]},
        fleet={"replicas": 2, "num_cpus": 0.5, "canary_seconds": 4, "sticky": "session", "health_check_period_s": 2},
        swap={"poll_seconds": 0.2},
        limits={"concurrent_requests": PLACES, "bodies": BODIES},
        drain_timeout_s=60,
    )
    deadline = time.monotonic() + PATIENCE_S
    while len(httpx.get(f"{live.url}/ready", timeout=60).json()["replicas"]) < 2:
        assert time.monotonic() < deadline, live.log.read_text()[-3000:]
        time.sleep(0.2)
    time.sleep(2)  # until the router knows the second one
    yield live
    stop_server(live)


@pytest.fixture
async def fleet_client(fleet: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=fleet.url, timeout=120, limits=limits, headers=bearer("free")) as http:
        yield http


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[key]}"}


async def ask(client: httpx.AsyncClient, session: str | None = None, key: str = "free", **body: Any) -> httpx.Response:
    headers = bearer(key) if session is None else bearer(key) | {"X-Session-Id": session}
    return await client.post("/generate", json={"prompt": "hello", "max_tokens": 8, **body}, headers=headers)


async def until(client: httpx.AsyncClient, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait for ``GET /policy`` to say something."""
    deadline = time.monotonic() + PATIENCE_S
    policy: dict[str, Any] = {}
    while time.monotonic() < deadline:
        answer = await client.get("/policy")
        if answer.status_code == 200 and condition(policy := answer.json()):
            return policy
        await asyncio.sleep(0.1)
    raise TimeoutError(f"the fleet never came there: {policy}")


def is_settled(pointer: Pointer, version: int) -> Callable[[dict[str, Any]], bool]:
    return lambda policy: (
        policy["phase"] == "settled"
        and policy["generation"] >= pointer.generation
        and [replica["version"] for replica in policy["replicas"].values()] == [version] * 2
    )


def actors(fleet: LiveServer, name: str) -> list[psutil.Process]:
    return [p for p in psutil.Process(fleet.process.pid).children(recursive=True) if name in " ".join(p.cmdline())]


async def test_both_replicas_answer_and_a_session_stays_with_one(
    fleet: LiveServer, fleet_client: httpx.AsyncClient
) -> None:
    answers: list[httpx.Response] = []
    deadline = time.monotonic() + PATIENCE_S
    replicas: set[str] = set()
    while len(replicas) < 2:  # the router may have learned of the second one just now
        assert time.monotonic() < deadline, replicas
        answers += await asyncio.gather(*(ask(fleet_client, user="nobody") for _ in range(40)))
        replicas = {row["replica"] for row in fleet.rows("interactions", "\"user\" = 'nobody'")}
    assert replicas == {"replica-0", "replica-1"}
    answers += await asyncio.gather(*(ask(fleet_client, f"s{i % 8}", user=f"s{i % 8}") for i in range(48)))
    assert {answer.status_code for answer in answers} == {200}
    rows = fleet.rows("interactions")
    assert len(rows) == len(answers)
    by_session: dict[str, set[str]] = {}
    for row in rows:
        by_session.setdefault(row["user"], set()).add(row["replica"])
    assert all(len(by_session[f"s{i}"]) == 1 for i in range(8))


async def test_it_says_who_is_in_it_and_how_they_are(fleet_client: httpx.AsyncClient) -> None:
    assert (await fleet_client.get("/health")).json()["replicas"] == ["replica-0", "replica-1"]
    assert (await fleet_client.get("/ready")).json()["policy_version"] == 1
    policy = (await fleet_client.get("/policy")).json()
    assert (policy["version"], policy["phase"]) == (1, "settled")
    assert {name: replica["state"] for name, replica in policy["replicas"].items()} == {
        "replica-0": "ready",
        "replica-1": "ready",
    }
    text = (await fleet_client.get("/metrics")).text
    assert 'millrace_policy_version{replica="replica-0"} 1.0' in text
    assert 'millrace_policy_version{replica="replica-1"} 1.0' in text


async def test_a_keys_limits_are_those_of_the_whole_fleet_and_are_counted_on_when_their_store_dies(
    fleet: LiveServer, fleet_client: httpx.AsyncClient
) -> None:
    sessions = await sessions_by_replica(fleet, fleet_client)
    began = time.monotonic()
    slow = {"key": "slow", "user": "slow", "max_tokens": 1}
    answers = [await ask(fleet_client, session, **slow) for session in sessions.values()]  # each has one, at least
    answers += await asyncio.gather(*(ask(fleet_client, **slow) for _ in range(38)))
    passed = sum(answer.status_code == 200 for answer in answers)
    assert SLOW <= passed <= SLOW + 1 + SLOW / 60 * (time.monotonic() - began)
    assert {answer.json()["limit"] for answer in answers if answer.status_code != 200} == {"requests"}
    assert {row["replica"] for row in fleet.rows("interactions", "\"user\" = 'slow'")} == {"replica-0", "replica-1"}

    began = time.monotonic()
    answers = await asyncio.gather(*(ask(fleet_client, key="poor", max_tokens=115) for _ in range(20)))
    used = sum(answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200)
    assert 0.5 * POOR < used <= POOR + POOR / 60 * (time.monotonic() - began)
    assert {answer.status_code for answer in answers} == {200, 429}

    (store,) = actors(fleet, "ray::Buckets")
    store.kill()
    deadline = time.monotonic() + PATIENCE_S
    while (answer := await ask(fleet_client, key="slow", max_tokens=1)).status_code == 503:  # until there is another
        assert time.monotonic() < deadline, answer.text
    assert answer.status_code == 200  # by a fresh one
    answers = await asyncio.gather(*(ask(fleet_client, key="slow", max_tokens=1) for _ in range(38)))
    passed = sum(answer.status_code == 200 for answer in answers)
    assert passed <= SLOW + 1 + SLOW / 60 * (time.monotonic() - deadline + PATIENCE_S)
    assert {answer.status_code for answer in answers} <= {200, 429}


async def sessions_by_replica(fleet: LiveServer, client: httpx.AsyncClient) -> dict[str, str]:
    """A session for each of the two replicas."""
    found: dict[str, str] = {}
    deadline = time.monotonic() + PATIENCE_S
    for number in itertools.count():
        assert time.monotonic() < deadline, found
        session = f"probe {number}"
        assert (await ask(client, session, user=session, max_tokens=1)).status_code == 200
        (row,) = fleet.rows("interactions", f"\"user\" = '{session}'")
        found[row["replica"]] = session
        if len(found) == 2:
            return found
    raise AssertionError


async def test_connections_that_send_a_body_slowly_take_nobodys_place(
    fleet: LiveServer, fleet_client: httpx.AsyncClient
) -> None:
    host, _, port = fleet.url.removeprefix("http://").partition(":")
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: {bearer('free')['Authorization']}\r\n"
    with ExitStack() as slow:
        for _ in range(4 * PLACES):  # more than two replicas have, and as many as may wait for one
            connection = slow.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        await asyncio.sleep(0.5)  # until they have been given a place, if they are
        answers = await asyncio.gather(*(ask(fleet_client, max_tokens=1) for _ in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8


async def test_a_user_of_the_single_sign_on_sends_a_body_through_a_proxy_and_nobody_else_does_so_as_them(
    fleet: LiveServer, fleet_client: httpx.AsyncClient
) -> None:
    (response,) = (await ask(fleet_client, max_tokens=1)).json()["responses"]
    keyring = Keyring(ServeConfig(keys=str(fleet.store.root.parent / "keys.json")))
    keyring.load()
    cookie = BrowserSessions(keyring).begin_of_user(USER)
    thumb = {"response_id": response["response_id"], "kind": "thumb", "value": 1}
    session = {"Cookie": f"{COOKIE}={cookie}", "X-CSRF-Token": token_of(cookie), "Origin": fleet.url}
    for by, said, status in (
        (SSO_PROXY, {SSO_HEADER: USER}, 201),
        (SSO_PROXY, {}, 401),
        (SSO_PROXY, {"X-Millrace-User": USER}, 401),
        ("127.0.0.1", {SSO_HEADER: USER}, 401),
        ("127.0.0.1", {"X-Millrace-User": USER, "X-Forwarded-For": SSO_PROXY}, 401),
    ):
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(local_address=by), timeout=60) as client:
            answer = await client.post(f"{fleet.url}/feedback", json=thumb, headers=session | said)
        assert answer.status_code == status, (by, said, answer.text)


async def test_who_has_no_key_is_refused_before_a_body_is_read_and_ends_nobodys_upload(fleet: LiveServer) -> None:
    """Behind this one, bad keys from 127.0.0.1 are answered by 429 for a minute."""
    host, _, port = fleet.url.removeprefix("http://").partition(":")
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    own = f"Authorization: {bearer('free')['Authorization']}\r\n"
    writer.write((head % ("/generate", len(body), own)).encode() + body[:5])
    await writer.drain()
    await asyncio.sleep(0.5)
    with ExitStack() as strangers:
        answers = []
        for number in range(BODIES + 8):
            path = ("/generate", "/v1/completions", "/feedback", "/nothing", "/health")[number % 5]
            wrong = "" if number % 2 else "X-API-Key: mrk_abc_AAAAAAAAAAAAAAAAAAAAAAAA\r\n"
            connection = strangers.enter_context(socket.create_connection((host, int(port)), timeout=60))
            connection.sendall((head % (path, 1000, wrong)).encode() + b"{")
        for _ in range(2):
            connection = strangers.enter_context(socket.create_connection((host, int(port)), timeout=60))
            connection.sendall((head % ("/generate", 1000, "")).encode() + b"{")
            answers.append(await asyncio.to_thread(connection.recv, 12))
        assert answers == [b"HTTP/1.1 401"] * 2
        writer.write(body[5:])
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_proxys_connections_are_bounded_as_a_servers_are(fleet: LiveServer) -> None:
    host, _, port = fleet.url.removeprefix("http://").partition(":")
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head + b"X-Long: " + b"a" * 100_000)
    assert (await asyncio.wait_for(reader.readline(), 120)).startswith(b"HTTP/1.1 431 ")
    writer.close()
    trailers = b"X-Trailer: %b\r\n" % (b"t" * 1000) * 64
    begins = head + b"Transfer-Encoding: chunked\r\n\r\n1\r\nb\r\n0\r\n"
    assert await sent_until_closed(int(port), begins, trailers, MOST) < MOST


async def test_an_answer_streams_through_and_an_error_is_the_replicas_own(fleet_client: httpx.AsyncClient) -> None:
    body = {"prompt": "stream", "max_tokens": 40, "stream": True, "seed": 1}
    async with fleet_client.stream("POST", "/generate", json=body) as response:
        events = [line async for line in lines_of(response) if line.startswith("event:")]
    assert events[-1] == "event: done"
    assert len(events) > 2
    refused = await ask(fleet_client, max_tokens=0)
    assert refused.status_code == 422
    assert refused.headers["content-type"] == "application/problem+json"
    assert len(refused.headers.get_list("x-request-id")) == 1


async def test_a_promotion_under_load_fails_nobody_and_the_canary_has_its_share_and_its_label(
    fleet: LiveServer, fleet_client: httpx.AsyncClient
) -> None:
    stop = asyncio.Event()
    answers: list[httpx.Response] = []

    async def keep_asking(number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            session = f"load {number} {turn % 5}"
            answers.append(await ask(fleet_client, session, session_id=session, user="load", max_tokens=30))

    askers = [asyncio.create_task(keep_asking(number)) for number in range(8)]
    fleet.store.announce(2)  # the gate is at work on it
    deadline = time.monotonic() + PATIENCE_S
    while fleet.log.read_text().count("candidate 2 is prepared after") < 2:
        assert time.monotonic() < deadline, fleet.log.read_text()[-3000:]
        await asyncio.sleep(0.1)
    before = (await fleet_client.get("/policy")).json()
    assert (before["version"], before["phase"], before["failed"]) == (1, "settled", None)
    assert all(not replica["prepared"] and replica["version"] == 1 for replica in before["replicas"].values())
    pointer = fleet.promote(2)
    fleet.store.announce(None)
    trial = await until(fleet_client, lambda policy: policy["phase"] == "canary" and "canary" in variants(policy))
    (canary,) = trial["rollout"]["canaries"]
    assert trial["version"] == 1  # of the fleet as a whole, so that nobody takes it for promoted
    assert {name: replica["version"] for name, replica in trial["replicas"].items()} == {
        "replica-0": 1,
        "replica-1": 1,
    } | {canary: 2}
    policy = await until(fleet_client, is_settled(pointer, 2))
    assert policy["failed"] is None
    assert fleet.store.served() == {1, 2}
    await asyncio.sleep(0.5)
    stop.set()
    await asyncio.gather(*askers)

    assert {answer.status_code for answer in answers} == {200}
    rows = {row["response_id"]: row for row in fleet.rows("interactions", "\"user\" = 'load'")}
    assert len(rows) == len(answers)
    for answer in answers:
        (response,) = answer.json()["responses"]
        assert rows[response["response_id"]]["policy_spans"] == response["policy_spans"]
        assert rows[response["response_id"]]["status"] == "complete"
    tried = [row for row in rows.values() if row["variant"] == "canary"]
    assert tried
    assert {row["replica"] for row in tried} == {canary}
    assert {row["policy_spans"][-1]["policy_version"] for row in tried} == {2}
    # Requests that were on their way when the canary came out, or when it was taken back, may be anybody's.
    in_their_share = [in_share(row["session_id"], pointer.generation, 0.5) for row in tried]
    assert sum(in_their_share) > 0.5 * len(tried)


async def test_a_bad_policy_is_undone_and_the_pointer_goes_back(
    fleet: LiveServer, fleet_client: httpx.AsyncClient
) -> None:
    pointer = fleet.promote(3)
    policy = await until(fleet_client, lambda policy: policy["generation"] > pointer.generation)
    assert policy["failed"]["generation"] == pointer.generation
    assert "model.safetensors" in policy["failed"]["error"]
    assert [replica["version"] for replica in policy["replicas"].values()] == [2, 2]
    back = fleet.store.serving()
    assert back is not None
    assert (back.version, back.who) == (2, "fleet")
    assert fleet.store.served() == {1, 2}
    assert (await ask(fleet_client)).json()["policy_version"] == 2


async def test_what_a_canary_made_of_a_policy_that_its_probe_refuses_says_so(
    fleet: LiveServer, fleet_client: httpx.AsyncClient, model_folders: list[Path]
) -> None:
    stale = fleet.store.publish(
        model_folders[0], parent=2, lineage={}, metrics={}, probe=lambda _: probe.measure(model_folders[2])
    )
    stop = asyncio.Event()

    async def keep_asking(number: int) -> None:
        while not stop.is_set():
            await ask(fleet_client, f"refused {number}", user="refused", max_tokens=240, stream=number % 2 == 0)

    askers = [asyncio.create_task(keep_asking(number)) for number in range(8)]
    deadline = time.monotonic() + PATIENCE_S
    made_by_it: list[dict[str, Any]] = []
    while not made_by_it:  # the probe comes so soon after the exchange that there may be no step in between
        assert time.monotonic() < deadline
        pointer = fleet.promote(stale.version)
        policy = await until(fleet_client, partial(has_moved_on, pointer))
        assert "is not what serves" in policy["failed"]["error"]
        rows = fleet.rows("interactions", "\"user\" = 'refused'")
        made_by_it = [row for row in rows if stale.version in versions(row)]
    stop.set()
    await asyncio.gather(*askers)
    rows = fleet.rows("interactions", "\"user\" = 'refused'")
    made_by_it = [row for row in rows if stale.version in versions(row)]
    assert {row["variant"] for row in made_by_it} == {"canary"}
    assert {row["variant"] for row in rows if row not in made_by_it} == {None}


def has_moved_on(pointer: Pointer, policy: dict[str, Any]) -> bool:
    return policy["generation"] > pointer.generation and policy["phase"] == "settled"


def versions(row: dict[str, Any]) -> set[int]:
    return {span["policy_version"] for span in row["policy_spans"]}


async def test_a_replica_that_is_killed_fails_its_requests_clearly_and_is_replaced_at_the_fleets_version(
    fleet: LiveServer, fleet_client: httpx.AsyncClient
) -> None:
    victim = actors(fleet, "ray::ServeReplica")[0]
    engines = [p for p in victim.children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
    assert engines
    at_work = [asyncio.create_task(ask(fleet_client, max_tokens=240, n=8, user="cut")) for _ in range(16)]
    await asyncio.sleep(0.3)
    victim.kill()
    answers = await asyncio.gather(*at_work)
    assert {answer.status_code for answer in answers} <= {200, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert answer.headers["content-type"] == "application/problem+json"
            assert "retry-after" in answer.headers
    rows = fleet.rows("interactions", "\"user\" = 'cut' AND status = 'complete'")
    promised = {r["response_id"] for a in answers if a.status_code == 200 for r in a.json()["responses"]}
    assert promised <= {row["response_id"] for row in rows}

    policy = await until(
        fleet_client,
        lambda policy: (
            [(r["state"], r["version"]) for r in policy["replicas"].values()] == [("ready", 2)] * 2
            and victim.pid not in {p.pid for p in actors(fleet, "ray::ServeReplica")}
        ),
    )
    assert sorted(policy["replicas"]) == ["replica-0", "replica-1"]  # the name is free again
    assert not any(engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE for engine in engines)
    assert {(await ask(fleet_client)).json()["policy_version"] for _ in range(8)} == {2}


async def test_the_end_finishes_requests_seals_every_row_and_leaves_no_process(
    fleet: LiveServer, fleet_client: httpx.AsyncClient
) -> None:
    """The last test of this fleet: it stops it."""
    processes = psutil.Process(fleet.process.pid).children(recursive=True)
    at_work = [asyncio.create_task(ask(fleet_client, max_tokens=240, n=4, user="last")) for _ in range(4)]
    await asyncio.sleep(0.3)
    await asyncio.gather(*(ask(fleet_client, max_tokens=1) for _ in range(8)))  # sent later, so those have come in
    code = await asyncio.to_thread(stop_server, fleet)
    answers = [await task for task in at_work]
    assert code == 0, fleet.log.read_text()[-3000:]
    assert [answer.status_code for answer in answers] == [200] * 4
    _, left = psutil.wait_procs([p for p in processes if p.is_running()], timeout=60)
    assert [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert not list((fleet.home / "journal").glob("interactions*"))  # all of it is sealed
    recorded = {row["response_id"] for row in fleet.rows("interactions", "\"user\" = 'last'")}
    assert recorded == {r["response_id"] for answer in answers for r in answer.json()["responses"]}


def variants(policy: dict[str, Any]) -> list[str | None]:
    return [replica["variant"] for replica in policy["replicas"].values()]
