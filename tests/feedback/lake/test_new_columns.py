"""A lake of an older Millrace, whose tables lack columns."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from feedback_rows import interaction, table_of

from feedback.config import LakeConfig
from feedback.lake import tables
from feedback.lake.tables import Lake
from feedback.schema import INTERACTIONS, TABLES

NEW = ("experiment", "propensity")


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """A lake with a row, without the columns of experiments."""
    schema = pa.schema([field for field in INTERACTIONS if field.name not in NEW])
    monkeypatch.setitem(TABLES, "interactions", schema)
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    lake.append("interactions", table_of("interactions", [interaction("old")]))
    monkeypatch.undo()
    return lake


def test_they_are_added_once_and_old_rows_have_nulls_there(older: Lake) -> None:
    before = older.table("interactions").version()
    older.create()
    older.create()
    assert older.table("interactions").version() == before + 1
    row = interaction("new", variant="candidate", experiment=3, propensity=0.25)
    older.append("interactions", table_of("interactions", [row]))
    with older.connect() as connection:
        rows = connection.sql("SELECT response_id, experiment, propensity FROM interactions ORDER BY 1").fetchall()
        assert connection.sql("SELECT * FROM interactions").to_arrow_table().num_rows == 2
    assert rows == [("new", 3, 0.25), ("old", None, None)]
    found = DeltaTable(older.table_uri("interactions")).to_pyarrow_dataset().to_table(["response_id", "propensity"])
    assert sorted(found.to_pylist(), key=lambda row: row["response_id"])[0]["propensity"] == 0.25


def test_a_lake_that_was_not_opened_by_a_server_since_can_be_read(older: Lake) -> None:
    with older.connect() as connection:
        assert connection.sql("SELECT response_id FROM interactions").fetchall() == [("old",)]
        assert connection.sql("SELECT experiment, propensity FROM interactions").fetchall() == [(None, None)]


def test_while_all_files_are_old_the_columns_are_there_at_every_version(older: Lake) -> None:
    before = older.table("interactions").version()
    older.create()
    for versions in ({}, {"interactions": before}):
        with older.connect(versions=versions) as connection:
            assert connection.sql("SELECT experiment, variant FROM interactions").fetchall() == [(None, None)]


def test_files_are_read_by_name_only_while_some_lack_a_column(older: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    from feedback.lake import views

    older.create()
    older.append("interactions", table_of("interactions", [interaction("new")]))
    assert views._lack_columns("interactions", older.table("interactions"))
    fresh = Lake(older.uri + "-2", LakeConfig())
    fresh.create()
    fresh.append("interactions", table_of("interactions", [interaction("new")]))
    assert not views._lack_columns("interactions", fresh.table("interactions"))


def test_what_can_not_be_added_is_said(older: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    table = older.table("interactions")

    class Alterer:
        def add_columns(self, fields: object) -> None:
            raise OSError("the disk is full")

    monkeypatch.setattr(type(table), "alter", property(lambda self: Alterer()))
    with pytest.raises(tables.LakeError, match=r"can't be given the column experiment: .*disk is full"):
        older.create()
