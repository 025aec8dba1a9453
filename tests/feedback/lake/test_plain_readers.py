"""The tables as others read them, by the documented path: a Delta table below the lake's address."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from feedback_rows import NOON, interaction, put, table_of

from feedback.lake.tables import Lake

COLUMNS = ["response_id", "user", "session_id", "created_at", "response", "prompt_token_ids", "metadata", "date"]
LATER = NOON + timedelta(microseconds=999)


def first_rows() -> list[dict[str, object]]:
    """Null columns, long texts, fractions of a millisecond, and a file in which only some columns have values."""
    return [
        interaction("a", user="ann"),
        interaction("b"),
        interaction("c", response="z" * 200, created_at=LATER),
        interaction("d", created_at=NOON + timedelta(days=1), prompt=None, metadata={}),
    ]


def later_rows() -> list[dict[str, object]]:
    return [interaction("e", user="bob", session_id="s"), interaction("f", created_at=NOON - timedelta(days=40))]


# name -> (SQL, Arrow expression, Polars expression, pandas query)
FILTERS = {
    "all": ("true", None, None, "response_id == response_id"),
    "an id": ("response_id = 'b'", pc.field("response_id") == "b", pl.col("response_id") == "b", "response_id == 'b'"),
    "a value of a column that is null in some files": (
        "\"user\" = 'ann'",
        pc.field("user") == "ann",
        pl.col("user") == "ann",
        "user == 'ann'",
    ),
    "a null": (
        '"user" IS NULL',
        pc.field("user").is_null(),
        pl.col("user").is_null(),
        "user.isnull()",
    ),
    "not null": (
        "session_id IS NOT NULL",
        pc.field("session_id").is_valid(),
        pl.col("session_id").is_not_null(),
        "session_id.notnull()",
    ),
    "a long text": (
        "response > 'y'",
        pc.field("response") > "y",
        pl.col("response") > "y",
        "response > 'y'",
    ),
    "a time": (
        "created_at = TIMESTAMPTZ '2026-03-01 12:00:00.000999+00'",
        pc.field("created_at") == pa.scalar(LATER, pa.timestamp("us", tz="UTC")),
        pl.col("created_at") == LATER,
        "created_at == @LATER",
    ),
    "a date": (
        "date = DATE '2026-03-01'",
        pc.field("date") == NOON.date(),
        pl.col("date") == NOON.date(),
        "date == @NOON.date()",
    ),
}

Row = tuple[object, ...]


def plain_duckdb(uri: str, name: str) -> list[Row]:
    files = DeltaTable(uri).file_uris()
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        scan = "read_parquet($files, hive_partitioning = true, hive_types = {'date': DATE})"
        query = f"SELECT * FROM {scan} WHERE {FILTERS[name][0]}"
        return rows_of(connection.sql(query, params={"files": files}).to_arrow_table())


def plain_arrow(uri: str, name: str) -> list[Row]:
    return rows_of(DeltaTable(uri).to_pyarrow_dataset().to_table(filter=FILTERS[name][1]))


def plain_arrow_table(uri: str, name: str) -> list[Row]:
    return rows_of(DeltaTable(uri).to_pyarrow_table(filters=FILTERS[name][1]))


def lazy_polars(uri: str, name: str) -> list[Row]:
    frame = pl.scan_delta(uri)
    if (condition := FILTERS[name][2]) is not None:
        frame = frame.filter(condition)
    return rows_of(frame.collect().to_arrow())


def eager_polars(uri: str, name: str) -> list[Row]:
    frame = pl.read_delta(uri)
    return rows_of((frame if (condition := FILTERS[name][2]) is None else frame.filter(condition)).to_arrow())


def plain_pandas(uri: str, name: str) -> list[Row]:
    frame = DeltaTable(uri).to_pandas(types_mapper=pandas_types)
    frame = frame.query(FILTERS[name][3], local_dict={"LATER": LATER, "NOON": NOON}, engine="python")
    return rows_of(pa.Table.from_pandas(frame[COLUMNS], preserve_index=False))


def pandas_types(kind: pa.DataType) -> object:
    import pandas

    return None if pa.types.is_date(kind) else pandas.ArrowDtype(kind)


READERS: dict[str, Callable[[str, str], list[Row]]] = {
    "DuckDB": plain_duckdb,
    "pyarrow dataset": plain_arrow,
    "pyarrow table": plain_arrow_table,
    "Polars lazily": lazy_polars,
    "Polars eagerly": eager_polars,
    "pandas": plain_pandas,
}


def rows_of(table: pa.Table) -> list[Row]:
    """Rows by id, in Python's types, whatever the reader calls a map."""
    rows = []
    for row in table.select(COLUMNS).to_pylist():
        row["metadata"] = sorted((e["key"], e["value"]) if isinstance(e, dict) else tuple(e) for e in row["metadata"])
        assert isinstance(row["created_at"], datetime)
        rows.append(tuple(row.values()))
    return sorted(rows, key=lambda row: str(row[0]))


def view(lake: Lake, name: str) -> list[Row]:
    with lake.connect() as connection:
        return rows_of(connection.sql(f"SELECT * FROM interactions WHERE {FILTERS[name][0]}").to_arrow_table())


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lake]:
    """The lake after one append, after more, and after others' and our own compaction of them."""
    from feedback.config import LakeConfig
    from feedback.maintenance.maintain import compact

    made: dict[str, Lake] = {}
    for stage in ("one append", "more appends", "compacted by deltalake", "compacted by Millrace"):
        lake = Lake(str(tmp_path_factory.mktemp("plain") / "lake"), LakeConfig())
        lake.create()
        put(lake, "interactions", first_rows())
        if stage != "one append":
            put(lake, "interactions", later_rows()[:1])
            put(lake, "interactions", later_rows()[1:])
        if stage == "compacted by deltalake":
            DeltaTable(lake.table_uri("interactions")).optimize.compact()
        if stage == "compacted by Millrace":
            compact(lake)
        made[stage] = lake
    return made


STAGES = ("one append", "more appends", "compacted by deltalake", "compacted by Millrace")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", FILTERS)
def test_a_plain_reader_gets_the_rows_of_the_view(stages, stage, reader, name):
    lake = stages[stage]
    expected = view(lake, name)
    if name != "not null" or stage != "one append":
        assert expected, "a filter that finds nothing proves little"
    assert READERS[reader](lake.table_uri("interactions"), name) == expected


def test_the_view_has_what_was_written(stages):
    rows = first_rows() + later_rows()
    written = rows_of(table_of("interactions", rows).append_column("date", dates_of(rows)))
    assert view(stages["more appends"], "all") == written
    assert view(stages["compacted by Millrace"], "all") == written


def dates_of(rows: list[dict[str, object]]) -> pa.Array:
    return pa.array([row["created_at"].date() for row in rows])  # type: ignore[attr-defined]
