"""A closed loop of HTTP clients that costs little itself: each sends its next request when its last answer is whole.

One event loop, raw connections, prepared bodies and an HTTP parser in C: on a machine that also runs the server,
what a load generator burns is taken from what it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, cast

import httptools
import uvloop

CONNECT_TIMEOUT_S = 10
ANSWER_TIMEOUT_S = 120


@dataclass
class Load:
    """What a run saw; times in seconds. ``first``: until the first token's event, of streams only; ``silent``: streams
    that had none, as of tokens without a text.

    ``seconds`` ends with the last answer. Every request that was sent is answered and counts, also after the time is
    up: many clients are answered at once, in waves, and of a wave that is cut off a part would count with all its time.
    """

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    silent: int = 0

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.latencies) / self.seconds if self.latencies else 0.0


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, requests: Iterator[bytes], mark: bytes | None, load: Load, until: float) -> None:
        """``mark``: what the first token's event of a stream contains, and nothing before it; None: no stream."""
        self.requests = requests
        self.mark = mark
        self.load = load
        self.started = time.perf_counter()
        self.until = until
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport
        self.parser: Any = None
        self.sent = 0.0
        self.seen = False
        self.body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass
        self.send()

    def send(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.seen, self.body = self.mark is None, b""
        request = next(self.requests)
        self.sent = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self.seen and self.mark is not None and self.mark in body:
            self.seen = True
            self.load.first.append(time.perf_counter() - self.sent)
        if self.parser.get_status_code() != 200:
            self.body += body

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        self.load.silent += not self.seen
        if self.parser.get_status_code() != 200:
            self.load.failures.append(f"{self.parser.get_status_code()} {self.body[:200]!r}")
        else:  # also what ends after the time: of requests that come and go in waves, a part of one would not be fair
            self.load.latencies.append(now - self.sent)
            self.load.seconds = now - self.started
        if now < self.until and len(self.load.failures) < 10:
            # Not from within the parser, which is about to be replaced.
            asyncio.get_running_loop().call_soon(self.send)
        else:
            self.finish()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.load.failures.append(f"connection lost: {error}")
        self.finish()

    def finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        self.transport.close()


def run(ports: Sequence[int], requests: list[Iterator[bytes]], seconds: float, mark: bytes | None = None) -> Load:
    """Load 127.0.0.1 for so long with one client for each of ``requests``; they connect to the ``ports`` in turn."""
    with no_collector():
        return uvloop.run(_run(ports, requests, seconds, mark))


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """No garbage collection meanwhile: a full one takes half a second, which would count as the server's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _run(ports: Sequence[int], requests: list[Iterator[bytes]], seconds: float, mark: bytes | None) -> Load:
    load = Load()
    loop = asyncio.get_running_loop()
    until = time.perf_counter() + seconds
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        clients = [
            (await loop.create_connection(lambda r=r: Client(r, mark, load, until), "127.0.0.1", port))[1]  # type: ignore[misc]
            for r, port in zip(requests, cycle(ports), strict=False)
        ]
    async with asyncio.timeout(seconds + ANSWER_TIMEOUT_S):
        await asyncio.gather(*(client.done for client in clients))
    return load
