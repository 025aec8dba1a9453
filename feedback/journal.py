"""The durable append log: a row is acknowledged when the disk has it, and not before.

Any number of tasks and threads append; one writer thread turns all rows that wait into one Arrow message a table,
writes it, calls fdatasync once, and wakes them all (group commit). Segments are closed by size and age; the lake
seals closed segments. After a crash ``open`` (or a sealer) cuts what was torn, keeps every whole message, and closes
the segment, so that nothing acknowledged is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feedback.config import JournalConfig
from feedback.entries import Entry, State, resolve
from feedback.files import fsync_path, make_folder, try_lock, write_all
from feedback.ids import uuid7
from feedback.recovery import recover
from feedback.rows import check_row, convert
from feedback.schema import TABLES
from feedback.segments import CLOSED, END_MARK, OPEN, SegmentName, encode_batch, encode_schema

log = logging.getLogger(__name__)


class JournalError(RuntimeError):
    """A row was not acknowledged."""


class JournalFull(JournalError):
    """The queue stayed full past the deadline; ``retry_after`` is the number of seconds to wait before another try."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class JournalBroken(JournalError):
    """The disk refused a write; nothing is acknowledged until the journal is opened again."""


@dataclass(eq=False)
class _OpenSegment:
    name: SegmentName
    path: Path
    fd: int
    opened: float
    size: int = 0  # bytes that are durable
    messages: int = 0

    @property
    def closed_path(self) -> Path:
        return self.path.with_suffix(CLOSED)


@dataclass
class _Counters:
    rows: int = 0
    commits: int = 0
    bytes: int = 0
    segments: int = 0
    refused: int = 0
    last_commit_ms: float = 0.0
    last_commit_rows: int = 0
    commit_ms_total: float = 0.0


class Journal:
    """The log of one writer (a replica's name) in a folder that several writers may share."""

    def __init__(self, folder: Path, config: JournalConfig, writer: str) -> None:
        """Raises ValueError if ``writer`` is not 1 to 64 letters, digits, '_' or '-'."""
        SegmentName("interactions", writer, "0" * 32, 0)  # refuses a bad name here, not at the first row
        self.folder = folder
        self.config = config
        self.writer = writer
        self._incarnation = uuid.UUID(uuid7()).hex
        self._condition = threading.Condition()
        self._queue: list[Entry] = []
        self._waiting: dict[Entry, None] = {}  # callers beyond the queue's bound, first come first served
        self._segments: dict[str, _OpenSegment] = {}
        self._numbers: dict[str, int] = dict.fromkeys(TABLES, 0)
        self._counters = _Counters()
        self._failure: str | None = None
        self._stalled = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def open(self) -> list[Path]:
        """Recover what a crash left in the folder, start the writer thread, return the segments recovered."""
        if self._thread is not None:
            raise JournalError(f"journal {self.folder} is open already")
        make_folder(self.folder)
        recovered = recover(self.folder)
        self._thread = threading.Thread(target=self._run, name=f"journal-{self.writer}", daemon=True)
        _live.add(self)
        self._thread.start()
        return recovered

    async def append(self, table: str, row: dict[str, Any]) -> None:
        """Return when ``row`` is on disk.

        Raises RowError for a row that does not fit, JournalFull if the queue stays full, JournalBroken if the disk
        fails. After JournalFull the row is not recorded. A caller that is cancelled leaves its row to be recorded.
        """
        loop = asyncio.get_running_loop()
        check_row(table, row)
        waiter: asyncio.Future[None] = loop.create_future()
        entry = Entry(table, row, waiter, loop)
        if not self._offer(entry):
            await asyncio.wait([waiter], timeout=self.config.append_timeout_s)
            self._refuse_if_waiting(entry)
        try:
            async with asyncio.timeout(self.config.commit_timeout_s):
                await waiter
        except TimeoutError as error:
            raise self._stall(entry) from error

    def append_sync(self, table: str, row: dict[str, Any]) -> None:
        """The same for a thread without an event loop."""
        check_row(table, row)
        waiter: Future[None] = Future()
        entry = Entry(table, row, waiter, None)
        if not self._offer(entry):
            deadline = time.monotonic() + self.config.append_timeout_s
            with self._condition:
                self._condition.wait_for(
                    lambda: entry.state != State.WAITING or waiter.done(), max(0.0, deadline - time.monotonic())
                )
            self._refuse_if_waiting(entry)
        try:
            waiter.result(self.config.commit_timeout_s)
        except TimeoutError as error:
            raise self._stall(entry) from error

    def close(self) -> None:
        """Write what is queued, close the segments, stop the thread. Later appends raise JournalBroken."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(self.config.commit_timeout_s)
            if self._thread.is_alive():
                raise JournalBroken(
                    f"journal {self.folder}: the disk did not finish in {self.config.commit_timeout_s:g} s"
                )
        _live.discard(self)

    @property
    def healthy(self) -> bool:
        """Whether an append has a chance: open, and the disk has not failed."""
        thread = self._thread
        return (
            thread is not None
            and thread.is_alive()
            and self._failure is None
            and not self._closing
            and not self._stalled
        )

    def stats(self) -> dict[str, float]:
        """Counters since ``open`` and gauges, times in milliseconds."""
        counters = self._counters
        return {
            "healthy": float(self.healthy),
            "queued_rows": len(self._queue),
            "waiting_rows": len(self._waiting),
            "rows": counters.rows,
            "commits": counters.commits,
            "bytes": counters.bytes,
            "segments": counters.segments,
            "refused": counters.refused,
            "last_commit_ms": counters.last_commit_ms,
            "last_commit_rows": counters.last_commit_rows,
            "commit_ms_total": counters.commit_ms_total,
        }

    # Callers' side: never more than a few microseconds under the lock.

    def _offer(self, entry: Entry) -> bool:
        """Queue the entry, or let it wait for room (False)."""
        with self._condition:
            if self._failure is not None:
                raise JournalBroken(self._failure)
            if self._closing or self._thread is None:
                raise JournalBroken(f"journal {self.folder} is not open")
            if self._waiting or len(self._queue) >= self.config.max_queued_rows:
                self._waiting[entry] = None
                return False
            entry.state = State.QUEUED
            self._queue.append(entry)
            if len(self._queue) == 1:
                self._condition.notify_all()
            return True

    def _refuse_if_waiting(self, entry: Entry) -> None:
        with self._condition:
            if entry.state != State.WAITING or entry.waiter.done():
                return
            self._withdraw(entry)
        raise JournalFull(
            f"journal {self.folder}: {self.config.max_queued_rows} rows have been waiting for the disk "
            f"for {self.config.append_timeout_s:g} s",
            retry_after=self.config.append_timeout_s,
        )

    def _withdraw(self, entry: Entry) -> None:
        entry.state = State.WITHDRAWN
        self._waiting.pop(entry, None)
        self._counters.refused += 1

    def _stall(self, entry: Entry) -> JournalBroken:
        """The disk has not answered in time. The row is withdrawn if it still can be."""
        with self._condition:
            withdrawn = entry.state in (State.WAITING, State.QUEUED)
            if withdrawn:
                self._withdraw(entry)
            self._stalled = True  # until a commit succeeds
        fate = "the row is not recorded" if withdrawn else "the row may or may not be recorded"
        return JournalBroken(f"journal {self.folder}: no commit within {self.config.commit_timeout_s:g} s; {fate}")

    # The writer thread's side.

    def _run(self) -> None:
        try:
            while True:
                entries, closing = self._take()
                if entries:
                    self._commit(entries)
                self._close_segments(everything=closing and not entries)
                if closing and not entries:
                    return
        except OSError as error:
            log.error("journal %s is broken: %s", self.folder, error)
            self._break(f"journal {self.folder}: the disk refused a write: {error}")
        except BaseException as error:
            self._break(f"journal {self.folder}: the writer thread ended: {error!r}")
            raise

    def _take(self) -> tuple[list[Entry], bool]:
        """All entries that wait; none when it is time to close a segment or the journal."""
        with self._condition:
            while not self._queue and not self._closing:
                if not self._condition.wait(self._seconds_to_rotation()):
                    break
            entries = [entry for entry in self._queue if entry.state == State.QUEUED]
            for entry in entries:
                entry.state = State.TAKEN
            self._queue = []
            while self._waiting and len(self._queue) < self.config.max_queued_rows:
                entry = next(iter(self._waiting))
                del self._waiting[entry]
                entry.state = State.QUEUED
                self._queue.append(entry)
            if self._queue:
                self._condition.notify_all()
            return entries, self._closing and not self._queue

    def _commit(self, entries: list[Entry]) -> None:
        """Make the entries durable and wake their callers. Raises OSError after having failed them."""
        started = time.perf_counter()
        by_table: dict[str, list[Entry]] = {}
        for entry in entries:
            by_table.setdefault(entry.table, []).append(entry)
        try:
            written = [self._write(table, group) for table, group in by_table.items()]
            for segment, _ in written:
                os.fdatasync(segment.fd)
        except BaseException as error:
            resolve(entries, JournalBroken(f"journal {self.folder}: the disk refused a write: {error!r}"))
            raise
        # Only now is any of it acknowledged: until here a failure takes all of it back.
        for segment, length in written:
            segment.size += length
            segment.messages += 1
            self._counters.bytes += length
        elapsed_ms = (time.perf_counter() - started) * 1e3
        counters = self._counters
        counters.rows += len(entries)
        counters.commits += 1
        counters.last_commit_rows = len(entries)
        counters.last_commit_ms = elapsed_ms
        counters.commit_ms_total += elapsed_ms
        self._stalled = False
        resolve(entries, None)

    def _write(self, table: str, entries: list[Entry]) -> tuple[_OpenSegment, int]:
        """Write the entries as one message; returns its segment and length. A row that does not fit is left out."""
        batch, errors = convert(table, [entry.row for entry in entries])
        for position, error in errors.items():
            entries[position].error = error
        segment = self._segments.get(table) or self._create_segment(table)
        message = encode_batch(batch, segment.name, segment.messages + 1)
        write_all(segment.fd, message)
        return segment, len(message)

    def _create_segment(self, table: str) -> _OpenSegment:
        self._numbers[table] += 1
        name = SegmentName(table, self.writer, self._incarnation, self._numbers[table])
        path = self.folder / f"{name}{OPEN}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        if not try_lock(fd) or os.fstat(fd).st_nlink == 0:
            # Another process recovered the file, empty as it was, before it was locked: take the next number.
            os.close(fd)
            return self._create_segment(table)
        segment = _OpenSegment(name, path, fd, time.monotonic())
        self._segments[table] = segment
        header = encode_schema(name)
        write_all(fd, header)
        os.fdatasync(fd)
        fsync_path(self.folder)
        segment.size = len(header)
        return segment

    def _seconds_to_rotation(self) -> float | None:
        if not self._segments:
            return None
        oldest = min(segment.opened for segment in self._segments.values())
        return max(0.0, oldest + self.config.segment_seconds - time.monotonic())

    def _close_segments(self, *, everything: bool) -> None:
        now = time.monotonic()
        for table, segment in list(self._segments.items()):
            old = now - segment.opened >= self.config.segment_seconds
            if everything or old or segment.size >= self.config.segment_bytes:
                write_all(segment.fd, END_MARK)
                os.fdatasync(segment.fd)
                os.rename(segment.path, segment.closed_path)
                fsync_path(self.folder)
                os.close(segment.fd)
                del self._segments[table]
                self._counters.segments += 1

    def _break(self, reason: str) -> None:
        """Refuse everything from here on, and take back from the files what was written but not acknowledged."""
        with self._condition:
            self._failure = reason
            entries = [*self._queue, *self._waiting]
            self._queue = []
            self._waiting.clear()
        try:
            self._take_back()
        finally:
            resolve(entries, JournalBroken(reason))
            with self._condition:
                self._condition.notify_all()

    def _take_back(self) -> None:
        """Cut the segments to what was acknowledged, and let go of them: a sealer may recover them."""
        segments = list(self._segments.values())
        self._segments.clear()
        for segment in segments:
            try:
                os.ftruncate(segment.fd, segment.size)
                os.fdatasync(segment.fd)
            except OSError as error:
                log.error("%s: rows that were refused may still be recorded: %s", segment.path, error)
            os.close(segment.fd)

    def _forget_in_child(self) -> None:
        # A forked child would hold the segments' locks after its parent died, and so keep them from recovery.
        for segment in self._segments.values():
            os.close(segment.fd)
        self._segments = {}
        self._thread = None


_live: weakref.WeakSet[Journal] = weakref.WeakSet()


def _forget_all_in_child() -> None:
    for journal in list(_live):
        journal._forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
