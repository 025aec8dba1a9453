"""SQL from outside, over the lake's views: it reads the lake, and can do nothing else.

Two locks, each enough for most: a statement must be a query, all the way down (DuckDB's queries may hold a COPY or an
INSERT in a WITH clause), and the connection it runs on can reach no file but the tables' own.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import duckdb
import pyarrow as pa

from feedback.lake.tables import Lake, LakeError
from feedback.lake.views import is_file_gone, quoted
from feedback.schema import TABLES

_T = TypeVar("_T")


_BATCH_ROWS: Final = 2048
_INTERRUPT_WAIT_S: Final = 10.0
_EXPLAIN: Final = re.compile(r"\s*EXPLAIN(\s+ANALYZE)?\b", re.IGNORECASE)
_READING_NODES: Final = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
_LINE: Final = re.compile(r"\n+LINE (\d+): (.*)\n( *)\^+\s*$")
_NEAR_LENGTH: Final = 40


@dataclass(frozen=True)
class Rows:
    """What a query gives, as it comes. Reading ``batches`` raises QueryError."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


class QueryError(LakeError):
    """A query can't be run, or failed. One line, with the place in the query where DuckDB names one."""


class QueryTimeoutError(QueryError):
    """A query ran for longer than it may, and was stopped."""


def run(
    lake: Lake,
    query: str,
    take: Callable[[Rows], _T],
    journal_folder: Path | None = None,
    *,
    versions: Mapping[str, int] | None = None,
    timeout_s: float | None = None,
    spill_limit: str | None = None,
) -> _T:
    """What ``take`` returns of the query's rows; it is called again, with all rows, if a vacuum interferes.

    The timeout ends the query, as does an exception that a signal raises in the calling thread. Views and ``versions``
    are those of ``Lake.connect``. ``spill_limit``: the most that the query may write to temporary files, as DuckDB has
    sizes; by default what DuckDB takes, nearly all of the disk. Raises QueryError, LakeError, and what ``take`` raises.
    """
    running: list[duckdb.DuckDBPyConnection] = []

    def work(connection: duckdb.DuckDBPyConnection) -> _T:
        running[:] = [connection]
        if spill_limit is not None:
            connection.execute(f"SET max_temp_directory_size = {quoted(spill_limit)}")
        return _run(connection, lake, query, take)

    def read() -> None:
        try:
            done.set_result(lake.read(work, journal_folder, versions=versions))
        except BaseException as error:  # noqa: BLE001  handed to the caller
            done.set_exception(error)

    # DuckDB hears of no signal while it works, so it works in another thread.
    done: Future[_T] = Future()
    thread = threading.Thread(target=read, name="query", daemon=True)
    thread.start()
    try:
        return done.result(timeout_s)
    except TimeoutError as error:
        if done.done():
            raise
        raise QueryTimeoutError(f"the query was stopped: it ran for {timeout_s:g} s (--timeout)") from error
    finally:
        if not done.done():
            for connection in running:
                connection.interrupt()
            thread.join(_INTERRUPT_WAIT_S)


def _run(connection: duckdb.DuckDBPyConnection, lake: Lake, query: str, take: Callable[[Rows], _T]) -> _T:
    query = read_only(connection, query)
    _lock(connection, lake)
    try:
        reader = connection.sql(query).to_arrow_reader(_BATCH_ROWS)
    except duckdb.Error as error:
        if is_file_gone(error):
            raise
        raise _located(connection, query, error) from error
    names = _unique(reader.schema.names)
    schema = pa.schema([field.with_name(name) for field, name in zip(reader.schema, names, strict=True)])
    return take(Rows(schema, (batch.rename_columns(names) for batch in _batches(reader))))


def _batches(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    try:
        yield from reader
    except (duckdb.Error, OSError, pa.ArrowException) as error:
        if is_file_gone(error):
            raise
        raise _query_error(error) from error


def read_only(connection: duckdb.DuckDBPyConnection, query: str) -> str:
    """The one statement of ``query``, if it is one that only reads. Raises QueryError."""
    try:
        statements = connection.extract_statements(query)
    except duckdb.Error as error:
        raise _query_error(error) from error
    if len(statements) != 1:
        raise QueryError(f"give one query, not {len(statements) or 'none'}")
    [statement] = statements
    text = str(statement.query).strip().rstrip(";")
    kind = statement.type.name
    explained = _EXPLAIN.match(text)
    if kind == "EXPLAIN" and explained:
        read_only(connection, text[explained.end() :])
    elif kind == "MULTI":
        raise QueryError("a PIVOT must name its values here: PIVOT … ON column IN (value, …)")
    elif kind != "SELECT" or not _only_reads(connection, text):
        what = "query that writes" if kind == "SELECT" else f"{kind} statement"
        raise QueryError(f"only queries are run here (SELECT, DESCRIBE, SUMMARIZE, SHOW, EXPLAIN), no {what}")
    return text


def _only_reads(connection: duckdb.DuckDBPyConnection, query: str) -> bool:
    [[serialized]] = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [query]).fetchall()
    parsed = json.loads(serialized)
    return not parsed["error"] and _nodes(parsed) <= _READING_NODES


def _nodes(parsed: Any) -> set[str]:
    """The types of all query nodes in a parsed statement."""
    found: set[str] = set()
    rest = [parsed]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            if str(part.get("type")).endswith("_NODE"):
                found.add(part["type"])
            rest += part.values()
        elif isinstance(part, list):
            rest += part
    return found


def _lock(connection: duckdb.DuckDBPyConnection, lake: Lake) -> None:
    """From here on the connection reaches the tables' files, if DuckDB reads them itself, and no others."""
    if lake.local:
        folders = ", ".join(quoted(lake.table_uri(table)) for table in TABLES)
        connection.execute(f"SET allowed_directories = [{folders}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _located(connection: duckdb.DuckDBPyConnection, query: str, error: duckdb.Error) -> QueryError:
    """The error with its place in the query, which DuckDB reports for a statement that it is to execute."""
    if not _LINE.search(str(error)) and not _EXPLAIN.match(query):
        try:
            connection.execute(f"EXPLAIN\n{query}")
        except duckdb.Error as located:
            return _query_error(located, lines_before=1)
    return _query_error(error)


def _query_error(error: Exception, *, lines_before: int = 0) -> QueryError:
    text = str(error)
    place = _LINE.search(text)
    message = " ".join((text[: place.start()] if place else text).split())
    if not place:
        return QueryError(message)
    offset = len(place[3]) - len(f"LINE {place[1]}: ")
    near = place[2][max(0, offset) :][:_NEAR_LENGTH].strip()
    return QueryError(f"{message} (line {int(place[1]) - lines_before}, at: {near})")


def _unique(names: list[str]) -> list[str]:
    """Names of columns, of which a join may have two alike: the second ``a`` is ``a_1``, as in DuckDB's subqueries."""
    unique: list[str] = []
    for name in names:
        number, candidate = 0, name
        while candidate in unique or (number and candidate in names):
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique
