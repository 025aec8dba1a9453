"""``POST /generate`` with ``stream: true``: responses go out while they are made, and are recorded whatever happens.

The start of every response is durable before its first token goes out, its end before the final event does. A client
that goes away, or is cut off, leaves responses that are recorded as aborted, with the tokens so far.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from feedback.ids import uuid7
from serve import capture
from serve.api.http import Problem
from serve.engine import EngineError, EngineRefused, Generation

if TYPE_CHECKING:
    from serve.app import Server

log = logging.getLogger(__name__)

_MOST_SILENCE_S = 15.0  # between two bytes to the client; proxies close a connection that says nothing for long
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

Answer = Callable[[Generation, list[dict[str, Any]]], dict[str, Any]]
"""The body of the plain response, from the generation and its rows."""


async def stream(server: Server, asked: capture.Asked, admitted: AsyncExitStack, answer: Answer) -> StreamingResponse:
    """Start the request; answer once its first tokens are there. Raises Problem if it does not come to that.

    ``admitted`` is closed when the request has ended, which may be after its client has gone.
    """
    outgoing = _Outgoing(server, asked, answer)
    work = asyncio.create_task(outgoing.run(admitted.pop_all()), name=f"stream {asked.request_id}")
    server.work.add(work)
    work.add_done_callback(server.work.discard)
    try:
        await outgoing.moved()
    except BaseException:  # the client has gone before there was anything to send
        outgoing.leave()
        raise
    if outgoing.problem is not None:
        raise outgoing.problem
    return _Events(outgoing)


class _Events(StreamingResponse):
    """The events of a request. However it ends, the request ends with it."""

    def __init__(self, outgoing: _Outgoing) -> None:
        super().__init__(outgoing.events(), media_type="text/event-stream", headers=_HEADERS)
        self.outgoing = outgoing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.outgoing.leave()


class _Outgoing:
    """A request whose responses go out. ``run`` works on it, ``events`` reads what there is; neither waits for both."""

    def __init__(self, server: Server, asked: capture.Asked, answer: Answer) -> None:
        self.server = server
        self.asked = asked
        self.answer = answer
        self.response_ids = [uuid7() for _ in range(asked.sampling.n)]
        self.generation: Generation | None = None  # the newest
        self.body: dict[str, Any] | None = None  # of the final event
        self.problem: Problem | None = None
        self._news = asyncio.Event()
        self._gone = False

    async def run(self, admitted: AsyncExitStack) -> None:
        """Sample and record, to the end. What goes wrong is in ``problem``."""
        async with admitted:
            try:
                await self._run()
            except Problem as problem:
                self.problem = problem
            except Exception as error:
                log.exception("stream %s failed", self.asked.request_id)
                self.problem = Problem(500, f"{type(error).__name__}; the server's log has the details")
            finally:
                self._news.set()

    async def moved(self) -> None:
        """Return when there is something new to send."""
        await self._news.wait()
        self._news.clear()

    def leave(self) -> None:
        """Nobody reads any more: if it has not ended, end it in the engine."""
        self._gone = True
        if self.body is None and self.problem is None:
            self._abort_later()

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: ``delta`` with a response's next piece of text, then one ``done`` or ``error``."""
        sent = [0] * self.asked.sampling.n
        while True:
            ended = self.body is not None or self.problem is not None
            for index, response in enumerate(self.generation.responses if self.generation else ()):
                if len(response.text) > sent[index]:
                    piece = {"index": index, "text": response.text[sent[index] :]}
                    yield _event("delta", piece | {"response_id": self.response_ids[index]})
                    sent[index] = len(response.text)
            if ended:
                break
            try:
                async with asyncio.timeout(_MOST_SILENCE_S):
                    await self.moved()
            except TimeoutError:
                yield b": still at work\n\n"
        if self.body is not None:
            yield _event("done", self.body)
        elif self.problem is not None:
            yield _event("error", self.problem.body())

    async def _run(self) -> None:
        server = self.server
        streams = [await server.begin(row, partial(self._row, index)) for index, row in enumerate(self._rows())]
        timeout_s = server.config.limits.timeout_s
        # Aborted, the engine ends the request itself, and tells what there is by then.
        limit = asyncio.get_running_loop().call_later(timeout_s, self._abort_later)
        started = time.monotonic()
        try:
            async with asyncio.timeout(2 * timeout_s):  # an engine that does not even end what is aborted
                await self._sample()
        except TimeoutError as error:
            await server.end(streams, self._rows(ended=True))
            raise Problem(503, "the engine did not answer", retry_after=5) from error
        except EngineRefused as error:
            await server.end(streams, self._rows(status="error"))
            raise Problem(400, str(error)) from error
        except EngineError as error:
            await server.end(streams, self._rows(status="error"))
            raise Problem(503, str(error), retry_after=5) from error
        finally:
            limit.cancel()
        rows = self._rows(ended=True)
        await server.end(streams, rows)
        if any(row["status"] != "complete" for row in rows):
            if time.monotonic() - started >= timeout_s:
                raise Problem(504, f"the request was aborted after {timeout_s:g} s")
            raise Problem(503, "the server is stopping; the response was cut off", retry_after=5)
        assert self.generation is not None
        self.body = self.answer(self.generation, rows)

    async def _sample(self) -> None:
        asked = self.asked
        async for generation in self.server.engine.stream(asked.request_id, asked.prompt_token_ids, asked.sampling):
            self.generation = generation
            self._news.set()
            if self._gone:
                await self.server.engine.abort(asked.request_id)

    def _rows(self, *, ended: bool = False, status: str | None = None) -> list[dict[str, Any]]:
        """The responses' rows as they are. ``ended``: those without an end of their own were cut off."""
        if self.generation is None:
            return capture.failed(self.asked, self.response_ids, status or ("aborted" if ended else "error"))
        rows = capture.answered(self.asked, self.generation, self.response_ids)
        return rows if status is None else [row | {"status": status, "finish_reason": None} for row in rows]

    def _row(self, index: int) -> dict[str, Any]:
        return self._rows()[index]

    def _abort_later(self) -> None:
        # In a task of its own: whoever calls this may be cancelled at its next await.
        task = asyncio.create_task(self._abort())
        self.server.work.add(task)
        task.add_done_callback(self.server.work.discard)

    async def _abort(self) -> None:
        try:
            await self.server.engine.abort(self.asked.request_id)
        except (EngineError, TimeoutError) as error:
            log.warning("request %s could not be aborted: %s", self.asked.request_id, error)


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
