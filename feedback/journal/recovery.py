"""Reading a journal folder, and closing what a crash left open in it.

Nothing here needs the journal's writer: any process may read or recover a folder at any time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from feedback.files import fsync_path, make_folder, try_lock, write_all
from feedback.journal.segment import END_MARK, Segment, decode, list_segments, scan
from feedback.schema import TABLES

log = logging.getLogger(__name__)


def recover(folder: Path) -> list[Path]:
    """Close every open segment whose writer is dead: cut the torn tail, keep every whole message.

    Returns the closed segments. A living writer's segments are locked and left alone. Safe to run at any time, by
    any number of processes at once.
    """
    recovered = []
    for segment in list_segments(folder):
        if segment.is_open:
            closed = _recover_segment(segment)
            if closed is not None:
                recovered.append(closed)
    return recovered


def _recover_segment(segment: Segment) -> Path | None:
    try:
        fd = os.open(segment.path, os.O_RDWR)
    except FileNotFoundError:  # its writer closed it, or another process recovered it
        return None
    try:
        if not try_lock(fd) or not segment.path.exists():
            return None
        data = segment.path.read_bytes()
        found = scan(data, segment.name)
        if found.torn:
            log.warning("%s: cut a torn tail of %d bytes", segment.path, found.torn)
        if not found.messages and not found.damaged:
            segment.path.unlink()
            fsync_path(segment.path.parent)
            return None
        if not found.finished:
            os.ftruncate(fd, found.end)
            os.lseek(fd, 0, os.SEEK_END)
            write_all(fd, END_MARK)
        os.fsync(fd)
        os.rename(segment.path, segment.closed_path)
        fsync_path(segment.path.parent)
        return segment.closed_path
    finally:
        os.close(fd)


def load(segment: Segment) -> tuple[pa.Table, bool] | None:
    """(rows, whether all bytes were whole) of a segment; None if it has been sealed and removed since it was listed."""
    for path in (segment.path, segment.closed_path):  # it may have been closed since it was listed
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        found = scan(data, segment.name)
        whole = not found.damaged and (segment.is_open or found.finished)
        return decode(data, segment.name, found), whole
    return None


def load_all(folder: Path, tables: Iterable[str] = tuple(TABLES)) -> list[tuple[Segment, pa.Table]]:
    """Every segment of a journal folder that is of these tables, with its rows, in the order of sealing."""
    wanted = set(tables)
    listing = [segment for segment in list_segments(folder) if segment.name.table in wanted] if folder.exists() else []
    return [(segment, found[0]) for segment in listing if (found := load(segment)) is not None]


def put_aside(path: Path) -> None:
    """Keep a damaged segment, whose whole rows have been sealed, out of the journal's way."""
    folder = path.parent / "damaged"
    make_folder(folder)
    log.error("%s is damaged: its whole rows are in the lake, the file is kept in %s", path, folder)
    os.rename(path, folder / path.name)
    fsync_path(folder)
