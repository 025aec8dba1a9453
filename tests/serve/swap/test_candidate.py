"""What is prepared of a candidate while the gate is still at work on it, in the running server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.policies.store import Policy
from tests.serve.conftest import LiveServer

Publish = Callable[[], Policy]


@pytest.fixture
async def publish(server: LiveServer, model_folders: list[Path]) -> AsyncIterator[Publish]:
    """Publishes another policy; at the end none is announced."""
    yield lambda: server.store.publish(model_folders[1], parent=1, lineage={}, metrics={})
    server.store.announce(None)
    await prepared(server, None)


async def prepared(server: LiveServer, version: int | None, timeout: float = 60) -> dict[str, Any]:
    """``GET /policy`` once it says that that version is prepared."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        policy: dict[str, Any] = (await asyncio.to_thread(httpx.get, f"{server.url}/policy")).json()
        if policy["prepared"] == version:
            return policy
        await asyncio.sleep(0.02)
    raise TimeoutError(f"policy {version} was not prepared; {server.log.read_text()[-2000:]}")


def spoil(policy: Policy) -> None:
    """Change a byte of the weights."""
    weights = policy.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"evil")


async def test_a_promoted_candidate_was_prepared_before_and_takes_an_exchange_alone(
    client: httpx.AsyncClient, server: LiveServer, publish: Publish
) -> None:
    before = (await client.get("/policy")).json()["version"]
    candidate = publish()
    server.store.announce(candidate.version)
    policy = await prepared(server, candidate.version)
    assert (policy["version"], policy["failed"]) == (before, None)
    answer = (await client.post("/generate", json={"prompt": "who are you?", "max_tokens": 4})).json()
    assert answer["policy_version"] == before, "what is not promoted serves nobody"
    spoil(candidate)  # nothing is read at the promotion: what was verified is what serves
    policy = await asyncio.to_thread(server.settle, server.promote(candidate.version))
    assert (policy["version"], policy["prepared"], policy["failed"]) == (candidate.version, None, None)
    assert policy["swaps"][-1]["ok"]
    answer = (await client.post("/generate", json={"prompt": "who are you?", "max_tokens": 4})).json()
    assert answer["policy_version"] == candidate.version
    await asyncio.to_thread(server.settle, server.promote(before))


async def test_a_candidate_that_is_announced_no_more_is_dropped_and_the_next_one_prepared(
    client: httpx.AsyncClient, server: LiveServer, publish: Publish
) -> None:
    serving = (await client.get("/policy")).json()
    refused, following = publish(), publish()
    server.store.announce(refused.version)
    await prepared(server, refused.version)
    server.store.announce(None)
    await prepared(server, None)
    server.store.announce(following.version)
    policy = await prepared(server, following.version)
    assert (policy["version"], policy["generation"]) == (serving["version"], serving["generation"])


async def test_what_is_promoted_serves_whichever_candidate_is_prepared(
    client: httpx.AsyncClient, server: LiveServer, publish: Publish
) -> None:
    before = (await client.get("/policy")).json()["version"]
    candidate, other = publish(), publish()
    server.store.announce(candidate.version)
    await prepared(server, candidate.version)
    policy = await asyncio.to_thread(server.settle, server.promote(other.version))
    assert (policy["version"], policy["prepared"], policy["failed"]) == (other.version, None, None)
    answer = (await client.post("/generate", json={"prompt": "who are you?", "max_tokens": 4})).json()
    assert answer["policy_version"] == other.version
    await asyncio.to_thread(server.settle, server.promote(before))


async def test_a_damaged_candidate_is_no_failure_until_it_is_promoted(
    client: httpx.AsyncClient, server: LiveServer, publish: Publish
) -> None:
    before = (await client.get("/policy")).json()["version"]
    damaged, good = publish(), publish()
    spoil(damaged)
    server.store.announce(damaged.version)
    while f"candidate {damaged.version} can't be prepared" not in server.log.read_text():
        await asyncio.sleep(0.02)
    policy = (await client.get("/policy")).json()
    assert (policy["version"], policy["prepared"], policy["failed"]) == (before, None, None)
    server.store.announce(good.version)
    await prepared(server, good.version)
    policy = await asyncio.to_thread(server.settle, server.promote(damaged.version))
    assert (policy["version"], policy["failed"]["version"]) == (before, damaged.version)
    assert (await asyncio.to_thread(server.settle, server.promote(before)))["failed"] is None


async def test_a_hint_that_can_t_be_read_names_no_candidate(client: httpx.AsyncClient, server: LiveServer) -> None:
    for unreadable in ("{", "[]", '{"version": "seven"}'):
        (server.store.root / "candidate.json").write_text(unreadable)
        assert server.store.announced() is None
    server.store.announce(None)
    assert (await client.get("/ready")).status_code == 200
