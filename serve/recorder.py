"""Rows to the journal: interactions when they begin and end, feedback; counted as they are recorded.

With ``feedback.capture.redact`` no text reaches the journal unredacted. A stream that is open has no response there,
as what is to be redacted may not be whole yet. The client's rows are not touched. ``UnstoredResponses`` takes the
recorder's place for requests that are not to be stored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from feedback.events import session_rows
from feedback.ids import uuid7
from feedback.ingest.idempotency import SeenFeedback, SeenFeedbackError, Verdict
from feedback.journal.streams import SoFar, Stream
from feedback.journal.writer import Journal, JournalBroken, JournalFull
from feedback.redaction import WITHOUT_RESPONSE, Decode, RedactionError, Redactor, withheld
from serve.http import Problem
from serve.observability.metrics import Metrics
from serve.observability.tracing import Tracing

log = logging.getLogger(__name__)

_RETRY_AFTER_S: Final = 5.0
_LOOKED_UP: Final = 64  # of a session's responses, the newest first: it seldom goes on before feedback is sent again
_OF_PROMPT: Final = ("prompt", "messages", "prompt_token_ids", "sampling", "metadata")
UNSTORED: Final = "unstored-"
"""What the id of a response that is not stored begins with, so that feedback on it can be refused anywhere."""

Result = TypeVar("Result")


class Recorder:
    """Records interactions and feedback. Every method that records raises Problem 503 if that can't be durable."""

    def __init__(
        self,
        journal: Journal,
        ledger: SeenFeedback | None,
        metrics: Metrics,
        redaction: Redaction | None = None,
        tracing: Tracing | None = None,
        model: str = "",
    ) -> None:
        """``ledger``: None where no feedback is recorded. ``model``: its name in traces."""
        self.tasks: set[asyncio.Task[Any]] = set()
        """Tasks that may outlive the request that started them; the journal is closed after them."""
        self._journal = journal
        self._ledger = ledger
        self._metrics = metrics
        self._redaction = redaction
        self._tracing = tracing
        self._model = model

    def spawn(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        """Run ``work`` in a task that the end of the server waits for, and that no client's leaving cancels."""
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def response_id(self) -> str:
        """A new id."""
        return uuid7()

    async def record(self, rows: list[dict[str, Any]]) -> None:
        """Return when the interaction rows are on disk."""
        sampled_at = time.time_ns()
        with _problems():
            kept = rows if self._redaction is None else await self._redaction.interactions(rows)
            await self._journal.append("interactions", *kept)
        self.count(rows, sampled_at=sampled_at)

    async def begin(self, row: dict[str, Any], so_far: SoFar) -> Stream:
        """Return when a response's start is on disk."""
        with _problems():
            if self._redaction is None:
                return await self._journal.begin(row, so_far)
            [kept] = await self._redaction.interactions([row | WITHOUT_RESPONSE])
            without = {name: kept[name] for name in _OF_PROMPT} | WITHOUT_RESPONSE
            return await self._journal.begin(row | without, lambda: so_far() | without)

    async def end(self, streams: list[Stream], rows: list[dict[str, Any]], *, count_prompt: bool = True) -> None:
        """Return when the responses' ends are on disk; if they can't be, the journal ends them later.

        ``count_prompt``: False when another response to the same prompt has ended before.
        """
        sampled_at = time.time_ns()
        with _problems():
            kept, failure = rows, None
            if self._redaction is not None:
                try:
                    kept = await self._redaction.interactions(rows)
                except RedactionError as error:
                    kept, failure = [withheld(row) for row in rows], error
            await gather_all(*(self._journal.end(stream, row) for stream, row in zip(streams, kept, strict=True)))
            self.count(rows, count_prompt=count_prompt, sampled_at=sampled_at)
            if failure is not None:
                raise failure

    def abandon(self, stream: Stream) -> None:
        """Have the journal record a response as aborted if it has not ended."""
        self._journal.abandon(stream)

    async def record_feedback(self, row: dict[str, Any], *, generated_id: bool) -> Verdict:
        """Return the verdict when it is durable. ``generated_id``: the feedback's id is new."""
        with _problems():
            if self._redaction is not None:
                row = await self._redaction.feedback(row)
            return await self._seen.record(row, self._journal, generated_id=generated_id)

    async def record_session_feedback(
        self, row: dict[str, Any], response_ids: list[str], *, generated_id: bool
    ) -> Verdict:
        """Return the verdict when a row on each response of a session, oldest first, is durable.

        Sent again it is the same though the session has gone on meanwhile: then the last response was another one.
        """
        if not generated_id:
            with _problems():
                kept = row if self._redaction is None else await self._redaction.feedback(row)
                lasts = [session_rows(kept, response_ids[:last])[-1] for last in range(len(response_ids), 0, -1)]
                before = lasts[0]
                for first in range(0, len(lasts), _LOOKED_UP):
                    some = lasts[first : first + _LOOKED_UP]
                    if "same" in (verdicts := await self._seen.check_all(some)):
                        before = some[verdicts.index("same")]
                        break
                if (verdict := await self._seen.compare(before)) != "new":
                    return verdict
        *earlier, last_row = session_rows(row, response_ids)
        of_earlier = await gather_all(*(self.record_feedback(other, generated_id=generated_id) for other in earlier))
        if "conflict" in of_earlier:  # an earlier try, which was not acknowledged, has recorded another value
            return "conflict"
        return await self.record_feedback(last_row, generated_id=generated_id)

    @property
    def _seen(self) -> SeenFeedback:
        assert self._ledger is not None, "feedback is recorded by the first API process"
        return self._ledger

    def count(self, rows: list[dict[str, Any]], *, count_prompt: bool = True, sampled_at: int | None = None) -> None:
        """Count the rows of responses to one prompt in the metrics, and trace them.

        ``sampled_at``: nanoseconds of Unix time when the journal began with them; None if it does not get them.
        """
        if self._tracing is not None:
            self._tracing.responses(rows, self._model, sampled_at or time.time_ns(), sampled_at is not None)
        metrics = self._metrics
        metrics.response_tokens.inc(sum(len(row["response_token_ids"]) for row in rows))
        if count_prompt:
            metrics.prompt_tokens.inc(len(rows[0]["prompt_token_ids"]))
            if first_token_ms := rows[0]["timings"]["first_token_ms"]:
                metrics.first_token_seconds.observe(first_token_ms / 1e3)
        for row in rows:
            metrics.responses_of(row["status"]).inc()
            timings, tokens = row["timings"], len(row["response_token_ids"])
            if tokens > 1 and timings["first_token_ms"] is not None:
                since_first = timings["total_ms"] - timings["first_token_ms"]
                metrics.inter_token_seconds.observe(max(0.0, since_first) / 1e3 / (tokens - 1))


async def gather_all(*work: Coroutine[Any, Any, Result]) -> list[Result]:
    """The results when all are done; then raises the first error, if there was one."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]


class Redaction:
    """A redactor in a thread of its own. Its methods raise RedactionError."""

    def __init__(self, redactor: Redactor, timeout_s: float, decode: Decode) -> None:
        """``timeout_s``: longest wait for it, other requests' texts before these included."""
        self._redactor = redactor
        self._timeout_s = timeout_s
        self._decode = decode
        self._thread = ThreadPoolExecutor(1, "redaction")

    async def start(self) -> None:
        """Load the functions. Raises RedactionError."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._redactor.start)

    async def close(self) -> None:
        """End the functions' process; to be called once."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._redactor.close)
        self._thread.shutdown()

    async def interactions(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows as they are to be recorded."""
        return await self._run(lambda: self._redactor.interactions(rows, self._decode))

    async def feedback(self, row: dict[str, Any]) -> dict[str, Any]:
        """A feedback row as it is to be recorded."""
        return await self._run(lambda: self._redactor.feedback(row))

    async def _run(self, work: Callable[[], Result]) -> Result:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except TimeoutError:
            raise RedactionError(f"the redact functions were busy for {self._timeout_s:g} s") from None


class UnstoredResponses:
    """In a recorder's place for a request that is not to be stored: it counts the responses, and writes nothing."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.spawn = recorder.spawn

    def response_id(self) -> str:
        """A new id that says so."""
        return UNSTORED + uuid7()

    async def record(self, rows: list[dict[str, Any]]) -> None:
        """Count the rows."""
        self._recorder.count(rows)

    async def begin(self, row: dict[str, Any], so_far: SoFar) -> Stream:
        """A stream that the journal doesn't know of."""
        return Stream(row["response_id"], row, so_far)

    async def end(self, streams: list[Stream], rows: list[dict[str, Any]], *, count_prompt: bool = True) -> None:
        """Count the rows."""
        self._recorder.count(rows, count_prompt=count_prompt)

    def abandon(self, stream: Stream) -> None:
        """Nothing is owed."""


@contextmanager
def _problems() -> Iterator[None]:
    try:
        yield
    except JournalFull as error:
        raise Problem(503, str(error), retry_after=error.retry_after) from error
    except RedactionError as error:
        log.error("nothing is recorded of a request: %s", error)
        raise Problem(503, f"it can't be recorded: {error}", retry_after=_RETRY_AFTER_S) from None
    except (JournalBroken, SeenFeedbackError) as error:
        raise Problem(503, str(error), retry_after=_RETRY_AFTER_S) from error
