"""Removing at once, and for good, what the current version of a table does not need.

After an erasure nothing on disk may hold what was erased: not the files that were replaced, not those that a killed
writer left, not the change data of other tools, not the statistics in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Final

from feedback.files import TEMPORARY, fsync_path
from feedback.lake.data_files import data_files, unneeded
from feedback.lake.delta_log import LOG_FOLDER, TORN_FOLDER, forget
from feedback.lake.tables import Lake

log = logging.getLogger(__name__)

_SPILL: Final = re.compile(r"millrace-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_EXPORT: Final = re.compile(r"millrace-export-\w+")
_SPILL_AGE_S: Final = 60.0


def purge(lake: Lake, table: str) -> list[str]:
    """Remove all that the current version of a table does not need; older versions can't be read any more.

    On a local disk no writer is at work meanwhile. On an object store a file that no version names may be one that a
    living writer is about to commit: those that are younger than ``LakeConfig.orphan_hours`` stay, and are returned.
    Killed anywhere, it can be repeated. Raises LakeError, LockTimeoutError.
    """
    files = lake.files(table)
    with lake.alone(table):
        snapshot = lake.table(table)
        gone = unneeded(snapshot, 0)
        others = unneeded(snapshot, 0, unnamed=True) - gone
        kept = set()
        if not lake.local:
            young = others - unneeded(snapshot, lake.config.orphan_hours, unnamed=True)
            kept = {path for path in young if not path.startswith("_change_data/")}
        files.delete([*gone, *(others - kept)])
        left_behind = [file.path for file in files.list(TORN_FOLDER)]
        left_behind += [file.path for file in files.list(LOG_FOLDER) if lake.local and file.path.endswith(TEMPORARY)]
        files.delete(left_behind)
        snapshot.create_checkpoint()
        lake.make_durable(table, snapshot)
    # Commits that are made never change, so this needs no lock.
    forget(files, {file.path for file in data_files(snapshot)}, snapshot.version())
    if files.folder is not None:
        for folder in {(files.folder / path).parent for path in (*gone, *others, *left_behind)}:
            if folder.exists():
                fsync_path(folder)
        fsync_path(files.folder / LOG_FOLDER)
    return sorted(kept)


def drop_damaged_segments(journal_folder: Path, *, written_until: datetime | None = None) -> int:
    """Remove the damaged segments that sealing moved away, all or those last written until a time; returns how many.

    Their whole rows are in the lake. What is left of the others can't be read, so it may hold what was erased.
    """
    folder = journal_folder / "damaged"
    if not folder.exists():
        return 0
    until = time.time() if written_until is None else written_until.timestamp()
    paths = [path for path in folder.iterdir() if path.stat().st_mtime <= until]
    for path in paths:
        path.unlink()
    fsync_path(folder)
    return len(paths)


def drop_spilled() -> int:
    """Remove what killed queries of DuckDB and killed exports left among temporary files; returns how many there were.

    What any process that we may look at has open is in use, and with it its folder.
    """
    used = _open_files()
    dropped = 0
    for folder in Path(tempfile.gettempdir()).glob("millrace-*"):
        try:
            young = time.time() - folder.stat().st_mtime < _SPILL_AGE_S
            if _EXPORT.fullmatch(folder.name) and not young and str(folder) not in used:
                folder.unlink()
                dropped += 1
            if _SPILL.fullmatch(folder.name) and not young and not any(f.startswith(f"{folder}/") for f in used):
                shutil.rmtree(folder)
                dropped += 1
        except OSError as error:  # another user's, or one that its query removes
            log.info("%s stays: %s", folder, error)
    return dropped


def _open_files() -> set[str]:
    """What the processes that we may look at have open; psutil gives up a process with one file that it can't stat."""
    found = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        descriptors: list[str] = []
        with contextlib.suppress(OSError):  # it ended, or is another user's
            descriptors = os.listdir(f"/proc/{process}/fd")
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # it was closed
                found.add(os.readlink(f"/proc/{process}/fd/{descriptor}"))
    return found
