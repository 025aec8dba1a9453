"""Sorting more rows than memory should hold: they lie in a file meanwhile, and memory has their keys only.

DuckDB's ORDER BY keeps whole rows in memory: on 0.6 GB of responses of 4,000 tokens it failed with a limit of 256 MB.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_ROWS: Final = 4096


def sort_rows(batches: Iterable[pa.RecordBatch], schema: pa.Schema, keys: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows in ascending order of some columns, a few thousand at a time; rows with equal keys keep their order.

    All rows are written, uncompressed, to a file in the system's folder for temporary files. It has no name, so that
    nothing is left of it however the process ends.
    """
    key_columns: list[pa.Table] = []
    with tempfile.TemporaryFile() as file:
        with pa.ipc.new_file(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
                key_columns.append(pa.Table.from_batches([batch.select(keys)]))
        file.flush()
        if key_columns:
            rows = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            yield from _in_order(pa.ipc.open_file(pa.BufferReader(rows)), key_columns, keys)


def _in_order(
    reader: pa.ipc.RecordBatchFileReader, key_columns: list[pa.Table], keys: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    starts = np.cumsum([0, *(table.num_rows for table in key_columns)])
    order = pc.sort_indices(pa.concat_tables(key_columns), [(key, "ascending") for key in keys])
    key_columns.clear()
    order = order.to_numpy().astype(np.int64)
    for first in range(0, len(order), _ROWS):
        rows = order[first : first + _ROWS]
        batch_of = np.searchsorted(starts, rows, side="right") - 1
        # Rows are taken batch by batch: Arrow's own take, of a table in many pieces, would copy all of it first.
        parts = [
            reader.get_batch(int(number)).take(pa.array(rows[batch_of == number] - starts[number]))
            for number in np.unique(batch_of)
        ]
        back = np.empty(len(rows), dtype=np.int64)
        back[np.argsort(batch_of, kind="stable")] = np.arange(len(rows))
        yield pa.concat_batches(parts).take(pa.array(back))
