"""Rows to the journal: interactions when they begin and end, feedback; counted as they are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from feedback.ingest.idempotency import SeenFeedback, SeenFeedbackError, Verdict
from feedback.journal.streams import SoFar, Stream
from feedback.journal.writer import Journal, JournalBroken, JournalFull
from serve.http import Problem
from serve.observability.metrics import Metrics

_RETRY_AFTER_S: Final = 5.0

Result = TypeVar("Result")


class Recorder:
    """Records interactions and feedback. Every method that records raises Problem 503 if that can't be durable."""

    def __init__(self, journal: Journal, ledger: SeenFeedback, metrics: Metrics) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        """Tasks that may outlive the request that started them; the journal is closed after them."""
        self._journal = journal
        self._ledger = ledger
        self._metrics = metrics

    def spawn(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        """Run ``work`` in a task that the end of the server waits for, and that no client's leaving cancels."""
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def record(self, rows: list[dict[str, Any]]) -> None:
        """Return when the interaction rows are on disk."""
        with _problems():
            if len(rows) == 1:
                await self._journal.append("interactions", rows[0])
            else:
                await gather_all(*(self._journal.append("interactions", row) for row in rows))
        self.count(rows)

    async def begin(self, row: dict[str, Any], so_far: SoFar) -> Stream:
        """Return when a response's start is on disk."""
        with _problems():
            return await self._journal.begin(row, so_far)

    async def end(self, streams: list[Stream], rows: list[dict[str, Any]], *, count_prompt: bool = True) -> None:
        """Return when the responses' ends are on disk; if they can't be, the journal ends them later.

        ``count_prompt``: False when another response to the same prompt has ended before.
        """
        with _problems():
            await gather_all(*(self._journal.end(stream, row) for stream, row in zip(streams, rows, strict=True)))
        self.count(rows, count_prompt=count_prompt)

    def abandon(self, stream: Stream) -> None:
        """Have the journal record a response as aborted if it has not ended."""
        self._journal.abandon(stream)

    async def record_feedback(self, row: dict[str, Any], *, generated_id: bool) -> Verdict:
        """Return the verdict when it is durable. ``generated_id``: the feedback's id is new."""
        with _problems():
            return await self._ledger.record(row, self._journal, generated_id=generated_id)

    def count(self, rows: list[dict[str, Any]], *, count_prompt: bool = True) -> None:
        """Count the rows of responses to one prompt in the metrics."""
        metrics = self._metrics
        metrics.response_tokens.inc(sum(len(row["response_token_ids"]) for row in rows))
        if count_prompt:
            metrics.prompt_tokens.inc(len(rows[0]["prompt_token_ids"]))
            if first_token_ms := rows[0]["timings"]["first_token_ms"]:
                metrics.first_token_seconds.observe(first_token_ms / 1e3)
        for row in rows:
            metrics.responses.labels(status=row["status"]).inc()
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


@contextmanager
def _problems() -> Iterator[None]:
    try:
        yield
    except JournalFull as error:
        raise Problem(503, str(error), retry_after=error.retry_after) from error
    except (JournalBroken, SeenFeedbackError) as error:
        raise Problem(503, str(error), retry_after=_RETRY_AFTER_S) from error
