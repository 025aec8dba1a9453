"""Rows on disk: read in any order as they were written, in a file that nobody else sees."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.data.logged.spool import Spool

SCHEMA = pa.schema([("name", pa.string()), ("tokens", pa.list_(pa.int32()))])


def rows(start: int, count: int) -> pa.RecordBatch:
    numbers = range(start, start + count)
    return pa.RecordBatch.from_pylist([{"name": f"r{n}", "tokens": [n] * (n % 4)} for n in numbers], SCHEMA)


def filled(*counts: int, folder: Path | None = None) -> Spool:
    spool = Spool(SCHEMA, folder)
    for count in counts:
        spool.append(rows(len(spool), count))
    spool.finish()
    return spool


@given(st.lists(st.integers(0, 150), min_size=1, max_size=4), st.data())
def test_rows_are_read_in_any_order_and_as_often_as_wanted(counts: list[int], data: st.DataObject) -> None:
    spool = filled(*counts)
    assert len(spool) == sum(counts)
    numbers = data.draw(st.lists(st.integers(0, sum(counts) - 1), max_size=20)) if sum(counts) else []
    taken = spool.take(np.array(numbers, np.int64))
    assert taken.to_pylist() == [row for n in numbers for row in rows(n, 1).to_pylist()]


def test_its_file_has_no_name_that_a_kill_could_leave_behind(tmp_path: Path) -> None:
    spool = filled(100, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert spool.take(np.array([99]))["name"].to_pylist() == ["r99"]


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """What a process writes beyond so many bytes of a file fails, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_where_the_disk_is_full_it_says_what_was_to_be_kept_and_where(tmp_path: Path) -> None:
    with (
        files_of_at_most(20_000),
        pytest.raises(OSError, match=rf"{tmp_path}: can't keep the logged responses that a run draws: "),
    ):
        filled(50_000, folder=tmp_path)
