"""Two real replicas behind their front: who answers, through a promotion, deaths, and the death of what started it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
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
from serve.policies.store import PolicyStore
from tests.serve.conftest import LiveServer, start_server
from tests.trees import exposed, left_of, tree

PATIENCE_S = 300
USER, SSO_HEADER, SSO_PROXY = "ann@example.org", "X-Forwarded-User", "127.0.0.2"
BOTH = {"replica-0", "replica-1"}
KEYS: dict[str, str] = {}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, model_folders: list[Path]) -> Iterator[LiveServer]:
    """Policies 1 and 2 are there, 1 serves at first."""
    home = tmp_path_factory.mktemp("direct")
    store = PolicyStore(home / "policies")
    for number, folder in enumerate(model_folders[:2]):
        store.publish(folder, parent=number or None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    keys = home / "keys.json"
    _, KEYS["free"] = create_key(keys, name="free", tenant="acme", scopes=["generate", "admin"])
    create_key(keys, name="ann", tenant="acme", scopes=["read", "feedback"], sso=USER)
    live = start_server(
        home,
        store,
        sso={"header": SSO_HEADER, "proxies": [SSO_PROXY]},
        fleet={"replicas": 2, "num_cpus": 0.5, "canary_seconds": 4, "health_check_period_s": 2},
        swap={"poll_seconds": 0.2},
        drain_timeout_s=60,
    )
    deadline = time.monotonic() + PATIENCE_S
    while len(httpx.get(f"{live.url}/ready", timeout=60).json()["replicas"]) < 2:
        assert time.monotonic() < deadline, live.log.read_text()[-3000:]
        time.sleep(0.2)
    yield live
    live.process.kill()


@asynccontextmanager
async def client_of(fleet: LiveServer, timeout: float = 120) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {KEYS['free']}"}
    async with httpx.AsyncClient(base_url=fleet.url, timeout=timeout, headers=headers) as client:
        yield client


async def ask(client: httpx.AsyncClient, session: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if session is None else {"X-Session-Id": session}
    return await client.post("/generate", json={"prompt": "hello", "max_tokens": 8, **body}, headers=headers)


@asynccontextmanager
async def traffic(fleet: LiveServer, user: str) -> AsyncIterator[list[httpx.Response]]:
    """Answers to eight clients that ask until the block ends."""
    stop, answers = asyncio.Event(), list[httpx.Response]()
    async with client_of(fleet) as client:

        async def keep_asking(number: int) -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                session = f"{user} {number} {turn % 5}"
                answers.append(await ask(client, session, session_id=session, user=user, max_tokens=20))

        askers = [asyncio.create_task(keep_asking(number)) for number in range(8)]
        try:
            yield answers
        finally:
            stop.set()
            await asyncio.gather(*askers)


async def until(fleet: LiveServer, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait for ``GET /policy`` to say something."""
    deadline, policy = time.monotonic() + PATIENCE_S, dict[str, Any]()
    async with client_of(fleet) as client:
        while time.monotonic() < deadline:
            answer = await client.get("/policy")
            if answer.status_code == 200 and condition(policy := answer.json()):
                return policy
            await asyncio.sleep(0.1)
    raise TimeoutError(f"the fleet never came there: {policy}\n{fleet.log.read_text()[-3000:]}")


async def both_answer(fleet: LiveServer, user: str) -> None:
    """Return when each of the two replicas has answered ``user``: HAProxy asks four times a second who is there."""
    deadline = time.monotonic() + PATIENCE_S
    async with client_of(fleet) as client:
        while {row["replica"] for row in fleet.rows("interactions", f"\"user\" = '{user}'")} != BOTH:
            assert time.monotonic() < deadline
            await asyncio.gather(*(ask(client, user=user) for _ in range(4)))


def processes(fleet: LiveServer, name: str) -> list[psutil.Process]:
    return [p for p in tree(fleet.process.pid) if name in " ".join(p.cmdline())]


async def test_requests_are_answered_by_both_replicas_while_ray_serves_proxy_stands_still(fleet: LiveServer) -> None:
    await both_answer(fleet, "first")
    proxies = processes(fleet, "ray::ProxyActor")
    assert proxies
    for proxy in proxies:
        proxy.suspend()
    try:
        async with client_of(fleet, timeout=20) as client:
            answers = await asyncio.gather(*(ask(client, user="both") for _ in range(16)))
            assert (await client.get("/ready")).json()["replicas"] == ["replica-0", "replica-1"]
            text = (await client.get("/metrics")).text
            stream = {"prompt": "stream", "max_tokens": 40, "stream": True}
            async with client.stream("POST", "/generate", json=stream) as response:
                events = [line async for line in lines_of(response) if line.startswith("event:")]
    finally:
        for proxy in proxies:
            proxy.resume()
    assert {answer.status_code for answer in answers} == {200}
    assert {len(answer.headers.get_list("x-request-id")) for answer in answers} == {1}
    assert {row["replica"] for row in fleet.rows("interactions", "\"user\" = 'both'")} == BOTH
    assert 'millrace_policy_version{replica="replica-0"} 1.0' in text
    assert 'millrace_policy_version{replica="replica-1"} 1.0' in text
    assert events[-1] == "event: done"
    assert len(events) > 2
    assert exposed(tree(fleet.process.pid)) == {}


async def test_only_the_single_sign_ons_proxy_says_who_a_user_is(fleet: LiveServer) -> None:
    await only_the_proxy_says_who_a_user_is(fleet)


async def only_the_proxy_says_who_a_user_is(fleet: LiveServer) -> None:
    async with client_of(fleet) as client:
        (response,) = (await ask(client)).json()["responses"]
    keyring = Keyring(ServeConfig(keys=str(fleet.home / "keys.json")))
    keyring.load()
    cookie = BrowserSessions(keyring).begin_of_user(USER)
    thumb = {"response_id": response["response_id"], "kind": "thumb", "value": 1}
    session = {"Cookie": f"{COOKIE}={cookie}", "X-CSRF-Token": token_of(cookie), "Origin": fleet.url}
    forged = {SSO_HEADER: USER, "X-Forwarded-For": SSO_PROXY, "X-Millrace-Client": f"x {SSO_PROXY} 1"}
    for by, said, status in ((SSO_PROXY, {SSO_HEADER: USER}, 201), (SSO_PROXY, {}, 401), ("127.0.0.1", forged, 401)):
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(local_address=by), timeout=60) as client:
            answer = await client.post(f"{fleet.url}/feedback", json=thumb, headers=session | said)
        assert answer.status_code == status, (by, said, answer.text)


async def test_a_canary_gets_its_share_of_the_sessions_and_nobody_is_lost(fleet: LiveServer) -> None:
    async with traffic(fleet, "load") as answers:
        await asyncio.sleep(1)
        pointer = fleet.promote(2)
        await until(fleet, lambda policy: policy["phase"] == "canary")
        assert "requests go through Ray Serve's proxy" in fleet.log.read_text()
        await only_the_proxy_says_who_a_user_is(fleet)
        assert "requests go straight to the replicas" not in fleet.log.read_text()
        policy = await until(
            fleet,
            lambda policy: (
                policy["phase"] == "settled" and [one["version"] for one in policy["replicas"].values()] == [2, 2]
            ),
        )
        assert policy["failed"] is None
        deadline = time.monotonic() + PATIENCE_S
        while "requests go straight to the replicas" not in fleet.log.read_text():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
    assert {answer.status_code for answer in answers} == {200}
    rows = fleet.rows("interactions", "\"user\" = 'load'")
    assert len(rows) == len(answers)
    tried = [row for row in rows if row["variant"] == "canary"]
    assert tried
    assert {row["policy_spans"][-1]["policy_version"] for row in tried} == {2}
    in_their_share = [in_share(row["session_id"], pointer.generation, 0.5) for row in tried]
    assert sum(in_their_share) > 0.75 * len(tried)  # the others were on their way when it came out, or was taken back


async def test_a_replica_that_is_killed_under_load_fails_its_own_requests_alone_and_clearly(fleet: LiveServer) -> None:
    victim = processes(fleet, "ray::ServeReplica")[0]
    async with traffic(fleet, "cut") as answers:
        await asyncio.sleep(1)
        victim.kill()
        began = time.monotonic()
        await until(
            fleet,
            lambda policy: (
                [(one["state"], one["version"]) for one in policy["replicas"].values()] == [("ready", 2)] * 2
                and not victim.is_running()
                and time.monotonic() - began > 2
            ),
        )
        assert len(answers) > 20
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(refused) <= 8  # as many as were at work
    for answer in refused:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert answer.headers["content-type"] == "application/problem+json"
    promised = {r["response_id"] for a in answers if a.status_code == 200 for r in a.json()["responses"]}
    rows = fleet.rows("interactions", "\"user\" = 'cut' AND status = 'complete'")
    assert promised <= {row["response_id"] for row in rows}
    await both_answer(fleet, "new")  # the one that came in its place does


async def test_an_haproxy_that_is_killed_is_replaced_and_the_log_says_so(fleet: LiveServer) -> None:
    (front,) = processes(fleet, "haproxy")
    front.kill()
    async with client_of(fleet) as client:
        assert (await ask(client)).status_code == 200
    assert "it is started anew" in fleet.log.read_text()
    (again,) = processes(fleet, "haproxy")
    assert again.pid != front.pid


async def test_nothing_is_left_when_what_started_the_fleet_is_killed(fleet: LiveServer) -> None:
    """The last test of this fleet."""
    (front,) = processes(fleet, "haproxy")
    folder = Path(front.environ()["MILLRACE_RAY_FOLDER"])
    assert {"admin", "0", "1"} <= {path.name for path in (folder / "front").iterdir()}
    everything = tree(fleet.process.pid)
    fleet.process.send_signal(signal.SIGKILL)
    fleet.process.wait(60)
    assert await asyncio.to_thread(left_of, everything, 60) == []
    deadline = time.monotonic() + PATIENCE_S
    while folder.exists():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
