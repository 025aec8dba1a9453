"""The log of a Delta table beyond what deltalake does: durable on a local disk, and without what must be forgotten.

deltalake 1.6 fsyncs neither commits nor checkpoints, leaves a torn commit where it is, and removes expired entries but
takes nothing out of those that stay.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from feedback.files import fsync_path, make_folder
from feedback.ids import uuid7
from feedback.lake.data_files import Store

log = logging.getLogger(__name__)

LOG_FOLDER: Final = "_delta_log"
TORN_FOLDER: Final = "_torn"
FEEDBACK_IDS: Final = "conflicts"
"""The key of a commit's metadata that names ids of feedback (``deduplication.py``)."""
ERASED: Final = "erased"
DROPPED: Final = "dropped"
TAKES_ROWS: Final = frozenset({ERASED, DROPPED})
"""The keys of a commit's metadata of which either shows that it took rows from the table (an erasure, a retention)."""

_COMMIT: Final = re.compile(r"(\d{20})\.json")
_DERIVED: Final = re.compile(r"(\d{20})\.(checkpoint.*\.parquet|crc|\d{20}\.compacted\.json)")


def make_log_durable(table_folder: Path, since: int, until: int) -> None:
    """Fsync what the commits ``since`` < version <= ``until`` wrote to a local table's log."""
    log = table_folder / "_delta_log"
    for version in range(since + 1, until + 1):
        for path in log.glob(f"{version:020d}.*"):
            with contextlib.suppress(FileNotFoundError):  # the log was tidied up just now, behind a checkpoint
                fsync_path(path)
    if (log / "_last_checkpoint").exists():
        fsync_path(log / "_last_checkpoint")
    fsync_path(log)


def drop_torn_commits(table_folder: Path) -> list[Path]:
    """Move the end of a local table's log that a power loss tore to ``_torn``; returns what was moved.

    Commits are made one at a time and fsynced before they are acknowledged, so a commit that is not whole is the last
    one, and what it would have added is in the journal still. The caller holds the table's lock.
    """
    log = table_folder / "_delta_log"
    torn = []
    versions = sorted(log.glob("[0-9]*.json"), reverse=True)
    for path in versions[:1]:
        if not _is_whole_commit(path):
            torn.append(path)
    last = log / "_last_checkpoint"
    if last.exists() and not _is_json(last.read_bytes()):
        torn.append(last)
    for path in sorted(log.glob("*.checkpoint*.parquet"), reverse=True)[:1]:
        if not _is_whole_parquet(path):
            torn.append(path)
            if last.exists() and last not in torn:
                torn.append(last)
    for path in torn:
        folder = table_folder / TORN_FOLDER
        make_folder(folder)
        os.rename(path, folder / f"{uuid7()}-{path.name}")
        fsync_path(folder)
    if torn:
        fsync_path(log)
    return torn


def _is_whole_commit(path: Path) -> bool:
    lines = path.read_bytes().splitlines()
    return bool(lines) and all(_is_json(line) for line in lines)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _is_whole_parquet(path: Path) -> bool:
    try:
        pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError):
        return False
    return True


def last_checkpoint(store: Store) -> int:
    """The version of the newest checkpoint that ``_last_checkpoint`` names; -1 if there is none."""
    try:
        return int(json.loads(store.read_bytes(f"{LOG_FOLDER}/_last_checkpoint"))["version"])
    except FileNotFoundError:
        return -1


def forget(store: Store, active: Collection[str], version: int) -> int:
    """Take out of the log what it holds of rows in files that are not ``active``; returns how many files it changed.

    A commit holds a file's statistics: the first characters of prompts, the names of users. Commits stay, without
    the statistics of files that are gone, so that a writer that still has an old version in hand finds the commits
    behind it. Checkpoints before ``version``, which has one, are removed. Killed anywhere, it can be repeated.
    """
    changed = 0
    for file in store.list(LOG_FOLDER):
        name = file.path.rpartition("/")[2]
        if (derived := _DERIVED.fullmatch(name)) and int(derived[1]) < version:
            store.delete([file.path])
            changed += 1
        elif _COMMIT.fullmatch(name):
            text = store.read_bytes(file.path)
            redacted = _without_statistics(text, active)
            if redacted != text:
                store.write_bytes(file.path, redacted)
                changed += 1
    return changed


def _without_statistics(commit: bytes, active: Collection[str]) -> bytes:
    lines = []
    for line in commit.splitlines():
        action = json.loads(line)
        removed = [
            action[kind].pop("stats", None)
            for kind in ("add", "remove")
            if kind in action and action[kind]["path"] not in active
        ]
        removed.append(action.get("commitInfo", {}).pop(FEEDBACK_IDS, None))
        lines.append(json.dumps(action, ensure_ascii=False, separators=(",", ":")).encode() if any(removed) else line)
    return b"\n".join(lines) + b"\n" if lines else commit
