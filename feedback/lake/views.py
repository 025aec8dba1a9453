"""DuckDB over the lake: views of the Delta tables' data files, and of the journal's rows that are not in them yet.

On a local disk DuckDB reads the Parquet files itself. On an object store it reads them through Arrow and deltalake's
store, which knows every store that deltalake knows and needs no extension of DuckDB's.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Final
from urllib.parse import unquote

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pa_ds
import pyarrow.fs as pa_fs
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler

from feedback.ids import uuid7
from feedback.journal.streams import STARTED
from feedback.schema import TABLES

_PRUNED_BY: Final = ("response_id", "feedback_id", "created_at", "completed_at", "scored_at")
_PLAIN_FEATURES: Final = {"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}  # they change no data file
_NEWEST: Final = {"interactions": "experiment"}
"""By table a column that came last, by whose statistics it is known which files lack it: deltalake reads those of the
first 32 columns alone."""

_SCAN_ROWS: Final = 8192
_BYTES_AHEAD: Final = 64 << 20
_MOST_FILES_AHEAD: Final = 16
_GONE: Final = re.compile(r"No files found that match|No such file|FileNotFoundError|Object at location .* not found")

CURRENT_REWARDS: Final = """
CREATE VIEW current_rewards AS
SELECT * FROM rewards
QUALIFY row_number() OVER (PARTITION BY response_id ORDER BY scored_at DESC) = 1
"""
"""Of each response the latest reward, whatever the scorer."""


def connect(memory_limit: str, threads: int) -> duckdb.DuckDBPyConnection:
    """A DuckDB in memory, which spills to the system's folder for temporary files past ``memory_limit``.

    Its times are UTC, wherever it runs.
    """
    connection = duckdb.connect(
        config={
            "memory_limit": memory_limit,
            "threads": threads,
            "temp_directory": f"{tempfile.gettempdir()}/millrace-{uuid7()}",  # made if a query spills
            "python_enable_replacements": False,  # a name in a query is never a variable of the program
        }
    )
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def create_view(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    snapshot: DeltaTable,
    unsealed: pa.Table | None,
    storage_options: dict[str, str],
    *,
    local: bool,
) -> None:
    """View ``table``, of views ``sealed_<table>``, a Delta table's snapshot, and ``unsealed_<table>``, if any.

    Streams in flight are among the unsealed rows, but not in the view of both.
    """
    files = snapshot.file_uris()
    if files and local:
        names = quoted_files(unquote(file) for file in files)
        lack_columns = _lack_columns(table, snapshot)
        by_name = ", union_by_name = true" * lack_columns  # it opens every file at once
        source = f"read_parquet([{names}], hive_partitioning = true, hive_types = {{'date': DATE}}{by_name})"
        if lack_columns:
            connection.register(f"columns_of_{table}", TABLES[table].empty_table())
            source = f"(SELECT * FROM {source} UNION ALL BY NAME SELECT * FROM columns_of_{table})"
    else:
        source = f"files_of_{table}"
        empty = pa.schema(snapshot.schema().to_arrow()).empty_table()
        connection.register(source, _dataset(snapshot, storage_options) if files else empty)
    connection.execute(f"CREATE VIEW sealed_{table} AS SELECT * FROM {source}")
    both = ""
    if unsealed is not None:
        connection.register(f"unsealed_{table}", unsealed)
        ended = f"WHERE status <> '{STARTED}'" if "status" in unsealed.column_names else ""
        both = f"UNION ALL BY NAME SELECT * FROM unsealed_{table} {ended}"
    connection.execute(f"CREATE VIEW {table} AS SELECT * FROM sealed_{table} {both}")


def _lack_columns(table: str, snapshot: DeltaTable) -> bool:
    """Whether a data file may be older than a column that there is now, by the statistics in the log."""
    if table not in _NEWEST:
        return False
    actions = pa.table(snapshot.get_add_actions(flatten=True))
    name = f"null_count.{_NEWEST[table]}"
    return actions.num_rows > 0 and (name not in actions.column_names or actions[name].null_count > 0)


def unreadable_features(snapshot: DeltaTable) -> list[str]:
    """What a writer that is not Millrace switched on in a table, so that its data files alone are not its rows."""
    return sorted(set(snapshot.protocol().reader_features or []) - _PLAIN_FEATURES)


def is_file_gone(error: BaseException) -> bool:
    """Whether a data file or a commit of the log is not there any more."""
    if isinstance(error, FileNotFoundError):
        return True
    return isinstance(error, duckdb.Error | OSError | pa.ArrowException) and bool(_GONE.search(str(error)))


def quoted(text: str) -> str:
    """A SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def quoted_files(paths: Iterable[str]) -> str:
    """A SQL list of local files, for ``read_parquet``, which takes a name for a pattern."""
    return ", ".join(quoted(re.sub(r"([*?\[])", r"[\1]", path)) for path in paths)


def _dataset(snapshot: DeltaTable, storage_options: dict[str, str]) -> pa_ds.Dataset:
    """The snapshot's files as an Arrow dataset that opens only those that a filter's rows can be in.

    deltalake's own ``to_pyarrow_dataset`` states the bounds of every column of every file, which takes a millisecond
    a file, and hides rows of a column that has no bounds in a file where others have.
    """
    schema = pa.schema(snapshot.schema().to_arrow())
    files = pa.table(snapshot.get_add_actions(flatten=True))
    paths, sizes = files["path"].to_pylist(), files["size_bytes"].to_pylist()
    handler = DeltaStorageHandler(snapshot.table_uri, storage_options, dict(zip(paths, sizes, strict=True)))
    filesystem = pa_fs.PyFileSystem(handler)
    parquet = pa_ds.ParquetFileFormat(
        default_fragment_scan_options=pa_ds.ParquetFragmentScanOptions(pre_buffer=True)  # few requests, each a long one
    )
    fragments = [
        parquet.make_fragment(path, filesystem, partition_expression=guarantee)
        for path, guarantee in zip(paths, _guarantees(files, schema), strict=True)
    ]
    dataset = _Files(fragments, schema, parquet, filesystem)
    dataset.mean_bytes = sum(sizes) // max(1, len(sizes))
    return dataset


class _Files(pa_ds.FileSystemDataset):
    """A dataset that DuckDB scans without much in memory: Arrow's own bounds count rows and files, whatever their size.

    ``mean_bytes`` is the size of a file. Small ones are fetched several at once, so that their latencies overlap.
    """

    mean_bytes: int = 0

    def scanner(self, **options: Any) -> pa_ds.Scanner:
        ahead = max(1, min(_MOST_FILES_AHEAD, _BYTES_AHEAD // max(1, self.mean_bytes)))
        return super().scanner(batch_size=_SCAN_ROWS, batch_readahead=1, fragment_readahead=ahead, **options)


def _guarantees(files: pa.Table, schema: pa.Schema) -> Iterator[pc.Expression]:
    """What is true of every row of each file, by the log."""
    bounds = []
    for name in _PRUNED_BY:
        if name in schema.names and not schema.field(name).nullable and f"min.{name}" in files.column_names:
            low, high = files[f"min.{name}"], files[f"max.{name}"]
            if pa.types.is_timestamp(high.type):  # the log has whole milliseconds, and some writers cut the rest off
                high = pc.add(high, pa.scalar(timedelta(microseconds=999), pa.duration("us")))
            bounds.append((pc.field(name), low, high))
    for row, day in enumerate(files["partition.date"]):
        guarantee = pc.field("date") == day
        for column, low, high in bounds:
            if low[row].is_valid and high[row].is_valid:
                guarantee = guarantee & (column >= low[row]) & (column <= high[row])
        yield guarantee
