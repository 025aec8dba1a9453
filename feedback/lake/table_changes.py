"""Which files each commit of a Delta table added and removed, by its log.

A run that knows up to which version it has come reads the few commits since then. So its cost follows what is new, not
what there is. Paths are as the log has them.

deltalake 1.6 has no public reader of that: ``history`` names no files, ``load_cdf`` returns rows and not the files they
are in, and two snapshots don't say which of the files between them only rewrote rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from feedback.lake.delta_log import ERASED, TAKES_ROWS
from feedback.lake.tables import Lake
from feedback.schema import TABLES

_READERS: Final = 8


class LogGoneError(FileNotFoundError):
    """A commit's file in the log is not there any more: logs are cleaned up after a time."""


@dataclass(frozen=True)
class Commit:
    """What a commit did to a table's files.

    ``added``: files it added, ``fresh`` those among them whose rows the table had not before; ``removed``: files it
    removed; ``rows_gone``: whether rows left the table with them (an erasure, a retention, another tool's delete);
    ``erased``: how many an erasure took.
    """

    version: int
    added: list[str]
    fresh: list[str]
    removed: list[str]
    rows_gone: bool
    erased: int


def commits(lake: Lake, table: str, since: int, until: int) -> list[Commit]:
    """The commits ``since`` < version <= ``until``, oldest first.

    Raises LogGoneError if the log does not reach back to ``since``.
    """
    files = lake.files(table).filesystem

    def read(version: int) -> Commit:
        try:
            with files.open_input_file(f"_delta_log/{version:020d}.json") as log:
                return _commit(version, [json.loads(line) for line in log.read().splitlines()])
        except FileNotFoundError as error:
            raise LogGoneError(f"{lake.table_uri(table)}: commit {version} was cleaned up") from error

    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(read, range(since + 1, until + 1)))


class ErasedSince:
    """How many rows that were in the tables at some versions have been erased since, by what the commits say.

    It goes by the order of commits and by no clock. A file's rows are new if the commit that added it replaced none, or
    only new files; an erasure in new files alone touches nothing that was there before.
    """

    def __init__(self, lake: Lake, versions: Mapping[str, int], *, after: Mapping[str, int] | None = None) -> None:
        """``after``: count the erasures of commits after these versions only."""
        self._lake = lake
        self._after = after or {}
        self._read = {table: version for table, version in versions.items() if table in TABLES}
        self._new: dict[str, set[str]] = {table: set() for table in self._read}
        self._rows: Counter[str] = Counter()

    def rows(self) -> dict[str, int]:
        """By table, of those that have lost any; reads the commits since the last call.

        Rows that came in later count too where one file held both. Raises LakeError, OSError, and LogGoneError if the
        log does not reach back.
        """
        for table, read in self._read.items():
            new = self._new[table]
            for commit in commits(self._lake, table, read, self._lake.table(table).version()):
                if new.issuperset(commit.removed):
                    new.update(commit.added)
                elif commit.version > self._after.get(table, -1):
                    self._rows[table] += commit.erased
                new.difference_update(commit.removed)
                self._read[table] = commit.version
        return {table: count for table, count in self._rows.items() if count}


def rows_left(lake: Lake, table: str, since: int) -> bool:
    """Whether a commit after version ``since``, which is young enough to be followed by its log, took rows away."""
    for version in count(since + 1):
        try:
            [commit] = commits(lake, table, version - 1, version)
        except LogGoneError:  # there is no later one
            return False
        if commit.rows_gone:
            return True
    raise AssertionError("unreachable")


def _commit(version: int, actions: list[dict[str, Any]]) -> Commit:
    added = [action["add"] for action in actions if "add" in action]
    removed = [action["remove"] for action in actions if "remove" in action]
    info: dict[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    return Commit(
        version,
        [file["path"] for file in added],
        # A commit that also removes files rewrites rows that are there already: none of them is new.
        [] if removed else [file["path"] for file in added if file.get("dataChange")],
        [file["path"] for file in removed],
        any(file.get("dataChange", True) for file in removed) or (bool(removed) and not TAKES_ROWS.isdisjoint(info)),
        int(info.get(ERASED, 0)),
    )
