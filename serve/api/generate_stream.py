"""``POST /generate`` with ``stream: true``: responses go out while they are made, and are recorded whatever happens.

The start of every response is durable before its first token goes out, its end before the final event does. A client
that goes away, or is cut off, leaves responses that are recorded as aborted, with the tokens so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

from feedback.ids import uuid7
from feedback.journal.streams import Stream
from serve.generation import interaction_rows
from serve.generation.request import Generation, Underway
from serve.http import CLIENT_CLOSED_REQUEST, Problem
from serve.vllm.engine import EngineError, EngineRefused

if TYPE_CHECKING:
    from serve.app import Server

log = logging.getLogger(__name__)

_MOST_SILENCE_S: Final = 15.0  # between two bytes to the client; proxies close a connection that says nothing for long
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]

Answer = Callable[[Generation, list[dict[str, Any]]], dict[str, Any]]
"""The body of the plain response, from the generation and its rows."""


class Events(Response):
    """Server-sent events: ``delta`` with a response's next piece of text, then one ``done`` or ``error``.

    The status line goes out with the first event; what goes wrong before that is raised as a Problem, as by a plain
    request. The request is worked on in a task of its own, so that it comes to its end, and is recorded, also when its
    client has gone.
    """

    def __init__(self, server: Server, asked: interaction_rows.Asked, admitted: ExitStack, answer: Answer) -> None:
        """``admitted`` is closed when the request has ended, which may be after its client has gone."""
        self.server = server
        self.asked = asked
        self.answer = answer
        self.response_ids = [uuid7() for _ in range(asked.sampling.n)]
        self.underway = Underway(asked.sampling.n)
        self.status_code = 200
        self.background = None
        self._admitted = admitted.pop_all()
        self._send: Send
        self._sent_at = 0.0  # 0: not even the status line
        self._gone = False
        self._failure: Problem | None = None
        self._heads = [
            b'event: delta\ndata: {"response_id":"%b","index":%d,"text":' % (response_id.encode(), index)
            for index, response_id in enumerate(self.response_ids)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises Problem if nothing has been sent."""
        self._send = send
        work = self._task(self._run())
        watch = asyncio.create_task(self._watch(receive))
        try:
            await asyncio.shield(work)
        finally:
            watch.cancel()
            if not work.done():  # this call is cancelled; the work is not
                self._leave()
        failure = self._failure
        scope["ended_with"] = 200 if failure is None else CLIENT_CLOSED_REQUEST if self._gone else failure.status
        if failure is not None and not self._sent_at:
            raise failure

    def tokens(self) -> int:
        """Response tokens so far."""
        return sum(len(response.token_ids) for response in self.underway.generation().responses)

    async def _watch(self, receive: Receive) -> None:
        """Notice a client that goes away, and keep the line alive."""
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            while not (await asyncio.wait({leaving}, timeout=_MOST_SILENCE_S))[0]:
                if 0 < self._sent_at < time.monotonic() - _MOST_SILENCE_S:
                    await self._put(b": still at work\n\n")
            self._leave()
        finally:
            leaving.cancel()

    async def _run(self) -> None:
        """Sample, send and record, to the end. A problem is kept, and sent if anything has been."""
        with self._admitted:
            try:
                body = await self._answered()
            except Problem as problem:
                self._failure = problem
            except Exception as error:
                log.exception("stream %s failed", self.asked.request_id)
                self._failure = Problem(500, f"{type(error).__name__}; the server's log has the details")
            else:
                return await self._put(_event(b"done", body), last=True)
        if self._sent_at:
            await self._put(_event(b"error", self._failure.body()), last=True)

    async def _answered(self) -> dict[str, Any]:
        """The body of the final event, its rows being durable. Raises Problem."""
        server, timeout_s = self.server, self.server.config.limits.timeout_s
        # The start is recorded while the engine begins; nothing goes out before both are there.
        starts = [
            asyncio.ensure_future(server.begin(row, partial(self._row, index)))
            for index, row in enumerate(self._rows())
        ]
        # Aborted, the engine ends the request itself, and tells what there is by then.
        limit = asyncio.get_running_loop().call_later(timeout_s, self._abort_later)
        try:
            async with asyncio.timeout(2 * timeout_s):  # an engine that does not even end what is aborted
                await self._sample(starts)
        except TimeoutError as error:
            await server.end(await _all(starts), self._rows(ended=True))
            raise Problem(503, "the engine did not answer", retry_after=5) from error
        except EngineRefused as error:
            await server.end(await _all(starts), self._rows(status="error"))
            raise Problem(400, str(error)) from error
        except EngineError as error:
            await server.end(await _all(starts), self._rows(status="error"))
            raise Problem(503, str(error), retry_after=5) from error
        else:
            generation = self.underway.generation()
            rows = interaction_rows.answered(self.asked, generation, self.response_ids)
            await server.end(await _all(starts), rows)
        finally:
            limit.cancel()
            for start in starts:  # where one start is refused, or an end is not written, no other stays open
                start.add_done_callback(self._abandon)
        if any(row["status"] != "complete" for row in rows):
            if generation.total_ms >= timeout_s * 1e3:
                raise Problem(504, f"the request was aborted after {timeout_s:g} s")
            raise Problem(503, "the server is stopping; the response was cut off", retry_after=5)
        return self.answer(generation, rows)

    async def _sample(self, starts: Sequence[asyncio.Future[Stream]]) -> None:
        asked, engine = self.asked, self.server.engine
        started = False
        async for pieces in engine.stream(asked.key, asked.prompt_token_ids, asked.sampling, self.underway):
            if not started:
                try:
                    await _all(starts)
                except Exception:
                    await engine.abort(asked.key)
                    raise
                started = True
            if self._gone:
                await engine.abort(asked.key)
            elif pieces:
                await self._put(
                    b"".join([b"%b%b}\n\n" % (self._heads[index], orjson.dumps(text)) for index, text in pieces])
                )

    def _abandon(self, start: asyncio.Future[Stream]) -> None:
        if not start.cancelled() and start.exception() is None:
            self.server.abandon(start.result())

    async def _put(self, data: bytes, *, last: bool = False) -> None:
        if self._gone:
            return
        try:
            if not self._sent_at:
                await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._sent_at = time.monotonic()
            message = {"type": "http.response.body", "body": data, "more_body": not last}
            if not last:  # what comes before the last has a limit around all of it
                return await self._send(message)
            async with asyncio.timeout(self.server.config.limits.timeout_s):  # a client that does not read
                await self._send(message)
        except (OSError, TimeoutError):  # the client has gone
            self._leave()

    def _leave(self) -> None:
        """Nobody reads any more: end the request in the engine."""
        self._gone = True
        self._abort_later()

    def _rows(self, *, ended: bool = False, status: str | None = None) -> list[dict[str, Any]]:
        """The responses' rows as they are. ``ended``: those without an end of their own were cut off."""
        generation = self.underway.generation()
        if not any(response.token_ids for response in generation.responses):
            return interaction_rows.failed(self.asked, self.response_ids, status or ("aborted" if ended else "error"))
        rows = interaction_rows.answered(self.asked, generation, self.response_ids)
        return rows if status is None else [row | {"status": status, "finish_reason": None} for row in rows]

    def _row(self, index: int) -> dict[str, Any]:
        return self._rows()[index]

    def _abort_later(self) -> None:
        self.server.abort_later(self.asked.key)

    def _task(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=f"stream {self.asked.request_id}")
        self.server.work.add(task)
        task.add_done_callback(self.server.work.discard)
        return task


async def _all(starts: Sequence[asyncio.Future[Stream]]) -> list[Stream]:
    """The streams, once every start is on disk. Raises Problem if one can't be; none is under way then."""
    results = await asyncio.gather(*starts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def _disconnected(receive: Receive) -> None:
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass


def _event(name: bytes, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, orjson.dumps(data))
