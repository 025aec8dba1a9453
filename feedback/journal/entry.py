"""Rows on their way through the journal, and the waking of the caller that waits for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from feedback.journal.streams import Stream

log = logging.getLogger(__name__)


class State(Enum):
    """How far an entry is. It changes under the journal's lock only."""

    WAITING = "for room in the queue"
    QUEUED = "for the writer"
    TAKEN = "by the writer: it can't be withdrawn any more"
    WITHDRAWN = "by its caller: it is never written"


@dataclass(eq=False, slots=True)
class Entry:
    """Rows for one commit, and who waits for it: a task of ``loop``, or a thread if there is none.

    ``begins`` and ``ends`` are the stream that its one row is the first, or the last, record of. ``error``: why the
    writer did not write a row; others of its commit were written. ``since`` is the time of ``time.monotonic`` at which
    it came.
    """

    table: str
    rows: Sequence[dict[str, Any]]
    waiter: asyncio.Future[None] | Future[None]
    loop: asyncio.AbstractEventLoop | None
    begins: Stream | None = None
    ends: Stream | None = None
    state: State = State.WAITING
    error: Exception | None = None
    since: float = field(default_factory=time.monotonic)


def resolve(entries: Iterable[Entry], error: Exception | None) -> None:
    """Wake every caller; one wake-up for each event loop, whatever the number of its tasks."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Entry]] = {}
    for entry in entries:
        if entry.loop is not None:
            by_loop.setdefault(entry.loop, []).append(entry)
        else:
            _set([entry], error)
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set, group, error)
        except RuntimeError as closed:  # the loop has ended, and its callers with it
            log.warning("the callers of %d rows are gone: %s", len(group), closed)


def _set(entries: list[Entry], error: Exception | None) -> None:
    for entry in entries:
        reason = entry.error or error
        if entry.waiter.done():  # the caller was cancelled, or refused already because the disk hangs
            continue
        if reason is None:
            entry.waiter.set_result(None)
        else:
            entry.waiter.set_exception(reason)
