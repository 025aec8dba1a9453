"""Data files that are older than columns of their table."""

from __future__ import annotations

from deltalake import DeltaTable
from feedback_rows import interaction, table_of

from feedback.config import LakeConfig
from feedback.lake import views
from feedback.lake.tables import Lake
from feedback.lake.upgrade import upgrade

QUERY = "SELECT response_id, experiment, propensity FROM interactions ORDER BY 1"


def test_old_rows_have_nulls_there_for_any_reader(older: Lake) -> None:
    list(upgrade(older))
    row = interaction("new", variant="candidate", experiment=3, propensity=0.25)
    older.append("interactions", table_of("interactions", [row]))
    with older.connect() as connection:
        assert connection.sql(QUERY).fetchall() == [("new", 3, 0.25), ("old", None, None)]
        assert connection.sql("SELECT * FROM interactions").to_arrow_table().num_rows == 2
    found = DeltaTable(older.table_uri("interactions")).to_pyarrow_dataset().to_table(["response_id", "propensity"])
    assert sorted(found.to_pylist(), key=lambda row: row["response_id"])[0]["propensity"] == 0.25


def test_while_all_files_are_old_the_columns_are_there_at_every_version(older: Lake) -> None:
    before = older.open("interactions").version()
    list(upgrade(older))
    for versions in ({}, {"interactions": before}):  # a run that began before goes on with these
        with older.connect(versions=versions) as connection:
            assert connection.sql(QUERY).fetchall() == [("old", None, None)]


def test_files_are_read_by_name_only_while_some_lack_a_column(older: Lake) -> None:
    list(upgrade(older))
    older.append("interactions", table_of("interactions", [interaction("new")]))
    assert views._lack_columns("interactions", older.table("interactions"))
    fresh = Lake(older.uri + "-2", LakeConfig())
    fresh.create()
    fresh.append("interactions", table_of("interactions", [interaction("new")]))
    assert not views._lack_columns("interactions", fresh.table("interactions"))
