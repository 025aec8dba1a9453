"""What comes before a request is there: bounded, on a real uvicorn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from serve import connections
from serve.connections import HEAD_BYTES, BoundedHttp


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Tells how many bytes the body had."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    body = b"%d" % size
    head = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.5)
    config = uvicorn.Config(app, http=BoundedHttp, port=0, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await asyncio.wait_for(task, 10)


async def exchange(port: int, *pieces: bytes, pause: float = 0.05) -> bytes:
    """What comes back until the server closes, or nothing more comes for two seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        while part := await asyncio.wait_for(reader.read(1 << 16), 2):
            answer += part
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()
    return answer


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def test_a_head_without_an_end_is_refused(port: int) -> None:
    answer = await exchange(port, HEAD, b"X-Long: ", *[b"a" * 10_000] * 8, pause=0.01)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert str(HEAD_BYTES).encode() in answer


async def test_a_head_in_pieces_and_a_body_larger_than_a_head_may_be_are_taken(port: int) -> None:
    body = b"b" * (3 * HEAD_BYTES)
    rest = b"X-A: %b\r\nContent-Length: %d\r\n\r\n" % (b"a" * 20_000, len(body))
    answer = await exchange(port, HEAD, rest[:10_000], rest[10_000:], body, pause=0.01)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"%d" % len(body))


@pytest.mark.parametrize("sent", [b"", b"GET /hea"])
async def test_a_head_that_does_not_come_is_not_waited_for(port: int, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    assert await asyncio.wait_for(reader.read(), 3) == b""
    writer.close()


async def test_the_second_head_of_a_connection_is_bounded_too(port: int) -> None:
    whole = HEAD + b"Content-Length: 0\r\n\r\n"
    answer = await exchange(port, whole, b"GET / HTTP/1.1\r\nX: ", *[b"a" * 10_000] * 8, pause=0.01)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 431 " in answer


async def test_an_idle_connection_outlives_the_time_of_a_head(port: int) -> None:
    whole = HEAD + b"Content-Length: 0\r\n\r\n"
    answer = await exchange(port, whole, whole, pause=0.8)
    assert answer.count(b"HTTP/1.1 200 ") == 2
