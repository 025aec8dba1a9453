"""What comes before a request is there: bounded, on a real uvicorn."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from serve.config import ServeConfig, SsoConfig
from serve.middleware import connections
from serve.middleware.authentication import READ, Authenticator, headers_of
from serve.middleware.connections import HEAD_BYTES, BoundedHttp, connections_at_most
from serve.middleware.keyring import Keyring

SCOPES: list[Any] = []
GONE: list[str] = []
LARGE = 16 << 20


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Tells how many bytes the body had; at /refused without reading it; at /long only when the client has gone."""
    SCOPES.append(scope)
    size, more = 0, scope["path"] != "/refused"
    if scope["path"] == "/long":
        while (await receive())["type"] != "http.disconnect":
            pass
        GONE.append(scope["path"])
        return
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    body = b"x" * LARGE if scope["path"] == "/large" else b"%d" % size
    head = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    half = len(body) // 2
    await send({"type": "http.response.body", "body": body[:half], "more_body": True})
    await send({"type": "http.response.body", "body": body[half:]})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.5)
    monkeypatch.setattr(connections, "REST_TIMEOUT_S", 1.0)
    monkeypatch.setattr(connections, "REST_BYTES", 2 << 20)
    SCOPES.clear()
    GONE.clear()
    async with listening(BoundedHttp) as found:
        yield found


@asynccontextmanager
async def listening(http: type[asyncio.Protocol]) -> AsyncIterator[int]:
    """The port of a server with this protocol."""
    config = uvicorn.Config(app, http=http, ws="none", port=0, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await asyncio.wait_for(task, 120)


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


async def sent_until_closed(port: int, head: bytes, piece: bytes, most: int) -> int:
    """How many bytes of the endless ``piece`` can be sent behind ``head``; at most ``most``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    try:
        writer.write(head)
        while sent < most and not reader.at_eof():
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    finally:
        writer.close()
    return sent


MOST = 48 << 20
"""Bytes; what a client can send before it hears of the end, in the buffers of both sides too, is much less."""
REFUSED = b"POST /refused HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def test_a_head_without_an_end_is_refused(port: int) -> None:
    answer = await exchange(port, HEAD, b"X-Long: ", *[b"a" * 10_000] * 8, pause=0.01)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert str(HEAD_BYTES).encode() in answer


@pytest.mark.parametrize(
    "sent", [b"FOO / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET there HTTP/1.1\r\nHost: x\r\n\r\n", b"\0\r\n\r\n"]
)
async def test_what_is_no_http_request_is_refused_in_our_form(port: int, sent: bytes) -> None:
    head, _, body = (await exchange(port, sent)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/problem+json" in head
    assert json.loads(body)["status"] == 400


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
    assert await asyncio.wait_for(reader.read(), 120) == b""
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


ENDLESS = {
    "trailers": (b"1\r\nb\r\n0\r\n", b"X-Trailer: %b\r\n" % (b"t" * 1000) * 64),
    "one trailer": (b"1\r\nb\r\n0\r\nX-Trailer: ", b"t" * 65_536),
    "a chunk's extension": (b"1;", b"e" * 65_536),
}


@pytest.mark.parametrize("head", [HEAD, REFUSED], ids=["before the answer", "after it"])
@pytest.mark.parametrize("what", ENDLESS)
async def test_trailers_without_an_end_are_cut_off_and_none_is_kept(port: int, head: bytes, what: str) -> None:
    begins, piece = ENDLESS[what]
    assert await sent_until_closed(port, head + CHUNKED + begins, piece, MOST) < MOST
    (scope,) = SCOPES
    assert scope["headers"] == [(b"host", b"x"), (b"transfer-encoding", b"chunked")]


async def test_trailers_are_taken_and_are_no_headers_of_this_request_or_the_next(port: int) -> None:
    whole = HEAD + CHUNKED + b"3\r\nabc\r\n0\r\nX-Api-Key: stolen\r\nX-More: b\r\n\r\n"
    answer = await exchange(port, whole + whole, HEAD + b"Content-Length: 0\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert [name for scope in SCOPES for name, _ in scope["headers"] if name.startswith(b"x-")] == []


async def test_of_a_request_that_is_answered_already_so_much_is_read_and_no_more(port: int) -> None:
    head = REFUSED + b"Content-Length: %d\r\n\r\n" % (1 << 40)
    sent = await sent_until_closed(port, head, b"b" * 65_536, MOST)
    assert connections.REST_BYTES <= sent < MOST


async def test_the_rest_of_a_request_that_is_answered_already_is_not_waited_for(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REFUSED + b"Content-Length: 1000\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200 ")
    sent = 0
    while not reader.at_eof() and sent < 100:  # for ten seconds; it has one
        writer.write(b"b")
        sent += 1
        await asyncio.sleep(0.1)
    writer.close()
    assert reader.at_eof()


async def test_a_body_that_comes_after_its_answer_does_not_end_the_connection(port: int) -> None:
    body = b"b" * (1 << 20)
    head = REFUSED + b"Content-Length: %d\r\n\r\n" % len(body)
    answer = await exchange(port, head, body, HEAD + b"Content-Length: 0\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 2


async def test_line_ends_between_requests_do_not_keep_a_connection(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"\r\n")
    await asyncio.wait_for(reader.read(), 120)
    writer.close()


async def test_requests_that_wait_for_the_one_before_them_are_few(port: int) -> None:
    long = b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n"
    assert await sent_until_closed(port, long, b"GET /refused HTTP/1.1\r\n\r\n" * 1000, MOST) < MOST
    assert len(SCOPES) == 1
    gc.collect()
    assert sum(type(thing) is RequestResponseCycle for thing in gc.get_objects()) < 1000


async def test_pipelined_requests_are_answered_in_order_and_a_body_before_a_head_is_not_counted_as_head(
    port: int,
) -> None:
    body = b"b" * (2 * HEAD_BYTES)
    one = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    many = b"".join(HEAD + b"Content-Length: %d\r\n\r\n%b" % (n, b"b" * n) for n in range(10, 30))
    answer = await exchange(port, one + many + HEAD, b"Content-Length: 0\r\n\r\n")
    assert [int(part.rpartition(b"\r\n\r\n")[2]) for part in answer.split(b"HTTP/1.1 200 ")[1:]] == [
        len(body),
        *range(10, 30),
        0,
    ]


async def test_a_client_that_goes_away_is_noticed_behind_a_pipelined_request_too(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
    await writer.drain()
    while not SCOPES:
        await asyncio.sleep(0.01)
    writer.close()
    for _ in range(500):
        await asyncio.sleep(0.01)
        if GONE:
            break
    assert GONE


async def test_what_is_refused_is_not_answered_in_the_midst_of_another_answer(port: int) -> None:
    long = b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n"
    assert await exchange(port, long, b"nonsense\r\n\r\n") == b""
    assert await exchange(port, long, b"GET / HTTP/1.1\r\nX: ", *[b"a" * 10_000] * 8, pause=0.01) == b""


async def test_a_request_to_change_the_protocol_is_answered_as_it_is(port: int) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: YQ==\r\nSec-WebSocket-Version: 13\r\n"
    answer = await exchange(port, b"GET / HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("http", "heard"),
    [
        (BoundedHttp.believing(SsoConfig(header="X-User", proxies=["127.0.0.0/8"])), "ann"),
        (BoundedHttp.believing(SsoConfig(header="X-User", proxies=["127.0.0.1", "10.0.0.7"])), None),
        (BoundedHttp.believing(SsoConfig(header="X-Other", proxies=["127.0.0.0/8"])), None),
        (BoundedHttp, None),
        (HttpToolsProtocol, None),
        (H11Protocol, None),
    ],
)
async def test_who_the_user_is_only_a_connection_with_the_servers_own_settings_may_say(
    http: type[asyncio.Protocol], heard: str | None
) -> None:
    """Ray Serve's proxies may be another program's, or have settings of an earlier start."""
    config = ServeConfig(sso={"header": "X-User", "proxies": ["127.0.0.0/8"]})
    names = ("X-User", "X-Other", "X-Millrace-User", "millrace.user")
    SCOPES.clear()
    async with listening(http) as port, httpx.AsyncClient(timeout=60) as client:
        await client.get(f"http://127.0.0.1:{port}/", headers=dict.fromkeys(names, "ann"))
    [scope] = SCOPES
    assert Authenticator(Keyring(config), config).user(headers_of(scope, READ)) == heard


async def test_connections_beyond_those_that_leave_files_are_closed_at_once_and_others_stay() -> None:
    few: type[BoundedHttp] = type("Few", (BoundedHttp,), {"most": 2})
    async with listening(few) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert await exchange(port, HEAD + b"Content-Length: 0\r\n\r\n") == b""
        _, writer = held[0]
        writer.write(HEAD + b"Content-Length: 0\r\nConnection: close\r\n\r\n")
        assert (await held[0][0].read()).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(0.1)
        assert (await exchange(port, HEAD + b"Content-Length: 0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        for _, writer in held:
            writer.close()


def test_connections_leave_files_for_the_journal() -> None:
    assert connections_at_most() <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 256


class Noted(BoundedHttp):
    """It knows how many of its connections have ended. ``buffered``: what it takes before the application waits."""

    ended = 0
    buffered = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        if self.buffered:
            transport.set_write_buffer_limits(high=self.buffered)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        type(self).ended += 1


@pytest.mark.parametrize("buffered", [0, 2 * LARGE], ids=["an answer that waits", "an answer that is given"])
@pytest.mark.parametrize("takes", [0, 512], ids=["nothing", "a trickle"])
async def test_a_client_that_does_not_take_its_answer_is_let_go(
    monkeypatch: pytest.MonkeyPatch, buffered: int, takes: int
) -> None:
    monkeypatch.setattr(connections, "SEND_S", 0.5)
    monkeypatch.setattr(connections, "SENT_BYTES", 256 << 10)
    http: type[Noted] = type("Noted", (Noted,), {"buffered": buffered})
    async with listening(http) as port:
        with slow_client(port) as client:
            async with asyncio.timeout(60):
                while not http.ended:
                    with suppress(ConnectionError):
                        await asyncio.to_thread(client.recv, takes)
                    await asyncio.sleep(0.05)


async def test_a_client_that_takes_its_answer_slowly_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MiB in pieces of 64 KiB, some 8 s: each second more than it must."""
    monkeypatch.setattr(connections, "SEND_S", 2.0)
    async with listening(Noted) as port:
        with slow_client(port) as client:
            answer, since = 0, asyncio.get_running_loop().time()
            while piece := await asyncio.to_thread(client.recv, 512 << 10):
                answer += len(piece)
                await asyncio.sleep(0.03)
            assert answer > LARGE
            assert asyncio.get_running_loop().time() - since > connections.SEND_S


def slow_client(port: int) -> socket.socket:
    """A client that has asked for LARGE bytes, and takes what it is told to."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    client.settimeout(30)
    client.connect(("127.0.0.1", port))
    client.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    return client
