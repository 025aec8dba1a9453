"""Files of a Delta table: Parquet written and made durable before a commit names it.

deltalake's own writer leaves a local file and the commit that names it to the kernel's cache. A segment may only be
removed when its rows would survive a power loss, so Parquet files are written and fsynced here, committed through
deltalake (conflict detection, checkpoints), and the log is fsynced before anyone is told.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction

from feedback.files import fsync_path, make_folder
from feedback.ids import uuid7
from feedback.schema import TIME_COLUMN

_ROW_GROUP_ROWS = 65_536
_BOUND_LENGTH = 64  # characters of a text bound: ids are whole, prompts do not fill the log
_LAST_CHARACTER = "\U0010ffff"


class TableFiles:
    """Writes the data files of one Delta table, on a local disk or an object store."""

    def __init__(self, uri: str, storage_options: dict[str, str], *, local: bool) -> None:
        self.folder = Path(uri) if local else None
        self._filesystem: pa_fs.FileSystem = (
            pa_fs.SubTreeFileSystem(uri, pa_fs.LocalFileSystem())
            if local
            else pa_fs.PyFileSystem(DeltaStorageHandler(uri, storage_options))
        )

    def write(self, table: str, data: pa.Table | pa.RecordBatchReader) -> list[AddAction]:
        """Write the rows, one Parquet file a date, durable on return. The rows' own time decides the date (UTC)."""
        writers: dict[date, _FileWriter] = {}
        try:
            for chunk in _chunks(data):
                for day, rows in _by_date(chunk, TIME_COLUMN[table]):
                    if day not in writers:
                        writers[day] = self._start(day, rows.schema)
                    writers[day].write(rows)
        except BaseException:
            for writer in writers.values():
                writer.close()
            self.delete([writer.path for writer in writers.values()])
            raise
        return [self._finish(day, writer) for day, writer in writers.items()]

    def delete(self, paths: list[str]) -> None:
        """Remove files that no commit names."""
        for path in paths:
            self._filesystem.delete_file(path)

    def _start(self, day: date, schema: pa.Schema) -> _FileWriter:
        folder = f"date={day.isoformat()}"
        if self.folder is not None:
            make_folder(self.folder / folder)
        return _FileWriter(self._filesystem, f"{folder}/part-{uuid7()}.parquet", schema)

    def _finish(self, day: date, writer: _FileWriter) -> AddAction:
        writer.close()
        if self.folder is not None:
            fsync_path(self.folder / writer.path)
            fsync_path((self.folder / writer.path).parent)
        return AddAction(
            path=writer.path,
            size=self._filesystem.get_file_info(writer.path).size,
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

        Bounds are given for every column that is not nested and has a value, or for none: deltalake 1.6's
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


def _chunks(data: pa.Table | pa.RecordBatchReader) -> Iterator[pa.Table]:
    """The rows in tables of a row group's size, so that a stream of small batches does not become tiny row groups."""
    if isinstance(data, pa.Table):
        yield data
        return
    batches: list[pa.RecordBatch] = []
    rows = 0
    for batch in data:
        batches.append(batch)
        rows += batch.num_rows
        if rows >= _ROW_GROUP_ROWS:
            yield pa.Table.from_batches(batches)
            batches, rows = [], 0
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


def make_log_durable(table_folder: Path, since: int, until: int) -> None:
    """Fsync what the commits ``since`` < version <= ``until`` wrote to a local table's log."""
    log = table_folder / "_delta_log"
    for version in range(since + 1, until + 1):
        for path in log.glob(f"{version:020d}.*"):
            fsync_path(path)
    if (log / "_last_checkpoint").exists():
        fsync_path(log / "_last_checkpoint")
    fsync_path(log)


def drop_torn_commits(table_folder: Path) -> list[Path]:
    """Put aside the end of a local table's log where a power loss tore it; returns what was put aside.

    Commits are made one at a time and fsynced before anyone is told of them, so a commit that is not whole is the last
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
        aside = table_folder / "_torn"
        make_folder(aside)
        os.rename(path, aside / f"{uuid7()}-{path.name}")
        fsync_path(aside)
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
