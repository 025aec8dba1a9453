"""Records of files that others wrote: JSONL, Parquet and Arrow files, and folders of them as ``datasets`` keeps them.

Every record knows where it stands, so that whatever is wrong with it is named by file and line (or row).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

_LINES: Final = (".jsonl", ".ndjson", ".json")
_FORMATS: Final = (*_LINES, ".parquet", ".arrow")
_BATCH_ROWS: Final = 1024


class RecordError(ValueError):
    """A file can't be used; the text names it, and the line or row."""


@dataclass(frozen=True)
class Record:
    """One row or line. ``where``: its file and line, for a message."""

    where: str
    values: dict[str, Any]

    def __getitem__(self, column: str) -> Any:
        """A column's value. Raises RecordError if there is no such column."""
        try:
            return self.values[column]
        except KeyError:
            there = ", ".join(self.values) or "none"
            raise RecordError(f"{self.where} has no column {column!r}; it has: {there}") from None


def read(path: Path, split: str | None = None) -> Iterator[Record]:
    """The records of a file, or of the files of a dataset's folder, in order; blank lines are left out.

    A column that is null in Parquet or Arrow is None. Raises RecordError.
    """
    for file in files_of(path, split):
        yield from _lines(file) if file.suffix in _LINES else _rows(file)


def sha256(path: Path, split: str | None = None) -> str:
    """Hash of the content of the file that ``read`` reads; of several files, of their hashes. Raises RecordError."""
    digests = []
    for file in files_of(path, split):
        with _opened(file) as content:
            digests.append(hashlib.file_digest(content, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def files_of(path: Path, split: str | None = None) -> list[Path]:
    """The data files of a path: itself, or those of a folder that ``save_to_disk`` wrote or the Hugging Face hub has.

    Args:
        split: which split of a folder with several.

    Raises:
        RecordError: there is nothing that can be read, or it is not clear which split is meant.
    """
    if path.is_file():
        if path.suffix not in _FORMATS:
            raise RecordError(f"{path} has none of the names that can be read: {', '.join(_FORMATS)}")
        return [path]
    if not path.is_dir():
        raise RecordError(f"there is no file or folder {path}")
    splits = _splits(path)
    if not splits:
        raise RecordError(f"{path} holds no dataset: there is no file with a name in {', '.join(_FORMATS)} in it")
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if split not in splits:
        what = "has several splits" if split is None else f"has no split {split!r}"
        raise RecordError(f"{path} {what}; name one of: {', '.join(splits)}")
    return splits[split]


def _splits(folder: Path) -> dict[str, list[Path]]:
    """The data files by split; ``save_to_disk`` names its own, on the hub a file's name begins with its split's."""
    if (folder / "dataset_dict.json").is_file():
        names = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        return {name: file for name in names for file in _splits(folder / name).values()}
    if (folder / "state.json").is_file():
        state = json.loads((folder / "state.json").read_bytes())
        return {folder.name: [folder / file["filename"] for file in state["_data_files"]]}
    found: dict[str, list[Path]] = {}
    for file in sorted([*folder.glob("*"), *folder.glob("data/*")]):
        if file.suffix in _FORMATS and file.name != "dataset_info.json":
            found.setdefault(file.stem.partition("-")[0], []).append(file)
    return found


def _opened(file: Path) -> Any:
    try:
        return file.open("rb")
    except OSError as error:
        raise RecordError(f"{file} can't be read: {error.strerror}") from error


def _lines(file: Path) -> Iterator[Record]:
    with _opened(file) as content:
        for number, line in enumerate(content, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RecordError(f"{where} is not JSON: {error}") from error
            if not isinstance(values, dict):
                raise RecordError(f"{where} is not a JSON object, one a line, but {type(values).__name__}")
            yield Record(where, values)


def _rows(file: Path) -> Iterator[Record]:
    number = 0
    try:
        for batch in _batches(file):
            for values in batch.to_pylist(maps_as_pydicts="lossy"):
                number += 1
                yield Record(f"{file}, row {number}", values)
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{file} can't be read behind row {number}: {str(error).splitlines()[0]}") from error


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    if file.suffix == ".parquet":
        with pq.ParquetFile(file) as parquet:
            yield from parquet.iter_batches(_BATCH_ROWS)
        return
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:  # as `datasets` writes it
        for batch in stream:
            for first in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(first, _BATCH_ROWS)
