"""What a Delta table's log says: which files there are, what ids they can hold, and which commits added which.

A run that knows up to which version it has come reads the few commits since then, and opens only files that can hold
what it looks for. So its cost follows what is new, not what there is.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any, Final
from urllib.parse import unquote

import duckdb
import pyarrow as pa
import pyarrow.dataset as pa_ds
import pyarrow.fs as pa_fs
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler

from feedback.lake import Lake, LakeError
from feedback.schema import TABLES
from feedback.views import quoted, unreadable_features

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


def added_files(lake: Lake, table: str, since: int, until: int) -> list[str]:
    """The files whose rows are new with the commits ``since`` < version <= ``until``, oldest first.

    A commit that also removes files rewrites rows that are there already (a compaction, an erasure): it adds none.
    Raises LogGoneError if the log does not reach back to ``since``.
    """
    files = _filesystem(lake, table)

    def read(version: int) -> list[str]:
        try:
            with files.open_input_file(f"_delta_log/{version:020d}.json") as log:
                actions = [json.loads(line) for line in log.read().splitlines()]
        except FileNotFoundError as error:
            raise LogGoneError(f"{lake.table_uri(table)}: commit {version} was cleaned up") from error
        if any("remove" in action for action in actions):
            return []
        return [unquote(action["add"]["path"]) for action in actions if action.get("add", {}).get("dataChange")]

    with ThreadPoolExecutor(_READERS) as pool:
        return [path for paths in pool.map(read, range(since + 1, until + 1)) for path in paths]


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
        files = ", ".join(quoted(_escaped(f"{lake.table_uri(table)}/{path}")) for path in paths)
        return f"SELECT {listed} FROM read_parquet([{files}], hive_partitioning = false)"
    source: Any = TABLES[table].empty_table()
    if paths:
        # The folder's date is no column of the files, and nothing here asks for it.
        source = pa_ds.dataset(list(paths), schema=TABLES[table], format="parquet", filesystem=_filesystem(lake, table))
    connection.register(name, source)
    return f"SELECT {listed} FROM {name}"


def _filesystem(lake: Lake, table: str) -> pa_fs.FileSystem:
    uri = lake.table_uri(table)
    if lake.local:
        return pa_fs.SubTreeFileSystem(uri, pa_fs.LocalFileSystem())
    return pa_fs.PyFileSystem(DeltaStorageHandler(uri, lake.config.storage_options))


def _escaped(path: str) -> str:
    # DuckDB takes a file name for a pattern.
    return re.sub(r"([*?\[])", r"[\1]", path)
