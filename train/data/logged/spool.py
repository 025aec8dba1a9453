"""Rows of Arrow that memory need not hold: on disk, and read a few at a time."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

_BLOCK: Final = 64
"""Rows that are read together."""


class Spool:
    """Rows that are written once, and then read in any order.

    Their file has no name: whatever ends the process, nothing of what people wrote is left behind.
    """

    def __init__(self, schema: pa.Schema, folder: Path | None = None) -> None:
        """``folder``: whose disk the file is on; None: that of the system's temporary files.

        All that writes raises OSError if the disk is full.
        """
        self.schema, self.folder = schema, Path(tempfile.gettempdir()) if folder is None else folder
        self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  it is closed with the last reference to it
        self._sink = pa.PythonFile(self._file, mode="w")
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._writer = pa.ipc.new_file(self._sink, schema, options=options)
        self._ends: list[int] = []
        self._reader: pa.ipc.RecordBatchFileReader | None = None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def append(self, rows: pa.RecordBatch) -> None:
        """``rows`` get the numbers from ``len(self)`` on."""
        for start in range(0, rows.num_rows, _BLOCK):
            block = rows.slice(start, _BLOCK)
            try:
                self._writer.write_batch(block)
            except OSError as error:
                raise OSError(f"{self.folder}: can't keep the logged responses that a run draws: {error}") from error
            self._ends.append(len(self) + block.num_rows)

    def finish(self) -> None:
        """No more rows come; from now on they can be read."""
        self._writer.close()
        self._sink.flush()
        self._file.flush()
        self._reader = pa.ipc.open_file(pa.PythonFile(self._file, mode="r"))

    def take(self, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Table:
        """The rows of these numbers, in their order; the others of their blocks are read, and let go."""
        assert self._reader is not None, "finish() comes first"
        wanted, order = np.unique(numbers, return_inverse=True)
        blocks = np.searchsorted(self._ends, wanted, side="right")
        parts = [self.schema.empty_table()]
        for block in np.unique(blocks):
            start = self._ends[block - 1] if block else 0
            found = self._reader.get_batch(int(block)).take(pa.array(wanted[blocks == block] - start))
            parts.append(pa.Table.from_batches([found]))
        return pa.concat_tables(parts).take(pa.array(order))
