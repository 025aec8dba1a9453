"""Streamed responses: a record when they start, a record when they end.

The record of a start is a row of ``interactions`` with status ``started``; it is in the journal only. While a stream is
open, every segment that is closed repeats it, with the tokens so far, at the head of the next one. So a segment's
started rows matter only if no later segment of the same writer follows: then the writer ended, or was killed, with
these streams open, and they are sealed as aborted, with the tokens of the last repetition.

Every stream that has begun ends. If its end is refused, or its owner abandons it, the journal writes an end as soon as
the disk takes it. A stream holds its place for that, so the queue is never too full for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from feedback.journal.codec import check_row

log = logging.getLogger(__name__)

STARTED: Final = "started"
ABORTED: Final = "aborted"

SoFar = Callable[[], dict[str, Any]]
"""The interaction's row as it is at the moment of the call; called in the journal's thread."""


@dataclass(eq=False)
class Stream:
    """A response that is going out.

    ``last``: its newest record. ``ended``: no other will follow. ``lost``: why its end can't be recorded any more.
    """

    response_id: str
    last: dict[str, Any]
    so_far: SoFar
    lost: str | None = None
    ended: bool = False

    def row(self) -> dict[str, Any]:
        """The row that repeats its start, with what there is by then; its last record if ``so_far`` fails."""
        try:
            row = self.so_far() | {"status": STARTED}
            check_row("interactions", row)
        except Exception:
            log.exception("stream %s: so_far failed; its last record is kept", self.response_id)
            return self.last
        return row


def aborted(row: dict[str, Any]) -> dict[str, Any]:
    """A started row as the end of a stream without one."""
    return row | {"status": ABORTED, "finish_reason": "abort"}


def refused(row: dict[str, Any]) -> dict[str, Any]:
    """The row of an end as it is recorded when recording it was refused: the client saw an error."""
    return row | {"status": "error", "finish_reason": None} if row["status"] in ("complete", "redacted") else row


def has_started(rows: pa.Table) -> bool:
    """Whether any of a segment's rows of ``interactions`` records a start."""
    return bool(pc.any(pc.equal(rows["status"], STARTED)).as_py())


def settle(rows: pa.Table, *, continued: bool) -> pa.Table:
    """A segment's rows of ``interactions`` as the lake keeps them: without started ones, which may become aborted ones.

    ``continued``: whether a later segment of the same writer repeats those that were open at the end of this one.
    """
    started = pc.equal(rows["status"], STARTED)
    ended = rows.filter(pc.invert(started))
    if continued:
        return ended
    last: dict[str, int] = {}
    ids = rows["response_id"].to_pylist()
    for position, is_started in enumerate(started.to_pylist()):
        if is_started:
            last[ids[position]] = position
        else:
            last.pop(ids[position], None)
    cut_off = rows.take(pa.array(sorted(last.values()), pa.int64()))
    for column, value in aborted({}).items():
        at = rows.schema.get_field_index(column)
        cut_off = cut_off.set_column(at, rows.schema.field(at), pa.array([value] * cut_off.num_rows, pa.string()))
    return pa.concat_tables([ended, cut_off])
