from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import pytest
from feedback_rows import put, table_of, thumb
from hypothesis import given
from hypothesis import strategies as st

from feedback.config import LakeConfig
from feedback.files import LockTimeoutError, locked
from feedback.ingest.id_index import (
    SealedIds,
    content_of,
    key_of,
    keys_and_contents,
    take_in,
    take_in_if_used,
)
from feedback.lake.tables import Lake, LakeError
from feedback.schema import FEEDBACK


def vote(feedback_id: str, value: float = 1.0):
    return thumb("r1", value, feedback_id=feedback_id)


def key(feedback_id: str) -> bytes:
    return key_of("default", feedback_id)


def paths(folder: Path) -> list[Path]:
    return sorted((folder / "ids").glob("[!.]*"))


def index(folder: Path) -> SealedIds:
    opened = SealedIds(folder)
    opened.reopen()
    return opened


def add(lake: Lake, *ids: str) -> None:
    put(lake, "feedback", [vote(feedback_id) for feedback_id in ids])


def test_what_is_added_is_taken_in_without_reading_the_rest_again(folder, lake):
    add(lake, "a", "b")
    take_in(lake, folder)
    opened = index(folder)
    first = paths(folder)[0]
    for path in Path(lake.uri, "feedback").glob("date=*/*.parquet"):
        path.unlink()  # it has been read
    add(lake, "c")
    assert take_in(lake, folder) == opened.version() == 2
    assert paths(folder)[0] == first
    assert opened.get(key("a")) == content_of(vote("a"))
    assert opened.get(key("c")) == content_of(vote("c"))
    assert opened.get(key("d")) is None
    opened.close()


def test_a_compaction_brings_nothing_to_read(folder, lake):
    for feedback_id in "abc":
        add(lake, feedback_id)
    take_in(lake, folder)
    lake.table("feedback").optimize.compact()
    for path in Path(lake.uri, "feedback").glob("date=*/*.parquet"):
        path.unlink()
    assert take_in(lake, folder) == 4
    assert index(folder).get(key("c")) is not None


def test_changes_that_a_vacuum_took_away_are_read_from_the_table(folder, lake, caplog):
    add(lake, "a")
    take_in(lake, folder)
    for feedback_id in "bcd":
        add(lake, feedback_id)
    table = lake.table("feedback")
    table.optimize.compact()
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    with caplog.at_level(logging.WARNING):
        assert take_in(lake, folder) == lake.table("feedback").version()
    assert "since version 1 are cleaned up" in caplog.text
    opened = index(folder)
    assert all(opened.get(key(feedback_id)) for feedback_id in "abcd")


def test_changes_whose_log_is_cleaned_up_are_read_from_the_table(folder, lake):
    add(lake, "a")
    take_in(lake, folder)
    for feedback_id in "bcd":
        add(lake, feedback_id)
    lake.table("feedback").create_checkpoint()
    for number in range(4):
        Path(lake.uri, "feedback", "_delta_log", f"{number:020d}.json").unlink()
    assert take_in(lake, folder) == 4
    opened = index(folder)
    assert all(opened.get(key(feedback_id)) for feedback_id in "abcd")


@pytest.mark.parametrize("damage", ["torn", "overwritten", "empty", "no table", "no version", "another form"])
def test_a_damaged_index_is_built_anew(folder, lake, damage):
    add(lake, *(f"f{i}" for i in range(3000)))
    take_in(lake, folder)
    add(lake, "last")
    path = paths(folder)[0]
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:5000])
    elif damage == "overwritten":
        path.write_bytes(b"\xff" * path.stat().st_size)
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        with sqlite3.connect(path) as connection:
            connection.execute(
                {
                    "no table": "DROP TABLE ids",
                    "no version": "DELETE FROM read_until",
                    "another form": "UPDATE read_until SET form = '0'",
                }[damage]
            )
    assert take_in(lake, folder) == 2
    assert path not in paths(folder)
    opened = index(folder)
    assert opened.get(key("f2999"))
    assert opened.get(key("last"))
    opened.close()


def test_an_index_of_another_lake_or_ahead_of_its_lake_is_built_anew(tmp_path, folder, lake):
    add(lake, "a")
    add(lake, "b")
    take_in(lake, folder)
    other = Lake(str(tmp_path / "other"), LakeConfig())
    other.create()
    for feedback_id in "xyz":
        add(other, feedback_id)
    take_in(other, folder)
    opened = index(folder)
    assert opened.get(key("z"))
    assert not opened.get(key("a"))
    opened.close()
    for commit in sorted(Path(other.uri, "feedback", "_delta_log").glob("*.json"))[2:]:  # put back to version 1
        commit.unlink()
    assert take_in(other, folder) == 1
    opened = index(folder)
    assert opened.get(key("x"))
    assert not opened.get(key("z"))
    opened.close()


def test_a_snapshot_that_is_behind_the_index_takes_nothing_out(folder, lake):
    add(lake, "a")
    old = lake.table("feedback")
    add(lake, "b")
    take_in(lake, folder)
    assert take_in(lake, folder, old) == 2
    assert index(folder).get(key("b"))


def test_what_a_build_that_was_killed_left_is_removed(folder, lake):
    (folder / "ids").mkdir(parents=True)
    (folder / "ids" / "0.building").write_bytes(b"half")
    take_in(lake, folder)
    assert [path.suffix for path in paths(folder)] == [".db"]


def test_an_index_is_made_only_where_one_is_used(folder, lake):
    folder.mkdir()
    take_in_if_used(lake, folder)
    assert not (folder / "ids").exists()
    with pytest.raises(LakeError, match="no index of feedback ids"):
        SealedIds(folder).reopen()
    with pytest.raises(LakeError, match="not open"):
        SealedIds(folder).get(key("a"))


def test_a_lake_that_cannot_be_read_is_an_error_and_no_empty_index(tmp_path, folder, lake):
    add(lake, "a")
    for path in Path(lake.uri, "feedback").glob("date=*/*.parquet"):
        path.unlink()
    with pytest.raises(LakeError):
        take_in(lake, folder)
    assert not list((folder / "ids").glob("*.db"))


def test_only_one_process_writes_an_index_at_a_time(folder, lake):
    impatient = Lake(lake.uri, LakeConfig(lock_timeout_s=0.05))
    (folder / "ids").mkdir(parents=True)
    with locked(folder / "ids" / ".lock", 1), pytest.raises(LockTimeoutError):
        take_in(impatient, folder)


TEXT = st.text(max_size=20) | st.none()


@given(
    value=st.none() | st.floats(allow_nan=False, allow_infinity=False).map(lambda number: number + 0.0),
    text=TEXT,
    name=TEXT,
    source=st.text(max_size=5),
)
def test_a_row_says_the_same_before_and_after_it_was_arrow(value, text, name, source):
    row = vote("f") | {"value": value, "text": text, "name": name, "source": source}
    assert list(keys_and_contents(table_of("feedback", [row]))) == [(key("f"), content_of(row))]


@pytest.mark.parametrize("column", [name for name in FEEDBACK.names if name not in ("feedback_id", "created_at")])
def test_every_column_but_id_and_time_is_what_a_row_says(column):
    row = vote("f")
    other = row | {column: 0.0 if column == "value" else "other"}
    assert content_of(row) != content_of(other)
    assert content_of(row) == content_of(row | {"feedback_id": "g", "created_at": None})


def test_an_id_cannot_reach_into_the_tenants_name():
    assert key_of("a\0b", "c") != key_of("a", "c")
    assert key_of("a", "bc") != key_of("ab", "c")
