from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from deltalake import DeltaTable, TableFeatures
from feedback_rows import NOON, append, interaction, put, said, table_of

from feedback.config import JournalConfig, LakeConfig
from feedback.ingest.seal import seal
from feedback.journal.writer import Journal
from feedback.lake.tables import Lake, LakeError, LakeFileGoneError
from feedback.lake.views import is_file_gone
from feedback.maintenance.maintain import compact
from tests.object_store import serving
from tests.paths import ROOT


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """Storage options of an S3-compatible server."""
    with serving() as options:
        yield options


def bucket(options: dict[str, str]) -> Any:
    return boto3.resource(
        "s3",
        endpoint_url=options["aws_endpoint_url"],
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    ).Bucket("bucket")


@pytest.fixture(params=["local", "s3"])
def any_lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    """The same lake, on a disk and on an object store."""
    if request.param == "local":
        made = Lake(str(tmp_path / "lake"), LakeConfig())
    else:
        options = request.getfixturevalue("s3")
        made = Lake(f"s3://bucket/{tmp_path.name}", LakeConfig(storage_options=options))
    made.create()
    return made


def remove_files(lake: Lake, table: str, response_id: str) -> None:
    """Remove the data files that may hold a response, as a vacuum would that is too quick."""
    files = lake.table(table).file_uris(file_pruning_predicate=f"response_id = '{response_id}'")
    assert files
    for file in files:
        if lake.local:
            Path(file).unlink()
        else:
            bucket(lake.config.store_options).Object(file.removeprefix("s3://bucket/")).delete()


def fetch(lake: Lake, query: str, journal_folder: Path | None = None, **options: Any) -> list[tuple[Any, ...]]:
    with lake.connect(journal_folder, **options) as connection:
        return connection.execute(query).fetchall()


def three_days(lake: Lake) -> None:
    for day, name in enumerate("abc"):
        put(lake, "interactions", [interaction(name, created_at=NOON + timedelta(days=day))])


def test_a_filter_on_the_date_opens_no_file_of_another_date(any_lake):
    three_days(any_lake)
    query = "SELECT response_id, response FROM interactions WHERE date = DATE '2026-03-01'"
    with any_lake.connect() as connection:
        opened = connection.execute(f"EXPLAIN ANALYZE {query}").fetchall()[0][1]
        assert connection.execute(query).fetchall() == [("a", "four")]
    if any_lake.local:
        assert "1/3" in opened, "DuckDB says how many of the files it scanned"


@pytest.mark.parametrize(
    "condition",
    [
        "response_id = 'a'",
        "response_id < 'b'",
        "created_at < TIMESTAMPTZ '2026-03-01 13:00:00+00'",
        "date = DATE '2026-03-01'",
    ],
)
def test_on_an_object_store_a_filter_opens_only_files_that_can_match(s3, tmp_path, condition):
    lake = Lake(f"s3://bucket/{tmp_path.name}", LakeConfig(storage_options=s3))
    lake.create()
    three_days(lake)
    with lake.connect() as connection:
        remove_files(lake, "interactions", "b")
        remove_files(lake, "interactions", "c")
        query = "SELECT response_id, response, metadata['answer'] FROM interactions"
        assert connection.execute(f"{query} WHERE {condition}").fetchall() == [("a", "four", "four")]
        with pytest.raises(Exception, match="not found") as caught:
            connection.execute(query)
        assert is_file_gone(caught.value)


def test_only_the_columns_that_a_query_names_are_read(any_lake):
    three_days(any_lake)
    with any_lake.connect() as connection:
        plan = connection.execute("EXPLAIN SELECT response_id FROM interactions WHERE tenant = 'x'").fetchall()[0][1]
    assert "prompt" not in plan
    assert "response_id" in plan


def test_a_view_is_of_the_moment_it_was_made(any_lake):
    put(any_lake, "feedback", [said("1", "a", "thumb", value=1.0)])
    with any_lake.connect() as connection:
        put(any_lake, "feedback", [said("2", "a", "thumb", value=1.0)])
        assert connection.execute("SELECT feedback_id FROM feedback").fetchall() == [("1",)]
        assert connection.execute("SELECT getvariable('versions')['feedback']").fetchall() == [(1,)]
    assert len(fetch(any_lake, "SELECT feedback_id FROM feedback")) == 2


def test_only_the_requested_views_exist(lake):
    put(lake, "feedback", [said("1", "a", "thumb", value=1.0)])
    assert fetch(lake, "SHOW TABLES", tables=("feedback",)) == [("feedback",), ("sealed_feedback",)]
    with lake.connect(tables=()) as connection:
        assert connection.execute("SHOW TABLES").fetchall() == []


def test_times_are_utc_whatever_the_machine_says(lake):
    put(lake, "feedback", [said("1", "a", "thumb", value=1.0)])
    code = (
        "from feedback.lake.tables import Lake; from feedback.config import LakeConfig\n"
        "query = \"SELECT created_at::VARCHAR, date_trunc('day', created_at)::VARCHAR FROM feedback\"\n"
        f"with Lake({lake.uri!r}, LakeConfig()).connect() as c:\n"
        "    print(c.execute(query).fetchall())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"TZ": "Asia/Tokyo", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[('2026-03-01 12:00:00+00', '2026-03-01 00:00:00+00')]", done.stderr


def test_a_name_in_a_query_is_no_variable_of_the_program(lake):
    secrets = [1, 2]  # noqa: F841
    with lake.connect() as connection, pytest.raises(Exception, match="secrets does not exist"):
        connection.execute("SELECT * FROM secrets")


def test_responses_that_are_still_going_out_are_not_in_the_view(lake, folder, journal):
    append(journal, "interactions", interaction("ended"))
    append(journal, "interactions", interaction("going", status="started"))
    assert fetch(lake, "SELECT response_id FROM interactions", folder) == [("ended",)]
    assert len(fetch(lake, "SELECT response_id FROM unsealed_interactions", folder)) == 2


def test_a_pinned_table_has_no_unsealed_rows_and_the_others_have(lake, folder, journal):
    put(lake, "feedback", [said("sealed", "a", "thumb", value=1.0)])
    put(lake, "interactions", [interaction("a")])
    append(journal, "feedback", said("unsealed", "a", "thumb", value=1.0))
    append(journal, "interactions", interaction("b"))
    pinned = {"feedback": 1}
    assert fetch(lake, "SELECT feedback_id FROM feedback", folder, versions=pinned) == [("sealed",)]
    assert len(fetch(lake, "SELECT response_id FROM interactions", folder, versions=pinned)) == 2
    assert len(fetch(lake, "SELECT feedback_id FROM feedback", folder)) == 2


def test_a_journal_folder_that_is_not_there_is_an_empty_journal(lake, tmp_path):
    assert fetch(lake, "SELECT count(*) FROM interactions", tmp_path / "none") == [(0,)]
    assert not (tmp_path / "none").exists()


def test_every_row_is_there_once_for_many_readers_while_several_journals_are_sealed(tmp_path):
    lake = Lake(str(tmp_path / "lake"), LakeConfig(lock_timeout_s=60))
    lake.create()
    journal_folder = tmp_path / "journal"
    config = JournalConfig(segment_bytes=1, segment_seconds=60)
    journals = [Journal(journal_folder, config, f"replica-{number}") for number in range(2)]
    for journal in journals:
        journal.open()
    stop = threading.Event()
    acknowledged = [0, 0]

    def write(number: int) -> None:
        for row in range(60):
            append(journals[number], "feedback", said(f"{number}-{row}", "a", "thumb", value=1.0))
            acknowledged[number] = row + 1

    def seal_on() -> None:
        while not stop.is_set():
            seal(lake, journal_folder)

    def read_on() -> int:
        reads = 0
        while not stop.is_set():
            before = sum(acknowledged)
            query = "SELECT count(*), count(DISTINCT feedback_id) FROM feedback"
            [(rows, distinct)] = fetch(lake, query, journal_folder, tables=("feedback",))
            assert rows == distinct
            assert rows >= before
            reads += 1
        return reads

    with ThreadPoolExecutor(6) as pool:
        background = [pool.submit(seal_on), *(pool.submit(read_on) for _ in range(3))]
        for done in [pool.submit(write, number) for number in range(2)]:
            done.result(60)
        stop.set()
        assert all(reads.result(60) for reads in background[1:])
        background[0].result(60)
    for journal in journals:
        journal.close()
    seal(lake, journal_folder)
    assert fetch(lake, "SELECT count(*) FROM feedback") == [(120,)]


def test_reading_starts_over_when_a_vacuum_takes_the_files(lake):
    for name in "ab":
        put(lake, "interactions", [interaction(name)])
    tries = []

    def count(connection: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:  # between the views and the query
            table = DeltaTable(lake.table_uri("interactions"))
            table.optimize.compact()
            table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
        return connection.execute("SELECT count(response) FROM interactions").fetchall()

    assert lake.read(count) == [(2,)]
    assert len(tries) == 2


def test_files_that_stay_away_are_named(any_lake):
    three_days(any_lake)
    remove_files(any_lake, "interactions", "b")
    query = "SELECT response FROM interactions"
    with pytest.raises(LakeFileGoneError, match=r"removed by a vacuum .*part-.*parquet"):
        any_lake.read(lambda connection: connection.execute(query).fetchall())
    with pytest.raises(LakeFileGoneError, match="interactions at version 3 can't be read any more"):
        any_lake.read(lambda connection: connection.execute(query).fetchall(), versions={"interactions": 3})


def test_an_error_of_the_query_is_not_taken_for_a_missing_file(lake):
    with pytest.raises(Exception, match="salads") as caught:
        lake.read(lambda connection: connection.execute("SELECT * FROM salads"))
    assert not isinstance(caught.value, LakeError)


def test_a_table_whose_files_alone_are_not_its_rows_is_refused_and_can_be_appended_to(lake):
    table = DeltaTable(lake.table_uri("feedback"))
    table.alter.add_feature(TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)
    for work in (lake.connect, lambda: compact(lake)):
        with pytest.raises(LakeError, match="feedback uses deletionVectors"):
            work()
    before = lake.versions()["feedback"]
    assert lake.append("feedback", table_of("feedback", [said("0", "a", "thumb", value=1.0)])) == before + 1


def test_thousands_of_files_are_one_view(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)  # nothing here outlives the test
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    files = lake.files("feedback")
    count = 1000
    row = said("0", "a", "thumb", value=1.0)
    actions = [
        action
        for number in range(count)
        for action in files.write("feedback", table_of("feedback", [row | {"feedback_id": f"{number:06d}"}]))
    ]
    snapshot = lake.table("feedback")
    snapshot.create_write_transaction(actions, "append", snapshot.schema(), ["date"])
    query = "SELECT count(*), count(DISTINCT feedback_id), max(feedback_id) FROM feedback"
    for local in (True, False):
        lake.local = local
        assert fetch(lake, query) == [(count, count, "000999")]
