"""Files of a Delta table: Parquet written and made durable before a commit names it.

deltalake's own writer leaves a local file and the commit that names it to the kernel's cache. A segment may only be
removed when its rows would survive a power loss, so Parquet files are written and fsynced here, committed through
deltalake (conflict detection, checkpoints), and the log is fsynced before the commit is acknowledged (``delta_log``).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from itertools import accumulate
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction

from feedback.files import fsync_path, make_folder, replace_file
from feedback.ids import uuid7
from feedback.schema import TABLES, TIME_COLUMN, conform

_ROW_GROUP_ROWS: Final = 4096  # what is read of a file to find one row of it
_CHUNK_ROWS: Final = 65_536
_CHUNK_BYTES: Final = 64 << 20  # rows of long responses are large; memory must not grow with them
_SEARCH_THREADS: Final = 2
_READ_ROWS: Final = 4096
_BOUND_LENGTH: Final = 64  # characters of a text bound: ids are whole, prompts do not fill the log
_LAST_CHARACTER: Final = "\U0010ffff"
_HIGHEST: Final = _LAST_CHARACTER * 8
_UPLOAD_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class StoredFile:
    """A file as a listing saw it; ``path`` is below the listed address."""

    path: str
    size: int
    modified: datetime


class Store:
    """Files below one address, on a local disk or an object store."""

    def __init__(self, uri: str, storage_options: dict[str, str], *, local: bool) -> None:
        self.folder = Path(uri) if local else None
        self.filesystem: pa_fs.FileSystem = (
            pa_fs.SubTreeFileSystem(uri, pa_fs.LocalFileSystem())
            if local
            else pa_fs.PyFileSystem(DeltaStorageHandler(uri, storage_options))
        )

    def list(self, folder: str) -> list[StoredFile]:
        """The files in a folder and the folders below it, by path; none if there is no such folder."""
        if self.folder is not None and not (self.folder / folder).exists():
            return []
        found = self.filesystem.get_file_info(pa_fs.FileSelector(folder, recursive=True, allow_not_found=True))
        files = [StoredFile(info.path, info.size, info.mtime) for info in found if info.type == pa_fs.FileType.File]
        return sorted(files, key=lambda file: file.path)

    def read_bytes(self, path: str) -> bytes:
        """All of a file. Raises FileNotFoundError."""
        with self.filesystem.open_input_file(path) as file:
            return bytes(file.read())

    def write_bytes(self, path: str, data: bytes, *, private: bool = False) -> None:
        """Write a file, or replace it: whole or not at all, durable on return. A replaced file keeps its time.

        ``private``: on a local disk only its owner may read it.
        """
        if self.folder is None:
            # deltalake's stream takes plain bytes only, which Arrow's own buffering hands it.
            with self.filesystem.open_output_stream(path, buffer_size=_UPLOAD_BYTES) as stream:
                for start in range(0, len(data), _UPLOAD_BYTES // 2):
                    stream.write(data[start : start + _UPLOAD_BYTES // 2])
            return
        target = self.folder / path
        make_folder(target.parent)
        modified_ns = target.stat().st_mtime_ns if target.exists() else None
        replace_file(target, data, private=private, modified_ns=modified_ns)

    def delete(self, paths: Iterable[str]) -> None:
        """Remove files; one that is not there is no error."""
        for path in paths:
            try:
                self.filesystem.delete_file(path)
            except FileNotFoundError:
                continue


class TableFiles(Store):
    """The files of one Delta table: writes and reads its data files."""

    def write(self, table: str, data: pa.Table | pa.RecordBatchReader) -> list[AddAction]:
        """Write the rows, one Parquet file a date, durable on return. The rows' own time decides the date (UTC)."""
        writers: dict[date, _FileWriter] = {}
        try:
            for chunk in _chunks(data):
                for day, rows in _by_date(chunk, TIME_COLUMN[table]):
                    if day not in writers:
                        writers[day] = self._start(day, rows.schema)
                    writers[day].write(rows)
            return [self._finish(day, writer) for day, writer in writers.items()]
        except BaseException:
            # The error raised names the cause; a disk that is full takes a file's end no more than its rows.
            for writer in writers.values():
                with contextlib.suppress(OSError, pa.ArrowException):
                    writer.close()
                with contextlib.suppress(OSError):
                    self.delete([writer.path])
            raise

    def batches(self, table: str, path: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of one data file in their order, a few thousand at a time, in the table's schema.

        A column that the file lacks is null. Raises FileNotFoundError.
        """
        schema = TABLES[table] if columns is None else pa.schema([TABLES[table].field(name) for name in columns])
        with self.filesystem.open_input_file(unquote(path)) as source, pq.ParquetFile(source) as file:
            there = [name for name in schema.names if name in file.schema_arrow.names]
            for batch in file.iter_batches(_READ_ROWS, columns=there):
                yield conform(batch, schema)

    def search(
        self, table: str, paths: Sequence[str], columns: Sequence[str], keys: Sequence[str], ids: Sequence[str]
    ) -> pa.Table:
        """Some columns of the rows of data files in which one of ``keys``, texts, is among ``ids``: a few, in memory.

        Only row groups are read whose bounds hold one of the ids. DuckDB would read more: it keeps eight characters of
        a bound, which of an id are its time in minutes. Raises FileNotFoundError.
        """
        schema, wanted, spans = (
            pa.schema([TABLES[table].field(name) for name in columns]),
            pa.array(ids, pa.string()),
            Spans.of(ids),
        )

        def search_file(path: str) -> pa.Table:
            with self.filesystem.open_input_file(unquote(path)) as source, pq.ParquetFile(source) as file:
                groups = _row_groups(file.metadata, keys, spans)
                there = [name for name in columns if name in file.schema_arrow.names]
                rows = conform(file.read_row_groups(groups, columns=there, use_threads=False), schema)
            return rows.filter(reduce(pc.or_kleene, (pc.is_in(rows[key], wanted) for key in keys)))

        with ThreadPoolExecutor(_SEARCH_THREADS) as pool:
            return pa.concat_tables([schema.empty_table(), *pool.map(search_file, paths)])

    def _start(self, day: date, schema: pa.Schema) -> _FileWriter:
        folder = f"date={day.isoformat()}"
        if self.folder is not None:
            make_folder(self.folder / folder)
        path = f"{folder}/part-{uuid7()}.parquet"
        try:
            return _FileWriter(self.filesystem, path, schema)
        except BaseException:  # its name may be there
            with contextlib.suppress(OSError):
                self.delete([path])
            raise

    def _finish(self, day: date, writer: _FileWriter) -> AddAction:
        writer.close()
        if self.folder is not None:
            fsync_path(self.folder / writer.path)
            fsync_path((self.folder / writer.path).parent)
        return AddAction(
            path=writer.path,
            size=self.filesystem.get_file_info(writer.path).size,
            partition_values={"date": day.isoformat()},
            modification_time=time.time_ns() // 1_000_000,
            data_change=True,
            stats=json.dumps(writer.statistics()),
        )


class _FileWriter:
    """One Parquet file, with the statistics that let readers skip it."""

    def __init__(self, filesystem: pa_fs.FileSystem, path: str, schema: pa.Schema) -> None:
        self.path = path
        self._writer = pq.ParquetWriter(path, schema, filesystem=filesystem, compression="zstd", compression_level=3)
        self._rows = 0
        self._nulls = {field.name: 0 for field in schema if not pa.types.is_nested(field.type)}
        self._bounds: dict[str, tuple[Any, Any]] = {}

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows, row_group_size=_ROW_GROUP_ROWS)
        self._rows += rows.num_rows
        for name in self._nulls:
            column = rows.column(name)
            self._nulls[name] += column.null_count
            bounds = pc.min_max(column).as_py()
            if bounds["min"] is not None:
                low, high = self._bounds.get(name, (bounds["min"], bounds["max"]))
                self._bounds[name] = (min(low, bounds["min"]), max(high, bounds["max"]))

    def close(self) -> None:
        self._writer.close()

    def statistics(self) -> dict[str, Any]:
        """Delta's per-file statistics: https://github.com/delta-io/delta/blob/master/PROTOCOL.md#per-file-statistics

        There are bounds for every column that is not nested and has a value, or for none: deltalake 1.6's
        ``to_pyarrow_dataset`` takes a column without bounds, in a file that has some, for one that no filter matches.
        """
        bounds = {name: (_lower(low), _upper(high)) for name, (low, high) in self._bounds.items()}
        if any(low is None or high is None for low, high in bounds.values()):
            return {"numRecords": self._rows}
        return {
            "numRecords": self._rows,
            "minValues": {name: low for name, (low, _) in bounds.items()},
            "maxValues": {name: high for name, (_, high) in bounds.items()},
            "nullCount": self._nulls,
        }


def _lower(value: Any) -> str | float | None:
    """A bound that is not above ``value``, as JSON has it; None if JSON has none."""
    if isinstance(value, str):
        return value[:_BOUND_LENGTH]
    if isinstance(value, datetime):
        return _milliseconds(value)
    return value if math.isfinite(value) else None


def _upper(value: Any) -> str | float | None:
    """A bound that is not below ``value``, as JSON has it; None if JSON has none."""
    if isinstance(value, str):
        length = _BOUND_LENGTH
        while value[length : length + 1] == _LAST_CHARACTER:
            length += 1
        return value if len(value) <= length else value[:length] + _LAST_CHARACTER
    if isinstance(value, datetime):
        return _milliseconds(value + timedelta(microseconds=999))
    return value if math.isfinite(value) else None


def _milliseconds(value: datetime) -> str:
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def unneeded(snapshot: DeltaTable, hours: int, *, unnamed: bool = False) -> set[str]:
    """The files that no version of the last hours needs: those that were replaced, with ``unnamed`` all others too.

    deltalake would delete them too, but with two commits of its own, not durable.
    """
    return set(snapshot.vacuum(hours, dry_run=True, full=unnamed, enforce_retention_duration=False))


class Spans:
    """A set of closed intervals of texts."""

    def __init__(self, spans: Iterable[tuple[str | None, str | None]]) -> None:
        """None is an end that is not known, so that it may be anything."""
        ordered = sorted((low or "", _HIGHEST if high is None else high) for low, high in spans)
        self._lows = [low for low, _ in ordered]
        self._highest = list(accumulate((high for _, high in ordered), max))

    @classmethod
    def of(cls, values: Iterable[str]) -> Spans:
        """These texts alone."""
        return cls((value, value) for value in values)

    def meet(self, low: str | None, high: str | None) -> bool:
        """Whether any of them has a text in common with this one."""
        before = bisect_right(self._lows, _HIGHEST if high is None else high)
        return before > 0 and self._highest[before - 1] >= (low or "")


@dataclass(frozen=True)
class DataFile:
    """A data file of a snapshot, as the log describes it.

    ``bounds``: of a column its lowest and highest value; ``empty``: columns of which it has nulls only.
    """

    path: str
    size: int
    day: date
    rows: int | None
    bounds: dict[str, tuple[Any, Any]]
    empty: frozenset[str]

    def may_hold(self, column: str, spans: Spans) -> bool:
        """Whether it can have a row whose ``column``, a text, lies in one of the spans."""
        if column not in self.bounds:
            return column not in self.empty
        return spans.meet(*self.bounds[column])


def _row_groups(metadata: pq.FileMetaData, keys: Sequence[str], spans: Spans) -> list[int]:
    """The row groups that can have a row in which one of ``keys`` lies in the spans."""
    names = metadata.schema.names
    columns = [names.index(key) for key in keys if key in names]
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [number for number, group in enumerate(groups) if any(_may_hold(group.column(at), spans) for at in columns)]


def _may_hold(column: pq.ColumnChunkMetaData, spans: Spans) -> bool:
    known = column.statistics
    if known is None or not known.has_min_max:
        return known is None or not known.has_null_count or known.null_count < column.num_values
    return spans.meet(known.min, known.max)


def data_files(snapshot: DeltaTable, bounds: Sequence[str] = ()) -> list[DataFile]:
    """The data files of a snapshot, with the bounds of some columns, by date and path (so by time of writing)."""
    actions = pa.table(snapshot.get_add_actions(flatten=True))

    def values(name: str) -> list[Any]:
        return actions[name].to_pylist() if name in actions.column_names else [None] * actions.num_rows

    ends = {name: list(zip(values(f"min.{name}"), values(f"max.{name}"), strict=True)) for name in bounds}
    nulls = {name: values(f"null_count.{name}") for name in bounds}
    described = zip(*map(values, ("path", "size_bytes", "partition.date", "num_records")), strict=True)
    files = [
        DataFile(
            *(path, size, day, rows),
            {name: known[row] for name, known in ends.items() if known[row][0] is not None},
            frozenset(name for name, count in nulls.items() if count[row] == rows is not None),
        )
        for row, (path, size, day, rows) in enumerate(described)
    ]
    return sorted(files, key=lambda file: (file.day, file.path))


def _chunks(data: pa.Table | pa.RecordBatchReader) -> Iterator[pa.Table]:
    """The rows in larger tables, so that a stream of small batches does not become tiny row groups."""
    if isinstance(data, pa.Table):
        yield data
        return
    batches: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in data:
        batches.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield pa.Table.from_batches(batches)
            batches, rows, size = [], 0, 0
    if batches:
        yield pa.Table.from_batches(batches)


def dates(rows: pa.Table, time_column: str) -> pa.ChunkedArray:
    """The date (UTC) of every row, which is its partition."""
    return pc.cast(pc.cast(rows.column(time_column), pa.timestamp("us")), pa.date32(), safe=False)


def _by_date(rows: pa.Table, time_column: str) -> Iterator[tuple[date, pa.Table]]:
    days = dates(rows, time_column)
    distinct = pc.unique(days).to_pylist()
    for day in distinct:
        yield day, rows if len(distinct) == 1 else rows.filter(pc.equal(days, day))
