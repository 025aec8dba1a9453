"""How an answer goes out while its request is worked on: at once when it is whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from typing import Final

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from serve.http import CLIENT_CLOSED_REQUEST, Problem, disconnected
from serve.recorded_request import ActiveRequest
from serve.time_limit import TimeLimit

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 0.5  # many requests are answered by then, and need no task that watches their client
_MAX_SILENCE_S: Final = 15.0  # between two bytes to the client; proxies close a connection that is silent for long
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


@contextmanager
def watching_client(request: Request, active: ActiveRequest) -> Iterator[None]:
    """Abort ``active`` when the client of a plain request goes away."""
    tasks: list[asyncio.Task[None]] = []

    async def watch() -> None:
        await disconnected(request.receive)
        active.abort("gone")

    timer = asyncio.get_running_loop().call_later(_PATIENCE_S, lambda: tasks.append(asyncio.create_task(watch())))
    try:
        yield
    finally:
        timer.cancel()
        for task in tasks:
            task.cancel()


class EventStream(Response):
    """Server-sent events, from a generator that is run to its end also when the client goes away.

    The status line goes out with the first event; what the generator raises before that is raised here. A client that
    goes away, or does not read for ``timeout_s``, aborts the request; ``work`` is closed when the request has ended.
    """

    def __init__(
        self,
        active: ActiveRequest,
        events: AsyncGenerator[bytes, None],
        work: ExitStack,
        error_event: Callable[[Problem], bytes],
        keep_alive: bytes | None = None,
    ) -> None:
        """``error_event``: what is sent for a problem after the first event; ``keep_alive``: in long silence."""
        self.status_code = 200
        self.background = None
        self._active = active
        self._events = events
        self._work = work
        self._error_event = error_event
        self._keep_alive = keep_alive
        self._send: Send
        self._limit: TimeLimit
        self._sent_at = 0.0  # 0: not even the status line
        self._gone = False
        self._ended = False
        self._failure: Problem | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises Problem if nothing has been sent."""
        self._send, self._limit = send, TimeLimit()
        run = self._active.recorder.spawn(self._run(), "stream")
        watch = asyncio.create_task(self._watch(receive))
        silence = None if self._keep_alive is None else asyncio.create_task(self._break_silence(self._keep_alive))
        try:
            await asyncio.shield(run)
        finally:
            watch.cancel()
            if silence is not None:
                silence.cancel()
            if not run.done():  # this call is cancelled; the work is not
                self._leave()
        failure = self._failure or self._active.problem
        scope["ended_with"] = 200 if failure is None else CLIENT_CLOSED_REQUEST if self._gone else failure.status
        if failure is not None and not self._sent_at:
            raise failure

    async def _run(self) -> None:
        """Send all events. A problem is kept, and sent if anything has been."""
        with self._work:
            try:
                async with aclosing(self._events):
                    async for event in self._events:
                        await self._put(event)
            except Problem as problem:
                self._failure = problem
            except Exception as error:
                log.exception("a stream failed")
                self._failure = Problem(500, f"{type(error).__name__}; the server's log has the details")
        if self._sent_at:
            await self._put(b"" if self._failure is None else self._error_event(self._failure), last=True)
        self._ended = True  # from here on a server calls every client disconnected
        self._limit.close()

    async def _watch(self, receive: Receive) -> None:
        """Notice a client that goes away."""
        await disconnected(receive)
        if not self._ended:
            self._leave()

    async def _break_silence(self, keep_alive: bytes) -> None:
        while not self._gone:
            await asyncio.sleep(_MAX_SILENCE_S)
            if 0 < self._sent_at < time.monotonic() - _MAX_SILENCE_S:
                self._sent_at = time.monotonic()
                with contextlib.suppress(OSError):  # the next event fails as well
                    await self._send({"type": "http.response.body", "body": keep_alive, "more_body": True})

    async def _put(self, data: bytes, *, last: bool = False) -> None:
        if self._gone:
            return
        try:
            with self._limit.until(asyncio.get_running_loop().time() + self._active.timeout_s):  # it may not read
                if not self._sent_at:
                    await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                self._sent_at = time.monotonic()
                await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        except (OSError, TimeoutError):
            self._leave()

    def _leave(self) -> None:
        """Nobody reads any more."""
        self._gone = True
        self._active.abort("gone")
