"""Data: SQL over the lake, its result as a table and a plot, queries kept by name, and exports. For admins.

A query reads the lake's views and nothing else (``feedback.lake.query``). It can reach the rows of all tenants: SQL of
any kind could not be kept to those of one, so a tenant's key has the page Traffic instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import pyarrow as pa

from deploy.config.root import Settings
from deploy.console.pages import rows
from deploy.console.pages.saved_queries import SavedQueries, SavedQueryError
from deploy.console.pages.visit import Answer, Visit
from deploy.console.pages.visit import page as shown
from deploy.console.rendering import moment
from deploy.display.query_output import WRITERS, plain_text
from feedback.lake import query
from feedback.lake.query import QueryError, QueryTimeoutError, Rows
from feedback.lake.tables import LakeError
from feedback.schema import TABLES

_T = TypeVar("_T")

SECONDS: Final = 15.0
ROWS: Final = 500
COLUMNS: Final = 200
EXPORT_BYTES: Final = 256 << 20
_CELLS: Final = 10_000  # of a table, each of so many characters: a page has its bound too
_CHARACTERS: Final = 200
_CHARTS: Final = 6
_SPILL: Final = "2GB"

TYPES: Final = {"csv": "text/csv; charset=utf-8", "parquet": "application/vnd.apache.parquet"}

_EXAMPLE: Final = (
    "SELECT date_trunc('day', created_at) AS day, count(*) AS responses\nFROM interactions GROUP BY 1 ORDER BY 1"
)


@dataclass(frozen=True)
class Result:
    """The rows that a page shows; ``more``: there are others. ``charts``: as ``charts.js`` draws them."""

    names: list[str]
    cells: list[list[str]]
    numeric: list[bool]
    more: bool
    charts: list[dict[str, Any]]


def page(settings: Settings, visit: Visit) -> Answer:
    """A query to write, or the saved one that ``name`` says; nothing runs yet."""
    name = visit.query.get("name", "")
    saved = {one.name: one for one in _saved(settings).all()}
    known = saved.get(name)
    wrong = f"There is no saved query {name[:100]!r}." if name and known is None else None
    sql = known.sql if known else _EXAMPLE
    return _shown(settings, visit, sql=sql, name=known.name if known else "", wrong=wrong)


def run(settings: Settings, visit: Visit) -> Answer:
    """The page with the first rows of what the form's query gives."""
    form = visit.form or {}
    sql, name = form.get("sql", ""), form.get("name", "")
    try:
        result = _query(settings, sql, _result)
    except LakeError as error:
        return _shown(settings, visit, code=422, sql=sql, name=name, wrong=str(error))
    return _shown(settings, visit, sql=sql, name=name, result=result)


def export(settings: Settings, visit: Visit) -> Answer:
    """All rows of the form's query, written to ``visit.file``."""
    form = visit.form or {}
    sql, kind = form.get("sql", ""), form.get("as", "")
    try:
        if kind not in TYPES:
            raise QueryError(f"a result is exported as {' or '.join(TYPES)}, not {kind[:20]!r}")
        with Path(visit.file).open("wb") as file:
            _query(settings, sql, lambda found: _write(kind, found, file))
    except LakeError as error:
        return _shown(settings, visit, code=422, sql=sql, name=form.get("name", ""), wrong=str(error))
    return Answer(type=TYPES[kind])


def save(settings: Settings, visit: Visit) -> Answer:
    """Keep the form's query by its name, in place of one that has it."""
    form = visit.form or {}
    name, sql = form.get("name", "").strip(), form.get("sql", "").strip()
    try:
        _saved(settings).save(name, sql, who=visit.viewer["name"])
    except SavedQueryError as error:
        return _shown(settings, visit, code=409, sql=sql, name=name, wrong=str(error))
    return _shown(settings, visit, sql=sql, name=name, said=f"Saved as {name}.")


def delete(settings: Settings, visit: Visit) -> Answer:
    """Remove a saved query."""
    _saved(settings).delete((visit.form or {}).get("name", ""))
    return Answer(status=303, location="/console/data")


def _shown(settings: Settings, visit: Visit, *, code: int = 200, **values: Any) -> Answer:
    values = {"result": None, "wrong": None, "said": None, "tables": TABLES} | values
    bounds = {"seconds": SECONDS, "most": ROWS, "megabytes": EXPORT_BYTES >> 20}
    return shown("data", visit, code=code, here="data", saved=_saved(settings).all(), **bounds, **values)


def _saved(settings: Settings) -> SavedQueries:
    return SavedQueries(settings.path("queries.json"))


def _query(settings: Settings, sql: str, take: Callable[[Rows], _T]) -> _T:
    """What ``take`` returns of the query's rows, within the page's bounds. Raises LakeError."""
    lake, journal = rows.sources(settings)
    try:
        return query.run(lake, sql, take, journal, timeout_s=SECONDS, spill_limit=_SPILL)
    except QueryTimeoutError as error:
        raise QueryError(
            f"the query was stopped: it ran for {SECONDS:g} s. Restrict its dates (WHERE date >= …), or run it with "
            "millrace lake sql"
        ) from error
    except (OverflowError, TypeError, ValueError) as error:  # DuckDB has dates and keys of maps that Python has not
        raise QueryError(f"a value can't be shown ({error}): cast its column to VARCHAR") from error


def _result(found: Rows) -> Result:
    """The first rows. Raises QueryError."""
    schema = found.schema
    if len(schema) > COLUMNS:
        raise QueryError(f"the result has {len(schema)} columns; the page shows {COLUMNS} at most: name those you need")
    most = min(ROWS, _CELLS // max(1, len(schema)))
    head = list(itertools.islice(_values(found.batches), most + 1))
    kept = head[:most]
    cells = [[_cell(value) for value in row] for row in kept]
    numeric = [_is_number(field.type) for field in schema]
    return Result([name[:_CHARACTERS] for name in schema.names], cells, numeric, len(head) > most, charts(schema, kept))


def _values(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        for at in range(0, batch.num_rows, 64):
            part = batch.slice(at, 64)
            columns = [column.to_pylist(maps_as_pydicts="lossy") for column in part.columns]
            yield from zip(*columns, strict=True)


def _cell(value: Any) -> str:
    text = "–" if value is None else plain_text(value)
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 1]}…"


def charts(schema: pa.Schema, values: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """One chart for each column of numbers behind the first column, which is the horizontal axis.

    That is time, a number, or, for bars, any other value; rows without it are left out.
    """
    numbers = [i for i, field in enumerate(schema) if i and _is_number(field.type)][:_CHARTS]
    points = [row for row in values if row[0] is not None] if len(schema) else []
    if not numbers or len(points) < 2:
        return []
    first = schema.field(0).type
    over: dict[str, Any]
    if _is_number(first) or pa.types.is_date(first) or pa.types.is_timestamp(first):
        is_time = not _is_number(first)
        places = [_seconds(row[0]) if is_time else _number(row[0]) for row in points]
        order = sorted((at, i) for i, at in enumerate(places) if at is not None)
        points = [points[i] for _, i in order]
        over = {"x": [at for at, _ in order], "time": is_time, "fractions": not pa.types.is_integer(first)}
    else:
        over = {"x": list(range(len(points))), "labels": [_cell(row[0])[:40] for row in points]}
    lines = ((schema.names[i][:60], [_number(row[i]) for row in points]) for i in numbers)
    return [{"title": title, **over, "y": line} for title, line in lines if any(value is not None for value in line)]


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _number(value: Any) -> float | None:
    found = None if value is None else float(value)
    return found if found is not None and math.isfinite(found) else None


def _seconds(value: date | datetime) -> float:
    whole = value if isinstance(value, datetime) else datetime(value.year, value.month, value.day)
    return moment(whole).timestamp()


def _write(kind: str, found: Rows, file: BinaryIO) -> None:
    file.seek(0)
    file.truncate()  # it is written anew if a vacuum interferes
    WRITERS[kind](Rows(found.schema, _bounded(found.batches, file)), file)


def _bounded(batches: Iterator[pa.RecordBatch], file: BinaryIO) -> Iterator[pa.RecordBatch]:
    """The batches; raises QueryError when the file is over what an export may be."""
    for batch in batches:
        yield batch
        if file.tell() > EXPORT_BYTES:
            raise QueryError(
                f"the result is larger than {EXPORT_BYTES >> 20} MiB; take less, or export it with millrace lake sql"
            )
