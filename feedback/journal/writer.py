"""The durable append log: a row is acknowledged when the disk has it, and not before.

Any number of tasks and threads append; one writer thread turns all rows that wait into one Arrow message a table,
writes it, calls fdatasync once, and wakes them all (group commit). With two threads, of which one converts the next
rows while the other waits for the disk, groups get a third as large, and 64 writers half as many rows a second.
Segments are closed by size and age; sealing moves closed segments into the lake. After a crash ``open`` (or a sealer)
cuts what was torn, keeps every whole message, and closes the segment, so that nothing acknowledged is lost.

A write or fsync that fails is final: its segments get no further row but the last record of the streams that are open
in them, and nothing is acknowledged, until the disk has been proven by a file that was written, fsynced, renamed and
read back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from feedback.config import JournalConfig
from feedback.files import make_folder, prove_disk
from feedback.journal.codec import RowError, check_row
from feedback.journal.entry import Entry, State, resolve
from feedback.journal.recovery import recover
from feedback.journal.segment import WRITER
from feedback.journal.session import WriterSession
from feedback.journal.streams import STARTED, SoFar, Stream, aborted, refused

log = logging.getLogger(__name__)

_COUNTERS = (
    *("rows", "commits", "refused", "last_commit_ms", "last_commit_rows", "commit_ms_total", "failures"),
    *("bytes", "segments"),  # of sessions that a failing disk ended and that left nothing to do
)
_PROOF_BYTES = 4 << 20  # written to prove that a disk takes rows again


class JournalError(RuntimeError):
    """A row was not acknowledged."""


class JournalFull(JournalError):
    """The queue stayed full past the deadline; ``retry_after`` is the number of seconds to wait before another try."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class JournalBroken(JournalError):
    """The disk refused a write or hangs; nothing is acknowledged until it has been proven again."""


class JournalUnsure(JournalBroken):
    """The disk hangs in the midst of the write: the row may or may not be recorded."""


class Journal:
    """The log of one writer (a replica's name) in a folder that several writers may share."""

    def __init__(self, folder: Path, config: JournalConfig, writer: str) -> None:
        """Raises ValueError if ``writer`` is not 1 to 64 letters, digits, '_' or '-'."""
        if not WRITER.fullmatch(writer):
            raise ValueError(f"writer {writer!r}: 1 to 64 letters, digits, '_' or '-' are allowed")
        self.folder = folder
        self.config = config
        self.writer = writer
        self._condition = threading.Condition()
        self._queue: list[Entry] = []
        self._queued = 0  # rows in it
        self._waiting: dict[Entry, None] = {}  # callers beyond the queue's bound, first come first served
        self._taken: list[Entry] = []  # what the writer is about to make durable
        self._to_end: dict[Stream, dict[str, Any] | None] = {}  # with the row of the end if there is one
        self._session = WriterSession(folder, config, writer)
        self._ended_sessions: list[WriterSession] = []  # by a failing disk
        self._counters: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        self._failure: str | None = None
        self._stalled = False
        self._closing = False
        self._closed = threading.Event()
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
        threading.Thread(target=self._watch, name=f"journal-{self.writer}-watch", daemon=True).start()
        return recovered

    async def append(self, table: str, *rows: dict[str, Any]) -> None:
        """Return when the rows are on disk: one commit takes all of them, or none where the queue or the disk refuses.

        Raises RowError for a row that does not fit, which is left out alone, JournalFull if the queue stays full,
        JournalBroken if the disk fails or hangs. After JournalFull no row is recorded. A caller that is cancelled
        leaves its rows to be recorded.
        """
        for row in rows:
            check_row(table, row)
        if rows:
            await self._append(table, rows)

    async def begin(self, row: dict[str, Any], so_far: SoFar) -> Stream:
        """Record the start of a response that goes out while it is made; return when that is on disk.

        ``row`` is its interaction as it is, ``so_far`` gives it as it is later; it is called in another thread, at
        each change of segment. The owner of the stream ends or abandons it; one that is open when the process ends is
        recorded as aborted, with the tokens of the last such call. Raises as ``append`` does. After an error, and when
        the caller is cancelled, nothing is recorded, or the stream as aborted.
        """
        row = row | {"status": STARTED}
        check_row("interactions", row)
        stream = Stream(row["response_id"], row, so_far)
        await self._append("interactions", (row,), begins=stream)
        return stream

    async def end(self, stream: Stream, row: dict[str, Any]) -> None:
        """Record how a stream ended; return when that is on disk. ``row`` is its whole interaction.

        Raises as ``append`` does, and JournalBroken if the disk failed since it began: then it is recorded as aborted.
        The stream ends also when this raises. Its row follows when the disk takes it, with status ``error`` instead of
        ``complete``; a row that does not fit is replaced by the stream's last record, as aborted.
        """
        if row.get("response_id") != stream.response_id:
            raise ValueError(f"the row of response {row.get('response_id')} can't end the stream {stream.response_id}")
        try:
            check_row("interactions", row)
        except RowError:
            self.abandon(stream)
            raise
        await self._append("interactions", (row,), ends=stream)

    def abandon(self, stream: Stream) -> None:
        """End a stream, if it is open still, as aborted with what there is of it, as soon as the disk takes that."""
        self._end_later(stream, None)

    async def _append(
        self,
        table: str,
        rows: Sequence[dict[str, Any]],
        *,
        begins: Stream | None = None,
        ends: Stream | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        entry = Entry(table, rows, waiter, loop, begins, ends)
        try:
            if not self._offer(entry, loop):
                await asyncio.wait([waiter], timeout=self.config.append_timeout_s)
                self._refuse_if_waiting(entry)
            await waiter  # the watch ends it if the disk hangs
        except BaseException as error:
            if begins is not None or ends is not None:
                self._give_up(entry, reported=not isinstance(error, asyncio.CancelledError))
            raise

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
        self._closed.set()
        _live.discard(self)

    @property
    def healthy(self) -> bool:
        """Whether appends are accepted: the journal is open, and the disk has not failed."""
        thread = self._thread
        return (
            thread is not None
            and thread.is_alive()
            and self._failure is None
            and not self._closing
            and not self._stalled
        )

    @property
    def ended(self) -> bool:
        """Whether its thread has ended though nobody closed it: it will never take a row again."""
        return self._thread is not None and not self._thread.is_alive() and not self._closing

    @property
    def backlog(self) -> float:
        """The share of the queue that waits for the disk; from 1 on, callers wait for room."""
        return self._queued / self.config.max_queued_rows

    def stats(self) -> dict[str, float]:
        """Counters since ``open`` and gauges, times in milliseconds."""
        with self._condition:
            sessions = (*self._ended_sessions, self._session)
            counters = self._counters.copy()
            waiting = sum(len(entry.rows) for entry in self._waiting)
        for session in sessions:
            counters["bytes"] += session.bytes
            counters["segments"] += session.closed_segments
        return {
            "healthy": float(self.healthy),
            "queued_rows": self._queued,
            "waiting_rows": waiting,
            "open_streams": len(self._session.streams),
            **counters,
        }

    # Callers' side: never more than a few microseconds under the lock.

    def _offer(self, entry: Entry, loop: asyncio.AbstractEventLoop) -> bool:
        """Queue the entry, or let it wait for room (False)."""
        with self._condition:
            if self._failure is not None:
                raise JournalBroken(self._failure)
            if self._closing or self._thread is None:
                raise JournalBroken(f"journal {self.folder} is not open")
            if self._waiting or self._queued >= self.config.max_queued_rows:
                self._waiting[entry] = None
                return False
            self._put_in_queue(entry)
            if len(self._queue) == 1:
                # The writer is woken when the loop has run what is ready: more rows for the same commit, and a
                # writer that is woken in the midst of it would only wait for the interpreter.
                loop.call_soon(self._wake)
            return True

    def _put_in_queue(self, entry: Entry) -> None:
        entry.state = State.QUEUED
        self._queue.append(entry)
        self._queued += len(entry.rows)

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

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
        self._counters["refused"] += len(entry.rows)

    def _give_up(self, entry: Entry, *, reported: bool) -> None:
        """End the stream whose begin or end this is, and whose caller got an error (``reported``) or was cancelled."""
        with self._condition:
            taken = entry.state == State.TAKEN
            if entry.state in (State.WAITING, State.QUEUED):
                self._withdraw(entry)
        if entry.ends is not None:
            self._end_later(entry.ends, refused(entry.rows[0]) if reported else entry.rows[0])
        elif entry.begins is not None and taken:
            self._end_later(entry.begins, None)

    def _end_later(self, stream: Stream, row: dict[str, Any] | None) -> None:
        """Have the writer end a stream. What it finds ended, or never begun, it leaves."""
        with self._condition:
            if not stream.ended:
                self._to_end.setdefault(stream, row)
                self._condition.notify_all()

    def _watch(self) -> None:
        """Refuse rows that have waited too long because the disk hangs; those not yet written are withdrawn."""
        limit = self.config.commit_timeout_s
        while not self._closed.wait(min(1.0, limit / 4)):
            overdue = time.monotonic() - limit
            with self._condition:
                queued = [entry for entry in self._queue if entry.state == State.QUEUED and entry.since < overdue]
                taken = [entry for entry in self._taken if entry.since < overdue and not entry.waiter.done()]
                for entry in queued:
                    self._withdraw(entry)
                self._stalled = self._stalled or bool(queued or taken)  # until a commit succeeds
            late = f"journal {self.folder}: no commit within {limit:g} s; the row"
            resolve(queued, JournalBroken(f"{late} is not recorded"))
            resolve(taken, JournalUnsure(f"{late} may or may not be recorded"))

    # The writer thread's side.

    def _run(self) -> None:
        try:
            while not self._write_until_closed():
                if not self._wait_for_disk():
                    return
        except BaseException as error:
            self._break(f"journal {self.folder}: the writer thread ended: {error!r}")
            self._cut_ended(closing=True)
            raise

    def _write_until_closed(self) -> bool:
        """Serve callers until the journal closes (True) or the disk refuses a write (False)."""
        try:
            while True:
                entries, closing = self._take()
                if entries:
                    self._commit(entries)
                self._session.close_segments(everything=closing and not entries)
                if closing and not entries:
                    return True
        except OSError as error:
            log.error("journal %s is broken: %s", self.folder, error)
            self._break(f"journal {self.folder}: the disk refused a write: {error}")
            return False

    def _wait_for_disk(self) -> bool:
        """Refuse everything until the disk is proven (True) or the journal closes (False)."""
        while True:
            with self._condition:
                closing = self._condition.wait_for(lambda: self._closing, self.config.probe_seconds)
            if closing:
                self._cut_ended(closing=True)
                return False
            try:
                prove_disk(self.folder / f".{self.writer}.proof", _PROOF_BYTES)
            except OSError as error:
                log.warning("journal %s is still broken: %s", self.folder, error)
                continue
            if self._cut_ended(proven=True):
                break
        with self._condition:
            self._failure = None
        log.warning("journal %s: the disk is proven again; rows are taken", self.folder)
        return True

    def _cut_ended(self, *, proven: bool = False, closing: bool = False) -> bool:
        """Cut what ended sessions leave, and forget those with which that is done; whether it is with all of them."""
        for session in list(self._ended_sessions):
            if session.cut(proven=proven, closing=closing):
                with self._condition:
                    self._ended_sessions.remove(session)
                    self._counters["bytes"] += session.bytes
                    self._counters["segments"] += session.closed_segments
        return not self._ended_sessions

    def _take(self) -> tuple[list[Entry], bool]:
        """All entries that wait; none when it is time to close a segment or the journal."""
        with self._condition:
            self._stalled = False  # the disk has done all that was queued
            while not self._queue and not self._to_end and not self._closing:
                if not self._condition.wait(self._session.seconds_to_rotation()):
                    break
            entries = [entry for entry in self._queue if entry.state == State.QUEUED]
            entries += [_unattended(stream, row) for stream, row in self._to_end.items()]
            for entry in entries:
                entry.state = State.TAKEN
            self._queue, self._queued, self._taken, self._to_end = [], 0, entries, {}
            while self._waiting and self._queued < self.config.max_queued_rows:
                entry = next(iter(self._waiting))
                del self._waiting[entry]
                self._put_in_queue(entry)
            if self._queue:
                self._condition.notify_all()
            return entries, self._closing and not self._queue

    def _commit(self, entries: list[Entry]) -> None:
        """Make the entries durable and wake their callers. Raises OSError after having failed them."""
        started = time.perf_counter()
        streams, ended = self._session.streams, set[Stream]()
        by_table: dict[str, list[Entry]] = {}
        for entry in entries:
            stream = entry.ends
            if stream is not None and (stream in ended or streams.get(stream.response_id) is not stream):
                entry.error = JournalBroken(stream.lost or f"the response {stream.response_id} has ended before")
                continue
            if stream is not None:
                ended.add(stream)
                entry.rows = entry.rows or (aborted(stream.row()),)
            by_table.setdefault(entry.table, []).append(entry)
        try:
            for table, group in by_table.items():
                cut_short = []
                errors = self._session.write(table, [row for entry in group for row in entry.rows])
                entry_of = [entry for entry in group for _ in entry.rows] if errors else []
                for position, error in errors.items():
                    entry_of[position].error = error
                    if (stream := entry_of[position].ends) is not None:
                        cut_short.append(aborted(stream.last))
                if cut_short:
                    self._session.write(table, cut_short)
            self._session.sync()
        except BaseException as error:
            resolve(entries, JournalBroken(f"journal {self.folder}: the disk refused a write: {error!r}"))
            raise
        for entry in entries:
            if entry.begins is not None and entry.error is None:
                streams[entry.begins.response_id] = entry.begins
        for stream in ended:
            stream.ended = True
            del streams[stream.response_id]
        elapsed_ms = (time.perf_counter() - started) * 1e3
        counters = self._counters
        rows = sum(len(entry.rows) for entry in entries)
        counters["rows"] += rows
        counters["commits"] += 1
        counters["last_commit_rows"] = rows
        counters["last_commit_ms"] = elapsed_ms
        counters["commit_ms_total"] += elapsed_ms
        with self._condition:
            self._taken = []
        resolve(entries, None)

    def _break(self, reason: str) -> None:
        """Refuse everything from here on, and take back from the files what was written but not acknowledged."""
        with self._condition:
            self._counters["failures"] += 1
            self._failure = reason
            entries = [*self._queue, *self._waiting]
            self._queue, self._queued, self._taken = [], 0, []
            self._waiting.clear()
        self._session.abandon(reason)
        self._session.cut()
        with self._condition:
            self._ended_sessions.append(self._session)
            self._session = WriterSession(self.folder, self.config, self.writer)
        resolve(entries, JournalBroken(reason))
        with self._condition:
            self._condition.notify_all()

    def _forget_in_child(self) -> None:
        # A forked child would hold the segments' locks after its parent died, and so keep them from recovery.
        for session in (*self._ended_sessions, self._session):
            session.forget()
        self._thread = None


def _unattended(stream: Stream, row: dict[str, Any] | None) -> Entry:
    """The end of a stream for which no caller waits."""
    return Entry("interactions", () if row is None else (row,), Future(), None, ends=stream)


_live: weakref.WeakSet[Journal] = weakref.WeakSet()


def _forget_all_in_child() -> None:
    for journal in list(_live):
        journal._forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
