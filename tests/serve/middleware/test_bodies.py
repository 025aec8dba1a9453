"""Request bodies on their way: in time, in bounded memory, and none at the cost of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from serve.http import Problem
from serve.middleware import bodies
from serve.middleware.bodies import Bodies


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body has 0.3 seconds, one more for each 100 bytes, and one at most."""
    monkeypatch.setattr(bodies, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(bodies, "_BYTES_A_SECOND", 100)
    monkeypatch.setattr(bodies, "_MOST_S", 1.0)


def body(*pieces: bytes, pause: float = 0.0, ends: bool = True) -> Receive:
    """A client that sends pieces with pauses between them, and the end, or nothing more."""

    async def messages() -> AsyncIterator[Message]:
        for number, piece in enumerate(pieces, 1):
            yield {"type": "http.request", "body": piece, "more_body": number < len(pieces) or not ends}
            await asyncio.sleep(pause)
        await asyncio.sleep(60)

    coming = messages()
    return lambda: anext(coming)


async def test_a_body_in_pieces_is_read_whole() -> None:
    assert await Bodies(1000, 1).read(body(b"a", b"", b"bc", pause=0.01)) == b"abc"
    assert await Bodies(1000, 1).read(body(b"")) == b""


async def test_a_body_that_dribbles_is_not_waited_for_and_one_that_is_as_fast_as_it_must_be_is() -> None:
    with pytest.raises(Problem, match="bytes of the body came within 0 s") as slow:
        await Bodies(1000, 2).read(body(*[b"x"] * 1000, pause=0.1))
    assert slow.value.status == 408
    assert len(await Bodies(1000, 2).read(body(*[b"x" * 20] * 10, pause=0.05))) == 200  # in half a second
    with pytest.raises(Problem, match="came within 1 s"):
        await Bodies(10**6, 2).read(body(*[b"x" * 1000] * 100, pause=0.1))


async def test_when_too_many_are_on_their_way_the_one_that_is_so_for_longest_makes_room() -> None:
    reader = Bodies(1000, 2)
    first, second = (asyncio.create_task(reader.read(body(b"x", ends=False))) for _ in range(2))
    await asyncio.sleep(0)
    assert await reader.read(body(b"here")) == b"here"
    with pytest.raises(Problem, match="2 bodies are on their way already") as pushed:
        await first
    assert (pushed.value.status, pushed.value.retry_after) == (503, 1)
    with pytest.raises(Problem) as late:  # its time is its own
        await second
    assert late.value.status == 408
    assert await reader.read(body(b"a", b"b")) == b"ab"


@pytest.mark.parametrize("sizes", [[100], [99, 1], [10**6]])
async def test_a_body_over_the_limit_is_read_no_further(sizes: list[int]) -> None:
    with pytest.raises(Problem, match="larger than 99 bytes") as large:
        await Bodies(99, 1).read(body(*[b"x" * size for size in sizes], ends=False))
    assert large.value.status == 413


async def test_a_client_that_goes_away_is_not_waited_for() -> None:
    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    reader = Bodies(1000, 1)
    with pytest.raises(ClientDisconnect):
        await reader.read(gone)
    assert await reader.read(body(b"next")) == b"next"
