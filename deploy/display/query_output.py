"""Rows of a query as text or Parquet: for people, for programs, and whole or not at all where they become a file."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from deploy.display.tables import printable, table
from feedback.lake.query import Rows

_ROWS: Final = 64  # that become Python's values at once
_CELL: Final = 60  # characters of a value in a table; the other formats have it whole


def write_table(rows: Rows, out: BinaryIO, limit: int) -> None:
    """At most ``limit`` rows for a person's eyes; where they are too wide for the terminal, one value a line."""
    shown = list(itertools.islice(_values(rows.batches), limit + 1))
    names = [printable(name) for name in rows.schema.names]
    if names == ["explain_key", "explain_value"]:
        _line(out, "\n".join(row["explain_value"] for row in shown))
        return
    cells = [[_cell(value) for value in row.values()] for row in shown[:limit]]
    width = shutil.get_terminal_size((120, 24)).columns
    text = table(names, cells)
    if cells and max(map(len, text.splitlines())) > width:
        text = "\n\n".join(table(["column", "value"], list(map(list, zip(names, row, strict=True)))) for row in cells)
    _line(out, text)
    more = "; there are more (--limit shows more, --format csv all)" if len(shown) > limit else ""
    count = min(len(shown), limit)
    _line(out, f"({count} {'row' if count == 1 else 'rows'}{more})")


def write_csv(rows: Rows, out: BinaryIO) -> None:
    """RFC 4180 with a header; null is empty, nested values are JSON."""
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
    try:
        writer = csv.writer(text)
        writer.writerow(rows.schema.names)
        for row in _values(rows.batches):
            writer.writerow([plain_text(value) for value in row.values()])
    finally:
        text.detach()


def write_jsonl(rows: Rows, out: BinaryIO) -> None:
    """One JSON object a line."""
    for row in _values(rows.batches):
        out.write(_json(row).encode() + b"\n")


def write_json(rows: Rows, out: BinaryIO) -> None:
    """One JSON array of objects."""
    before = b"[\n"
    for row in _values(rows.batches):
        out.write(before + _json(row).encode())
        before = b",\n"
    out.write(b"[]\n" if before == b"[\n" else b"\n]\n")


def write_parquet(rows: Rows, out: BinaryIO) -> None:
    """Parquet with DuckDB's types."""
    with pq.ParquetWriter(out, rows.schema, compression="zstd") as writer:
        for batch in rows.batches:
            writer.write_batch(batch)


WRITERS: Final[dict[str, Callable[[Rows, BinaryIO], None]]] = {
    "csv": write_csv,
    "json": write_json,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
}


@contextmanager
def opened(file: Path | None) -> Iterator[BinaryIO]:
    """Standard output, or a file that is there whole, in place of the old one, when the block ends well."""
    if file is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with aside.open("wb") as out:
            yield out
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)


def _values(batches: Iterator[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        for at in range(0, batch.num_rows, _ROWS):
            yield from batch.slice(at, _ROWS).to_pylist(maps_as_pydicts="lossy")


def _cell(value: Any) -> str:
    text = "-" if value is None else printable(plain_text(value))
    return text if len(text) <= _CELL else text[: _CELL - 1] + "…"


def plain_text(value: Any) -> str:
    """A value as a cell of CSV has it: null is empty, nested values are JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, default=_plain)


def _json(row: dict[str, Any]) -> str:
    return json.dumps({name: _plain(value) for name, value in row.items()}, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """A value as JSON has it: times as ISO 8601, bytes as hex digits, a number that is not finite as null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return value if value is None or isinstance(value, str | int) else str(value)


def _line(out: BinaryIO, text: str) -> None:
    out.write(text.encode() + b"\n")
