"""From the journal to the lake: closed segments become rows of the Delta tables, each exactly once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pyarrow as pa
from deltalake.exceptions import DeltaError

from feedback.files import LockTimeoutError, fsync_path, locked
from feedback.lake import Lake, LakeError, is_sealed
from feedback.recovery import load, put_aside, recover
from feedback.schema import TABLES
from feedback.segments import Segment, list_segments

log = logging.getLogger(__name__)


def seal(lake: Lake, journal_folder: Path) -> list[str]:
    """Move every closed segment of a journal into the lake; returns the segments' names.

    Segments that a dead writer left open are recovered first. Rows and the segments' numbers become part of the
    table in one commit; the files are removed after it. Killed anywhere and repeated, each row is there once.
    Raises LakeError, LockTimeoutError or OSError; what could not be sealed stays in the journal.
    """
    if not journal_folder.exists():
        return []
    with locked(journal_folder / ".seal.lock", lake.config.lock_timeout_s):
        recover(journal_folder)
        sealed: list[str] = []
        listing = list_segments(journal_folder)
        for table, segments in groupby(listing, key=lambda segment: segment.name.table):
            for group in _sealable(list(segments), lake.config.seal_bytes):
                _seal_group(lake, table, group)
                sealed += [str(segment.name) for segment in group]
        return sealed


def _sealable(segments: list[Segment], most_bytes: int) -> Iterator[list[Segment]]:
    """Closed segments in order, in groups for one commit; none that is behind an open one of the same writer."""
    group: list[Segment] = []
    size = 0
    for _, of_writer in groupby(segments, key=lambda segment: segment.name.application):
        for segment in of_writer:
            if segment.is_open:
                break
            group.append(segment)
            size += segment.path.stat().st_size
            if size >= most_bytes:
                yield group
                group, size = [], 0
    if group:
        yield group


def _seal_group(lake: Lake, table: str, segments: list[Segment]) -> None:
    snapshot = lake.table(table)
    fresh = [segment for segment in segments if not is_sealed(segment, snapshot)]
    loaded = [(segment, *found) for segment in fresh if (found := load(segment)) is not None]
    rows = pa.concat_tables([TABLES[table].empty_table(), *(rows for _, rows, _ in loaded)])
    if rows.num_rows:
        started = time.perf_counter()
        numbers: dict[str, int] = {}
        for segment, _, _ in loaded:
            numbers[segment.name.application] = segment.name.number
        names = [str(segment.name) for segment, _, _ in loaded]
        lake.append(table, rows, transactions=numbers, metadata={"segments": names}, snapshot=snapshot)
        log.debug("sealed %d rows of %s in %.0f ms", rows.num_rows, table, (time.perf_counter() - started) * 1e3)
    damaged = {segment.path for segment, _, whole in loaded if not whole}
    for segment in segments:
        if segment.path in damaged:
            put_aside(segment.path)
        else:
            segment.path.unlink()
    fsync_path(segments[0].path.parent)


class Sealer:
    """A thread that seals a journal at a steady pace while it is written."""

    def __init__(self, lake: Lake, journal_folder: Path) -> None:
        self.lake = lake
        self.journal_folder = journal_folder
        self.error: str | None = None
        self.sealed_segments = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def healthy(self) -> bool:
        """Whether the thread lives and its last seal succeeded. Rows are safe in the journal either way."""
        return self._thread is not None and self._thread.is_alive() and self.error is None

    def start(self) -> None:
        """Start sealing every ``LakeConfig.seal_seconds``."""
        self._thread = threading.Thread(target=self._run, name="sealer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and seal what is closed. Close the journal before. Raises what ``seal`` raises."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self.lake.config.lock_timeout_s)
        self.sealed_segments += len(seal(self.lake, self.journal_folder))

    def _run(self) -> None:
        while not self._stop.wait(self.lake.config.seal_seconds):
            try:
                self.sealed_segments += len(seal(self.lake, self.journal_folder))
                self.error = None
            except (LakeError, LockTimeoutError, OSError, DeltaError, pa.ArrowException) as error:
                # The rows stay in the journal, and the next round tries again.
                self.error = f"{type(error).__name__}: {error}"
                log.error("can't seal %s into %s: %s", self.journal_folder, self.lake.uri, self.error)
