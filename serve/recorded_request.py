"""Responses from the engine to their rows: one implementation for ``/generate`` and ``/v1``, plain and streamed.

A request is admitted, tokenised, and its tokens are reserved; then each of its prompts is sampled and recorded, and
what was not used is refunded. A plain response is returned when its row is on disk. A streamed one has its start on
disk before its first token goes out, and its end before its last. Whatever ends a request early (its client, its
deadline, the server's stop), its rows say aborted and have the tokens so far; after an error of the engine they say
error. What the engine refuses before it has begun has no rows, nor has what is not to be stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Literal, Protocol, Self

from feedback.journal.streams import Stream
from serve.admission import TokenBudget
from serve.engine import EngineError, EngineRefused, SamplingEngine
from serve.generation.interaction_rows import build_rows
from serve.generation.request import Generation, GenerationProgress, GenerationRequest
from serve.http import Problem
from serve.recorder import Recorder, UnstoredResponses, gather_all
from serve.time_limit import TimeLimit

log = logging.getLogger(__name__)

_MIN_GRACE_S: Final = 10.0  # for the engine to end what was aborted

Ending = Literal["gone", "timeout"]


class Source(Protocol):
    """How one prompt is sampled. Both methods raise EngineRefused if the engine does not begin, or EngineError."""

    async def whole(self) -> Generation:
        """Sample to the end."""
        ...

    async def open(self, progress: GenerationProgress) -> AsyncGenerator[Any, None]:
        """Start sampling; each output is in ``progress`` before it is yielded."""
        ...


class ActiveRequest:
    """One HTTP request for responses, until all its prompts have ended. Use as a context manager around its work."""

    def __init__(
        self,
        engine: SamplingEngine,
        recorder: Recorder | UnstoredResponses,
        budget: TokenBudget,
        timeout_s: float,
    ) -> None:
        self.engine = engine
        self.recorder = recorder
        self.budget = budget
        self.timeout_s = timeout_s
        self.deadline = asyncio.get_running_loop().time() + timeout_s + max(timeout_s, _MIN_GRACE_S)
        """When to stop waiting for the engine; what took ``timeout_s`` has been aborted long before."""
        self.prompts: list[RecordedPrompt] = []
        self.ending: Ending | None = None
        """Why it was aborted, unless the server did that."""
        self.problem: Problem | None = None
        """Why a prompt has no whole responses."""

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(self.timeout_s, self.abort, "timeout")
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if running := [prompt.task for prompt in self.prompts if prompt.task is not None and not prompt.task.done()]:
            self.recorder.spawn(self._refund_after(running), "refund")
        else:
            self._refund()

    async def _refund_after(self, running: list[asyncio.Task[Any]]) -> None:
        await asyncio.wait(running)
        self._refund()

    def _refund(self) -> None:
        self.budget.refund(sum(prompt.used_tokens() for prompt in self.prompts))

    def abort(self, ending: Ending) -> None:
        """End it in the engine; its prompts then end with the tokens so far."""
        if self.ending is None:
            self.ending = ending
            for prompt in self.prompts:
                prompt.abort_later()

    def interruption(self) -> Problem:
        """The problem that the client of an aborted request gets."""
        if self.ending == "timeout":
            return Problem(504, f"the request was aborted after {self.timeout_s:g} s")
        if self.ending == "gone":
            return Problem(503, "the client has gone")
        return Problem(503, "the server is stopping; the response was cut off", retry_after=5)


class RecordedPrompt:
    """One prompt of an active request, and its responses. Call ``whole`` or ``stream``, once."""

    def __init__(
        self,
        active: ActiveRequest,
        request: GenerationRequest,
        source: Source,
        response_ids: list[str] | None = None,
        engine_error: Problem | None = None,
    ) -> None:
        """``response_ids``: instead of new ones; ``engine_error``: what is raised if the engine gives up."""
        active.prompts.append(self)
        self.request = request
        self.response_ids = response_ids or [active.recorder.response_id() for _ in range(request.sampling.n)]
        self.progress = GenerationProgress(request.sampling.n)
        self.rows: list[dict[str, Any]] = []
        """The rows as recorded, in the responses' order, once all have ended."""
        self.task: asyncio.Task[Any] | None = None
        """The work that goes on when nobody waits for it any more."""
        self._active = active
        self._recorder = active.recorder
        self._source = source
        self._engine_error = engine_error or Problem(503, "the engine gave the response up", retry_after=1)
        self._submitted = False
        self._sampled = 0
        self._begun: asyncio.Task[None] | None = None
        self._open: dict[int, Stream] = {}
        self._ended: dict[int, dict[str, Any]] = {}

    # Main paths

    async def whole(self) -> list[dict[str, Any]]:
        """The rows when they are on disk. Cancelled, it aborts, and the rows are recorded all the same.

        Raises Problem, EngineRefused.
        """
        self.task = self._recorder.spawn(self._whole(), f"{self.request.endpoint} {self.request.key}")
        try:
            await self._wait(self.task)
        except asyncio.CancelledError:
            self._recorder.spawn(self._abort(), f"abort {self.request.key}")
            raise
        return self.rows

    async def _whole(self) -> None:
        try:
            self._submit()
            async with asyncio.timeout_at(self._active.deadline):
                generation = await self._source.whole()
        except Exception as error:
            await self._failed(error)
            raise
        self._sampled = sum(len(response.token_ids) for response in generation.responses)
        self.rows = build_rows(self.request, generation, self.response_ids)
        try:
            await self._recorder.record(self.rows)
        except Problem as problem:
            self._active.problem = problem
            raise
        self._raise_unless_complete({response.finish_reason for response in generation.responses})

    async def stream(self) -> AsyncGenerator[Any, None]:
        """The source's outputs, each when what it begins or ends is on disk. Closed early, it aborts and records.

        Raises Problem, EngineRefused.
        """
        limit, deadline = TimeLimit(), self._active.deadline
        try:
            self._submit()
            with limit.until(deadline):
                outputs = await self._source.open(self.progress)
            self._begun = self._recorder.spawn(self._begin(), f"begin {self.request.key}")  # while the prompt is read
            started = cut_short = False
            async with aclosing(outputs):
                while True:
                    with limit.until(deadline):
                        output = await anext(outputs, None)
                    if output is None:
                        break
                    if not started:
                        await asyncio.shield(self._begun)
                        started = True
                    if self._active.ending is not None:
                        await self._abort()  # it may have come before the engine knew of the request
                    if ended := self._newly_ended():
                        cut_short = cut_short or any(self._finish_reason(i) in ("abort", "error") for i in ended)
                        await asyncio.shield(self._recorder.spawn(self._end(ended), f"end {self.request.key}"))
                    if not cut_short:
                        yield output
            await self._close()
        except (asyncio.CancelledError, GeneratorExit):
            self.task = self._recorder.spawn(self._leave(), f"end {self.request.key}")
            raise
        except Exception as error:
            self.task = self._recorder.spawn(self._failed(error), f"end {self.request.key}")
            await self._wait(self.task)
            raise
        finally:
            limit.close()
            self._sampled = self._tokens_so_far()
        self.rows = [self._ended[index] for index in range(len(self.response_ids))]
        self._raise_unless_complete({self._finish_reason(index) for index in range(len(self.response_ids))})

    async def _wait(self, task: asyncio.Task[Any]) -> None:
        """Wait for a task, which goes on if another prompt's failure or the client's leaving cancels this."""

        def end(task: asyncio.Task[Any]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, Problem | EngineRefused):
                log.error("%s failed after nobody waited for it", task.get_name(), exc_info=error)

        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(end)
            raise

    # Ends

    def used_tokens(self) -> int:
        """Tokens of the prompt and the responses; 0 if the engine never got the prompt."""
        if not self._submitted:
            return 0
        # A stream that was closed early may not have come to its end yet.
        return len(self.request.prompt_token_ids) + (self._sampled or self._tokens_so_far())

    def _tokens_so_far(self) -> int:
        if len(self._ended) == len(self.response_ids):
            return sum(len(row["response_token_ids"]) for row in self._ended.values())
        return sum(len(response.token_ids) for response in self.progress.generation().responses)

    def abort_later(self) -> None:
        """End it in the engine, in a task of its own: the caller may be cancelled at its next await."""
        if self._submitted:
            self._recorder.spawn(self._abort(), f"abort {self.request.key}")

    async def _abort(self) -> None:
        try:
            await self._active.engine.abort(self.request.key)
        except (EngineError, TimeoutError) as error:
            log.warning("request %s could not be aborted: %s", self.request.key, error)

    def _submit(self) -> None:
        if self._active.ending is not None:
            raise self._active.interruption()
        self._submitted = True

    def _raise_unless_complete(self, reasons: set[str | None]) -> None:
        if "error" in reasons:
            self._active.problem = self._engine_error
        elif reasons & {"abort", None}:
            self._active.problem = self._active.interruption()
        else:
            return
        raise self._active.problem

    async def _failed(self, error: Exception) -> None:
        """Record what there is. Raises a Problem in place of ``error`` where there is one for it."""
        problem = error if isinstance(error, Problem) else None
        refused = isinstance(error, EngineRefused)
        if isinstance(error, EngineError | TimeoutError) and not refused:
            problem = Problem(503, str(error) or "the engine did not answer", retry_after=5)
        if not refused:
            await self._abort()
        try:
            if self._begun is not None or not refused:
                await self._close(failed=self._submitted)  # else it was aborted before that
        except Problem as unrecorded:
            problem = unrecorded
        if problem is not None:
            self._active.problem = problem
            if problem is not error:
                raise problem from error

    async def _leave(self) -> None:
        await self._abort()
        try:
            await self._close()
        except Problem as problem:
            log.warning("request %s, whose client has gone, can't be recorded: %s", self.request.key, problem)

    # Rows

    async def _close(self, *, failed: bool = False) -> None:
        """Record the responses without an end as aborted, or as ``failed``. Raises Problem."""
        if self._begun is None:
            await self._recorder.record(self._rows(range(len(self.response_ids)), failed=failed))
            return
        try:
            await self._begun
            if self._open:
                await self._end(list(self._open), failed=failed)
        finally:
            while self._open:
                self._recorder.abandon(self._open.popitem()[1])

    async def _begin(self) -> None:
        async def begin(index: int) -> None:
            self._open[index] = await self._recorder.begin(self._row(index), partial(self._row, index))

        await gather_all(*(begin(index) for index in range(len(self.response_ids))))

    async def _end(self, indices: list[int], *, failed: bool = False) -> None:
        rows = self._rows(indices, failed=failed)
        for row in rows:
            if row["status"] == "complete" and len(row["response_token_ids"]) != len(row["logprobs"]):
                raise EngineError(
                    f"vLLM gave {len(row['logprobs'])} logprobs for {len(row['response_token_ids'])} tokens"
                )
        count_prompt = not self._ended
        self._ended |= dict(zip(indices, rows, strict=True))
        await self._recorder.end([self._open.pop(index) for index in indices], rows, count_prompt=count_prompt)

    def _newly_ended(self) -> list[int]:
        return [index for index in self._open if self._finish_reason(index) is not None]

    def _finish_reason(self, index: int) -> str | None:
        return self.progress.responses[index].finish_reason

    def _rows(self, indices: Sequence[int], *, failed: bool = False) -> list[dict[str, Any]]:
        ids = [self.response_ids[index] for index in indices]
        return build_rows(self.request, self.progress.generation(indices), ids, failed=failed)

    def _row(self, index: int) -> dict[str, Any]:
        """A response's row as it is; called in the journal's thread too."""
        return self._rows([index])[0]


class EngineSource:
    """A prompt of ``/generate``: the outputs are pieces of text, by the index of their response."""

    def __init__(self, engine: SamplingEngine, request: GenerationRequest) -> None:
        self._engine = engine
        self._arguments = request.key, request.prompt_token_ids, request.sampling
        self._version = request.version

    async def whole(self) -> Generation:
        return await self._engine.generate(*self._arguments, self._version)

    async def open(self, progress: GenerationProgress) -> AsyncGenerator[list[tuple[int, str]], None]:
        return self._engine.stream(*self._arguments, progress, self._version)  # type: ignore[return-value]
