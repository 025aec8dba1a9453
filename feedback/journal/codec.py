"""Callers' rows, checked against their table's schema and turned into Arrow."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Any, Final

import numpy as np
import pyarrow as pa

from feedback.schema import TABLES

_FIELDS: Final = {table: frozenset(schema.names) for table, schema in TABLES.items()}
_REQUIRED: Final = {table: [f.name for f in schema if not f.nullable] for table, schema in TABLES.items()}
_TIMES: Final = {table: [f.name for f in schema if pa.types.is_timestamp(f.type)] for table, schema in TABLES.items()}
CONVERSION_ERRORS: Final = (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError)


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


@dataclass(frozen=True)
class _Layout:
    """How rows become the columns of ``schema``: ``numbers`` are its lists of numbers, ``others`` a struct of the rest.

    ``order``: of the columns, as positions among the rest with the lists behind them.
    """

    schema: pa.Schema
    numbers: list[tuple[str, pa.DataType]]
    others: pa.DataType
    order: list[int]

    @classmethod
    def of(cls, schema: pa.Schema) -> _Layout:
        lists = [f for f in schema if pa.types.is_list(f.type) and f.type.value_type in _PACKERS]
        others = [f for f in schema if f not in lists]
        names = [f.name for f in (*others, *lists)]
        order = [names.index(name) for name in schema.names]
        return cls(schema, [(f.name, f.type) for f in lists], pa.struct(others), order)


def to_batch(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Rows as one record batch; a missing key is a null, a list value may be a numpy array."""
    return _to_batch(rows, _Layout.of(schema))


def _to_batch(rows: Sequence[dict[str, Any]], layout: _Layout) -> pa.RecordBatch:
    # A struct takes pyarrow half the time of an array per column.
    columns = pa.array(rows, layout.others).flatten()
    columns += [_to_lists([row.get(name) for row in rows], kind) for name, kind in layout.numbers]
    return pa.RecordBatch.from_arrays([columns[at] for at in layout.order], schema=layout.schema)


def _to_lists(values: list[Any], kind: pa.DataType) -> pa.Array:
    # What does not fit, such as a null, pyarrow converts, or raises.
    with suppress(TypeError, OverflowError, struct.error):
        return _lists_of_numbers(values, kind)
    return pa.array(values, kind)


def _lists_of_numbers(values: list[Sequence[float]], kind: pa.DataType) -> pa.Array:
    """What ``pa.array`` makes of lists of numbers, in a third of its time: token ids and logprobs are most of a row."""
    pack, dtype = _PACKERS[kind.value_type]
    offsets = array("i", accumulate(map(len, values), initial=0))
    packed = b"".join(
        value.tobytes() if isinstance(value, np.ndarray) and value.dtype == dtype else pack(value) for value in values
    )
    if pack is _pack_integers and packed and np.frombuffer(packed, dtype).min() < 0:
        raise OverflowError("negative, or larger than an int32")
    numbers = pa.Array.from_buffers(kind.value_type, offsets[-1], [None, pa.py_buffer(packed)])
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(offsets)], children=[numbers])


def _pack_integers(values: Sequence[float]) -> bytes:
    # As unsigned ones, for which array takes half the time; what is above 2**31 is negative then, and seen by that.
    return array("I", values).tobytes()


def _pack_floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"{len(values)}f", *values)


_PACKERS: Final = {pa.int32(): (_pack_integers, np.dtype(np.int32)), pa.float32(): (_pack_floats, np.dtype(np.float32))}
_LAYOUTS: Final = {table: _Layout.of(schema) for table, schema in TABLES.items()}


def convert(table: str, rows: Sequence[dict[str, Any]]) -> tuple[pa.RecordBatch, dict[int, RowError]]:
    """The rows that convert as one batch, and for the others why not, by position."""
    layout = _LAYOUTS[table]
    try:
        return _to_batch(rows, layout), {}
    except CONVERSION_ERRORS:
        errors = {position: error for position, row in enumerate(rows) if (error := _error(table, row)) is not None}
        return _to_batch([row for position, row in enumerate(rows) if position not in errors], layout), errors


def _error(table: str, row: dict[str, Any]) -> RowError | None:
    for column in TABLES[table]:
        try:
            pa.array([row.get(column.name)], column.type)
        except CONVERSION_ERRORS as error:
            return RowError(f"{table}: column {column.name!r}: {error}")
    return None
