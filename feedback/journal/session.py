"""A session of a journal's writer: the segments it has open, and the streams that are open in them.

A session ends with its process, or with the first write or fsync that fails. The next session has segments of its own.
Only the journal's thread uses it.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from feedback.config import JournalConfig
from feedback.files import fsync_path, try_lock, write_all
from feedback.ids import uuid7
from feedback.journal.codec import CONVERSION_ERRORS, RowError, convert
from feedback.journal.segment import CLOSED, END_MARK, OPEN, SegmentName, encode_batch, encode_schema
from feedback.journal.streams import Stream
from feedback.schema import TABLES

log = logging.getLogger(__name__)

REPEATING: Final = 0.25
"""The share of the writer's time that goes to repeating open streams at most, unless that takes very long."""
LONGEST_S: Final = 30.0
"""Rows are not kept from the lake for longer on account of that."""


@dataclass(eq=False)
class _OpenSegment:
    name: SegmentName
    path: Path
    fd: int
    opened: float
    size: int = 0  # bytes that are durable
    messages: int = 0
    repeated: int = 0  # of the bytes, those that repeat streams
    repeat_s: float = 0.0  # that they took
    unsynced: int = 0  # bytes written behind them
    unsynced_messages: int = 0

    def old_at(self, config: JournalConfig) -> float:
        """The time of ``time.monotonic`` at which it is to be closed: later if repeating open streams takes long."""
        return self.opened + max(config.segment_seconds, min(self.repeat_s / REPEATING, LONGEST_S))


class WriterSession:
    """Segments of ``writer`` in ``folder``. Any method may raise OSError: the session is over then, ``abandon`` it."""

    def __init__(self, folder: Path, config: JournalConfig, writer: str) -> None:
        self.folder = folder
        self.config = config
        self.writer = writer
        self.incarnation = uuid.UUID(uuid7()).hex
        self.streams: dict[str, Stream] = {}
        """Open ones, by response id: their start is durable."""
        self.bytes = 0
        self.closed_segments = 0
        self._segments: dict[str, _OpenSegment] = {}  # by table
        self._replaced: list[_OpenSegment] = []  # by a newer one, not closed yet
        self._lost: list[Stream] = []  # open ones of an abandoned session, whose last record is still to be written
        self._numbers: dict[str, int] = dict.fromkeys(TABLES, 0)

    def write(self, table: str, rows: list[dict[str, Any]]) -> dict[int, RowError]:
        """Write rows as one message, not durable before ``sync``; errors by position of rows that are left out."""
        segment = self._segments.get(table) or self._create(table)
        return self._write(segment, rows)

    def sync(self) -> None:
        """Make all that was written durable."""
        for segment in (*self._segments.values(), *self._replaced):
            if segment.unsynced:
                os.fdatasync(segment.fd)
        # Only now is any of it acknowledged: until here a failure takes all of it back.
        for segment in (*self._segments.values(), *self._replaced):
            if segment.unsynced:
                segment.size += segment.unsynced
                segment.messages += segment.unsynced_messages
                self.bytes += segment.unsynced
                segment.unsynced = segment.unsynced_messages = 0

    def seconds_to_rotation(self) -> float | None:
        """When the oldest segment is due to be closed; None if there is none."""
        if not self._segments:
            return None
        oldest = min(segment.old_at(self.config) for segment in self._segments.values())
        return max(0.0, oldest - time.monotonic())

    def close_segments(self, *, everything: bool) -> None:
        """Close those that are old enough, or large enough without the streams that they repeat, or all of them."""
        now = time.monotonic()
        for table, segment in list(self._segments.items()):
            old = now >= segment.old_at(self.config)
            large = segment.size - segment.repeated >= self.config.segment_bytes
            if not (everything or old or large):
                continue
            if table == "interactions" and self.streams:
                self._repeat_streams(segment if everything else self._replace(segment), self.streams.values())
            if self._segments[table] is segment:
                self._replaced.append(self._segments.pop(table))
            self._close(segment)

    def abandon(self, reason: str) -> None:
        """End this session: no caller's row is written any more, its streams are lost. ``cut`` what it leaves."""
        for stream in self.streams.values():
            stream.lost = f"{reason}; this response's start was recorded before, and it counts as aborted"
            stream.ended = True
        self._lost = list(self.streams.values())
        self.streams.clear()
        self._replaced += self._segments.values()
        self._segments.clear()

    def cut(self, *, proven: bool = False, closing: bool = False) -> bool:
        """Cut an abandoned session's segments to what was acknowledged, and let go of them: a sealer may recover them.

        Before that its lost streams are recorded once more, with their tokens so far, on a disk that is ``proven``;
        where the journal is ``closing``, the tokens of their last record must do. What the disk won't cut, or won't
        take, stays ours, locked, so that rows that were refused are not sealed; then this is False, and to be called
        again. It raises nothing.
        """
        cut = [segment for segment in self._replaced if self._cut(segment)]
        if len(cut) < len(self._replaced) or not (closing or self._record_lost(proven)):
            return False
        for segment in cut:
            os.close(segment.fd)
        self._replaced.clear()
        return True

    def _cut(self, segment: _OpenSegment) -> bool:
        try:
            os.ftruncate(segment.fd, segment.size)
            os.lseek(segment.fd, segment.size, os.SEEK_SET)
            os.fsync(segment.fd)
        except OSError as error:
            log.error("%s can't be cut to what was acknowledged: %s", segment.path, error)
            return False
        segment.unsynced = segment.unsynced_messages = 0
        return True

    def _record_lost(self, proven: bool) -> bool:
        """Record the lost streams in the newest segment, which an older one's are sealed from; whether that is done."""
        if not self._lost:
            return True
        if not proven:
            return False
        whole = [segment for segment in self._replaced if segment.name.table == "interactions" and segment.size]
        try:
            self._repeat_streams(max(whole, key=lambda segment: segment.name.number), self._lost)
        except OSError as error:
            log.error("%d streams can't be recorded as far as they are: %s", len(self._lost), error)
            return False
        self._lost = []
        return True

    def forget(self) -> None:
        """Close the files of another process's session, after a fork, without a trace."""
        for segment in (*self._segments.values(), *self._replaced):
            os.close(segment.fd)
        self._segments, self._replaced = {}, []

    def _write(self, segment: _OpenSegment, rows: list[dict[str, Any]]) -> dict[int, RowError]:
        try:
            batch, errors = convert(segment.name.table, rows)
        except CONVERSION_ERRORS:  # all of them are more than a message holds: their texts, than offsets of 32 bits
            if (half := len(rows) // 2) == 0:
                raise
            first, second = self._write(segment, rows[:half]), self._write(segment, rows[half:])
            return first | {half + position: error for position, error in second.items()}
        message = encode_batch(batch, segment.name, segment.messages + segment.unsynced_messages + 1)
        write_all(segment.fd, memoryview(message))
        segment.unsynced += message.size
        segment.unsynced_messages += 1
        return errors

    def _create(self, table: str) -> _OpenSegment:
        self._numbers[table] += 1
        name = SegmentName(table, self.writer, self.incarnation, self._numbers[table])
        path = self.folder / f"{name}{OPEN}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)  # with what people wrote
        if not try_lock(fd) or os.fstat(fd).st_nlink == 0:
            # Another process recovered the empty file before it was locked: take the next number.
            os.close(fd)
            return self._create(table)
        segment = _OpenSegment(name, path, fd, time.monotonic())
        self._segments[table] = segment
        header = encode_schema(name)
        write_all(fd, header)
        os.fdatasync(fd)
        fsync_path(self.folder)
        segment.size = len(header)
        return segment

    def _replace(self, segment: _OpenSegment) -> _OpenSegment:
        """The next segment of the table, made before ``segment`` is closed."""
        self._replaced.append(self._segments.pop(segment.name.table))
        return self._create(segment.name.table)

    def _repeat_streams(self, segment: _OpenSegment, streams: Iterable[Stream]) -> None:
        """Write every one of the streams, as it is, into ``segment``, and make that durable.

        Before the segment that is left is closed, so that a sealer of that one finds the one that continues it.
        """
        streams, began, before = list(streams), time.monotonic(), segment.size
        rows = [stream.row() for stream in streams]
        errors = self._write(segment, rows)
        for position, error in errors.items():
            log.error("stream %s keeps its last record: %s", streams[position].response_id, error)
        if errors:
            self._write(segment, [streams[position].last for position in errors])
        self.sync()
        segment.repeated += segment.size - before
        segment.repeat_s = time.monotonic() - began
        for position, (stream, row) in enumerate(zip(streams, rows, strict=True)):
            if position not in errors:
                stream.last = row

    def _close(self, segment: _OpenSegment) -> None:
        write_all(segment.fd, END_MARK)
        os.fdatasync(segment.fd)
        os.rename(segment.path, segment.path.with_suffix(CLOSED))
        fsync_path(self.folder)
        os.close(segment.fd)
        self._replaced.remove(segment)
        self.closed_segments += 1
