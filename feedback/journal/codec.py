"""Callers' rows, checked against their table's schema and turned into Arrow."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa

from feedback.schema import TABLES

_FIELDS: Final = {table: frozenset(schema.names) for table, schema in TABLES.items()}
_REQUIRED: Final = {table: [f.name for f in schema if not f.nullable] for table, schema in TABLES.items()}
_TIMES: Final = {table: [f.name for f in schema if pa.types.is_timestamp(f.type)] for table, schema in TABLES.items()}
_ARRAY_CODES: Final = {pa.int32(): "i", pa.float32(): "f"}
_CONVERSION_ERRORS: Final = (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError)


class RowError(ValueError):
    """A row does not fit its table's schema; no other row is touched by that."""


def check_row(table: str, row: dict[str, Any]) -> None:
    """Refuse a row with an unknown or missing column, or a time without a zone. Raises RowError."""
    if table not in TABLES:
        raise RowError(f"no table {table!r}; there are {', '.join(TABLES)}")
    if not row.keys() <= _FIELDS[table]:
        raise RowError(f"{table}: unknown column {sorted(row.keys() - _FIELDS[table])[0]!r}")
    for name in _REQUIRED[table]:
        if row.get(name) is None:
            raise RowError(f"{table}: column {name!r} is required")
    for name in _TIMES[table]:
        value = row[name]
        if not isinstance(value, datetime) or value.tzinfo is None:
            raise RowError(f"{table}: column {name!r} needs a datetime with a time zone, got {value!r}")


def to_batch(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Rows as one record batch; a missing key is a null, a list value may be a numpy array.

    One call converts all columns but the lists of numbers: a call for each took half as long again for a single row.
    """
    together = _other_columns(schema)
    converted = dict(zip(together.names, pa.array(rows, together).flatten(), strict=True))
    return pa.RecordBatch.from_arrays(
        [
            _lists_to_array([row.get(field.name) for row in rows], field.type)
            if (array := converted.get(field.name)) is None
            else array
            for field in schema
        ],
        schema=schema,
    )


@lru_cache(maxsize=16)
def _other_columns(schema: pa.Schema) -> pa.StructType:
    """All but lists of numbers."""
    return pa.struct([field for field in schema if not _is_list_of_numbers(field.type)])


def _is_list_of_numbers(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and kind.value_type in _ARRAY_CODES


def _lists_to_array(values: list[Any], kind: pa.DataType) -> pa.Array:
    # What does not fit, such as a null, pyarrow converts, or raises.
    with suppress(TypeError, OverflowError):
        return _lists_of_numbers(values, kind, _ARRAY_CODES[kind.value_type])
    return pa.array(values, kind)


def _lists_of_numbers(values: list[Sequence[float]], kind: pa.DataType, code: str) -> pa.Array:
    """What ``pa.array`` makes of lists of numbers, in a third of its time: token ids and logprobs are most of a row."""
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    packed: array[Any] = array(code)
    for value in values:
        if isinstance(value, np.ndarray) and value.dtype == code:
            packed.frombytes(value.tobytes())
        else:
            packed.fromlist(list(value))
    numbers = pa.Array.from_buffers(kind.value_type, len(packed), [None, pa.py_buffer(packed)])
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(offsets)], children=[numbers])


def convert(table: str, rows: Sequence[dict[str, Any]]) -> tuple[pa.RecordBatch, dict[int, RowError]]:
    """The rows that convert as one batch, and for the others why not, by position."""
    schema = TABLES[table]
    try:
        return to_batch(rows, schema), {}
    except _CONVERSION_ERRORS:
        errors = {position: error for position, row in enumerate(rows) if (error := _error(table, row)) is not None}
        return to_batch([row for position, row in enumerate(rows) if position not in errors], schema), errors


def _error(table: str, row: dict[str, Any]) -> RowError | None:
    for column in TABLES[table]:
        try:
            pa.array([row.get(column.name)], column.type)
        except _CONVERSION_ERRORS as error:
            return RowError(f"{table}: column {column.name!r}: {error}")
    return None
