"""DuckDB over the data files of a Delta table."""

from __future__ import annotations

import re
import tempfile
from urllib.parse import unquote

import duckdb
import pyarrow as pa
from deltalake import DeltaTable

from feedback.ids import uuid7


def connect(memory_limit: str, threads: int) -> duckdb.DuckDBPyConnection:
    """A DuckDB in memory, which spills to the system's folder for temporary files past ``memory_limit``."""
    return duckdb.connect(
        config={
            "memory_limit": memory_limit,
            "threads": threads,
            "temp_directory": f"{tempfile.gettempdir()}/millrace-{uuid7()}",  # made if a query spills
        }
    )


def scan_sql(
    connection: duckdb.DuckDBPyConnection, name: str, snapshot: DeltaTable, files: list[str], *, local: bool
) -> str:
    """A SELECT over some data files of a table, or over none. ``name`` is for what it registers."""
    if files and local:
        names = ", ".join(quoted(_escaped(unquote(file))) for file in files)
        return f"SELECT * FROM read_parquet([{names}], hive_partitioning = true, hive_types = {{'date': DATE}})"
    empty = pa.schema(snapshot.schema().to_arrow()).empty_table()
    connection.register(f"sealed_{name}", snapshot.to_pyarrow_dataset() if files else empty)
    return f"SELECT * FROM sealed_{name}"


def create_view_between(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    snapshot: DeltaTable,
    between: tuple[str, str, str],
    *,
    local: bool,
) -> None:
    """A view of the rows whose text column lies ``between`` (column, low, high), both ends included.

    Files that can't hold such a row, by the statistics in the log, are not opened.
    """
    column, low, high = between
    condition = f"{column} >= {quoted(low)} AND {column} <= {quoted(high)}"
    files = snapshot.file_uris(file_pruning_predicate=condition)
    connection.execute(
        f"CREATE VIEW {name} AS {scan_sql(connection, name, snapshot, files, local=local)} WHERE {condition}"
    )


def _escaped(path: str) -> str:
    # DuckDB takes a file name for a pattern.
    return re.sub(r"([*?\[])", r"[\1]", path)


def quoted(text: str) -> str:
    """A SQL string literal."""
    return "'" + text.replace("'", "''") + "'"
