"""What a Delta table's log holds: which files there are, what ids they can hold, and which commits added which.

A run that knows up to which version it has come reads the few commits since then, and opens only files that can hold
what it looks for. So its cost follows what is new, not what there is.

deltalake 1.6 has no public reader of that: ``history`` names no files, ``load_cdf`` returns rows and not the files they
are in, and two snapshots don't say which of the files between them only rewrote rows.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate, count
from typing import Any, Final
from urllib.parse import unquote

import duckdb
import pyarrow as pa
import pyarrow.dataset as pa_ds
from deltalake import DeltaTable

from feedback.lake.delta_log import ERASED, TAKES_ROWS
from feedback.lake.tables import Lake, LakeError
from feedback.lake.views import quoted_files, unreadable_features
from feedback.schema import TABLES

_READERS: Final = 8
_HIGHEST: Final = "\U0010ffff" * 8


class LogGoneError(RuntimeError):
    """A commit's file in the log is not there any more: logs are cleaned up after a time."""


class Spans:
    """A set of closed intervals of texts."""

    def __init__(self, spans: Iterable[tuple[str | None, str | None]]) -> None:
        """None is an end that is not known, so that it may be anything."""
        ordered = sorted((low or "", _HIGHEST if high is None else high) for low, high in spans)
        self._lows = [low for low, _ in ordered]
        self._highest = list(accumulate((high for _, high in ordered), max))

    def meet(self, low: str | None, high: str | None) -> bool:
        """Whether any of them has a text in common with this one."""
        before = bisect_right(self._lows, _HIGHEST if high is None else high)
        return before > 0 and self._highest[before - 1] >= (low or "")


class DataFiles:
    """The data files of a snapshot and the bounds of their text columns, from the log alone."""

    def __init__(self, snapshot: DeltaTable) -> None:
        """Raises LakeError if another writer switched on what makes the files alone not the rows."""
        if features := unreadable_features(snapshot):
            raise LakeError(f"table {snapshot.table_uri} uses {', '.join(features)}, which Millrace can't read")
        self._actions = pa.table(snapshot.get_add_actions(flatten=True))
        self.paths: list[str] = [unquote(path) for path in self._actions["path"].to_pylist()]

    def bounds(self, column: str) -> dict[str, tuple[str | None, str | None]]:
        """(low, high) by path; a file whose bounds are not known has (None, None)."""
        ends = (self._ends(f"min.{column}"), self._ends(f"max.{column}"))
        return {path: (low, high) for path, low, high in zip(self.paths, *ends, strict=True)}

    def holding(self, spans: Spans, column: str, *, nullable: bool = False) -> list[str]:
        """The files that can hold a row whose ``column`` lies in one of the spans.

        Of a nullable column a file without bounds holds only nulls, if it has bounds of another column.
        """
        known = self.bounds("response_id") if nullable else {}
        return [
            path
            for path, (low, high) in self.bounds(column).items()
            if spans.meet(low, high) and not (low is None and known.get(path, (None, None))[0] is not None)
        ]

    def at(self, column: str, time: datetime) -> list[str]:
        """The files that can hold a row whose time in ``column`` is this one. Bounds are whole milliseconds."""
        ends = zip(self.paths, self._ends(f"min.{column}"), self._ends(f"max.{column}"), strict=True)
        slack = timedelta(milliseconds=1)
        return [
            path
            for path, low, high in ends
            if (low is None or low - slack <= time) and (high is None or time <= high + slack)
        ]

    def _ends(self, name: str) -> list[Any]:
        if name not in self._actions.column_names:
            return [None] * len(self.paths)
        ends: list[Any] = self._actions[name].to_pylist()
        return ends


@dataclass(frozen=True)
class Commit:
    """What a commit did to a table's files.

    ``added``: files it added, ``fresh`` those among them whose rows the table had not before; ``removed``: files it
    removed; ``rows_gone``: whether rows left the table with them (an erasure, a retention, another tool's delete).
    """

    version: int
    added: list[str]
    fresh: list[str]
    removed: list[str]
    rows_gone: bool


def commits(lake: Lake, table: str, since: int, until: int) -> list[Commit]:
    """The commits ``since`` < version <= ``until``, oldest first.

    Raises LogGoneError if the log does not reach back to ``since``.
    """
    return [_commit(version, actions) for version, actions in enumerate(_commits(lake, table, since, until), since + 1)]


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
            until = self._lake.table(table).version()
            for version, actions in enumerate(_commits(self._lake, table, read, until), start=read + 1):
                self._follow(table, version, actions)
                self._read[table] = version
        return {table: count for table, count in self._rows.items() if count}

    def _follow(self, table: str, version: int, actions: list[dict[str, Any]]) -> None:
        new = self._new[table]
        removed = {unquote(action["remove"]["path"]) for action in actions if "remove" in action}
        if removed <= new:
            new.update(unquote(action["add"]["path"]) for action in actions if "add" in action)
        elif version > self._after.get(table, -1):
            self._rows[table] += sum(int(action.get("commitInfo", {}).get(ERASED, 0)) for action in actions)
        new -= removed


def _commits(lake: Lake, table: str, since: int, until: int) -> Iterator[list[dict[str, Any]]]:
    """The actions of each commit ``since`` < version <= ``until``. Raises LogGoneError if one is not there any more."""
    files = lake.files(table).filesystem

    def read(version: int) -> list[dict[str, Any]]:
        try:
            with files.open_input_file(f"_delta_log/{version:020d}.json") as log:
                return [json.loads(line) for line in log.read().splitlines()]
        except FileNotFoundError as error:
            raise LogGoneError(f"{lake.table_uri(table)}: commit {version} was cleaned up") from error

    with ThreadPoolExecutor(_READERS) as pool:
        yield from pool.map(read, range(since + 1, until + 1))


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
        [unquote(file["path"]) for file in added],
        # A commit that also removes files rewrites rows that are there already: none of them is new.
        [] if removed else [unquote(file["path"]) for file in added if file.get("dataChange")],
        [unquote(file["path"]) for file in removed],
        any(file.get("dataChange", True) for file in removed) or (bool(removed) and not TAKES_ROWS.isdisjoint(info)),
    )


def scan_sql(
    connection: duckdb.DuckDBPyConnection,
    lake: Lake,
    table: str,
    paths: Sequence[str],
    columns: Sequence[str],
    name: str,
) -> str:
    """A SELECT of some columns of some of a table's data files. ``name`` is for what it registers."""
    listed = ", ".join(columns)
    if paths and lake.local:
        files = quoted_files(f"{lake.table_uri(table)}/{path}" for path in paths)
        return f"SELECT {listed} FROM read_parquet([{files}], hive_partitioning = false)"
    source: Any = TABLES[table].empty_table()
    if paths:
        # The folder's date is no column of the files, and nothing here asks for it.
        source = pa_ds.dataset(
            list(paths), schema=TABLES[table], format="parquet", filesystem=lake.files(table).filesystem
        )
    connection.register(name, source)
    return f"SELECT {listed} FROM {name}"
