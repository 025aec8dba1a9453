"""From the journal to the lake: closed segments become rows of the Delta tables, each exactly once."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pyarrow as pa

from feedback.files import fsync_path, locked
from feedback.ingest.deduplication import append_feedback
from feedback.ingest.id_index import take_in_if_used
from feedback.journal.recovery import load, put_aside, recover
from feedback.journal.segment import Segment, list_segments
from feedback.journal.streams import has_started, settle
from feedback.lake.erasure_registry import drop_erased, note_future_erasures
from feedback.lake.tables import Lake, is_sealed
from feedback.schema import TABLES

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
        note_future_erasures(lake, journal_folder)  # at each turn, before there are rows that are younger
        recover(journal_folder)
        sealed: list[str] = []
        listing = list_segments(journal_folder)
        for table, segments in groupby(listing, key=lambda segment: segment.name.table):
            for group in _sealable(list(segments), lake.config.seal_bytes):
                _seal_group(lake, table, group, listing)
                sealed += [str(segment.name) for segment in group]
        take_in_if_used(lake, journal_folder)
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


def _seal_group(lake: Lake, table: str, segments: list[Segment], listing: list[Segment]) -> None:
    snapshot = lake.table(table, readable=False)
    fresh = [segment for segment in segments if not is_sealed(segment, snapshot)]
    if len(fresh) < len(segments):  # a sealer was killed behind its commit
        with lake.committing(table):
            lake.make_durable(table, snapshot)
    loaded = [(segment, *found) for segment in fresh if (found := load(segment)) is not None]
    settled = (_settled(segment, rows, listing) for segment, rows, _ in loaded)
    folder = segments[0].path.parent
    rows = drop_erased(lake, folder, table, pa.concat_tables([TABLES[table].empty_table(), *settled]))
    if rows.num_rows:
        started = time.perf_counter()
        numbers: dict[str, int] = {}
        for segment, _, _ in loaded:
            numbers[segment.name.application] = segment.name.number
        metadata = {"segments": [str(segment.name) for segment, _, _ in loaded]}
        if table == "feedback":
            append_feedback(lake, folder, rows, transactions=numbers, metadata=metadata, snapshot=snapshot)
        else:
            lake.append(table, rows, transactions=numbers, metadata=metadata, snapshot=snapshot)
        log.debug("sealed %d rows of %s in %.0f ms", rows.num_rows, table, (time.perf_counter() - started) * 1e3)
    damaged = {segment.path for segment, _, whole in loaded if not whole}
    for segment in segments:
        if segment.path in damaged:
            put_aside(segment.path)
        else:
            segment.path.unlink()
    fsync_path(folder)


def _settled(segment: Segment, rows: pa.Table, listing: list[Segment]) -> pa.Table:
    """The segment's rows without streams in flight; those that no later segment continues are aborted."""
    if segment.name.table != "interactions" or not has_started(rows):
        return rows
    # A writer makes the next segment, with all open streams in it, before it closes one.
    later = (
        other
        for other in listing
        if other.name.application == segment.name.application
        and other.name.table == segment.name.table
        and other.name.number > segment.name.number
    )
    continued = any((found := load(other)) is not None and found[0].num_rows > 0 for other in later)
    return settle(rows, continued=continued)
