"""The lake on a real S3-compatible server (moto's) on the loopback."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from feedback_rows import append, interaction, put, table_of, thumb

from feedback.config import JournalConfig, LakeConfig, ScoringConfig
from feedback.ingest.seal import seal
from feedback.ingest.sealer_process import Sealer
from feedback.journal.segment import list_segments
from feedback.journal.writer import Journal
from feedback.lake import tables
from feedback.lake.data_files import StoredFile, data_files
from feedback.lake.tables import Lake, LakeConflictError, LakeError
from feedback.lake.upgrade import upgrade
from feedback.maintenance.erasure import Target, erase, finish_erasures
from feedback.maintenance.maintain import compact, maintain, retain, vacuum
from feedback.schema import TABLES
from feedback.scoring.run import score
from tests.object_store import serving

_numbers = itertools.count()


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, str]]:
    """Storage options of a server that holds an empty bucket."""
    with serving() as found:
        yield found


@pytest.fixture
def lake(options: dict[str, str], tmp_path: Path) -> Lake:
    config = LakeConfig(storage_options=options, vacuum_hours=1, erasure_key=str(tmp_path / "erasure.key"))
    made = Lake(f"s3://bucket/lake{next(_numbers)}", config)
    made.create()
    return made


def ids(lake: Lake, table: str = "feedback", journal: Path | None = None) -> list[str]:
    with lake.connect(journal) as connection:
        return sorted(row for [row] in connection.sql(f"SELECT response_id FROM {table}").fetchall())


def stored(lake: Lake, table: str) -> list[StoredFile]:
    return [file for file in lake.files(table).list("") if file.path.startswith("date=")]


def journal_of(folder: Path, *rows: tuple[str, dict[str, object]]) -> None:
    journal = Journal(folder, JournalConfig(segment_bytes=1), "replica-0")
    journal.open()
    for table, row in rows:
        append(journal, table, row)
    journal.close()


def interrupt(*_: object, **__: object) -> None:
    """Where a process is killed."""
    raise KeyboardInterrupt


def test_a_lake_is_made_by_several_at_once_and_again(options):
    uri = f"s3://bucket/lake{next(_numbers)}"
    lakes = [Lake(uri, LakeConfig(storage_options=options)) for _ in range(4)]
    with pytest.raises(LakeError, match="no lake at"):
        lakes[0].versions()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(Lake.create, lakes))
    lakes[0].create()
    assert lakes[0].versions() == {"interactions": 0, "feedback": 0, "rewards": 0}
    assert lakes[0].counts() == {"interactions": 0, "feedback": 0, "rewards": 0}


def test_an_older_lake_is_upgraded_once_by_several_at_once(options, monkeypatch):
    uri = f"s3://bucket/lake{next(_numbers)}"
    lakes = [Lake(uri, LakeConfig(storage_options=options)) for _ in range(4)]
    with monkeypatch.context() as patch:
        columns = [field for field in TABLES["interactions"] if field.name not in ("experiment", "propensity")]
        patch.setitem(TABLES, "interactions", pa.schema(columns))
        patch.setattr(tables, "SCHEMA_VERSION", 0)
        lakes[0].create()
        put(lakes[0], "interactions", [interaction("old")])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda lake: list(upgrade(lake)), lakes))
    put(lakes[0], "interactions", [interaction("new", experiment=3)])
    with lakes[0].connect() as connection:
        query = "SELECT response_id, experiment, propensity FROM interactions ORDER BY 1"
        assert connection.sql(query).fetchall() == [("new", 3, None), ("old", None, None)]
    assert lakes[0].open("interactions").version() == 4  # created, a row, the columns, the stamp, a row: each once


def test_a_bucket_that_is_not_there_is_named(options):
    with pytest.raises(LakeError, match="s3://nowhere/lake"):
        Lake("s3://nowhere/lake", LakeConfig(storage_options=options)).create()


def test_an_append_is_done_once_and_of_two_from_one_version_one_conflicts(lake):
    rows = table_of("feedback", [thumb("a", 1)])
    mine = lake.table("feedback")
    assert lake.append("feedback", rows, transactions={"me": 1}) == 1
    assert lake.append("feedback", rows, transactions={"me": 1}) is None
    with pytest.raises(LakeConflictError):
        lake.append("feedback", rows, transactions={"me": 2}, snapshot=mine)
    assert ids(lake) == ["a"]
    assert len(stored(lake, "feedback")) == 1


def test_appends_of_many_at_once_are_all_there_once(lake):
    def append(number: int) -> int | None:
        rows = table_of("feedback", [thumb(f"r{number:02}", 1)])
        return Lake(lake.uri, lake.config).append("feedback", rows, transactions={f"writer{number}": 1})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(12)))
    assert ids(lake) == [f"r{number:02}" for number in range(12)]
    assert lake.versions()["feedback"] == 12


@pytest.mark.parametrize(
    "where",
    [
        "feedback.lake.data_files.TableFiles.write",
        "deltalake.DeltaTable.create_write_transaction",
        "pathlib.Path.unlink",
    ],
)
def test_a_seal_that_is_killed_and_repeated_seals_each_row_once(lake, folder, monkeypatch, where):
    journal_of(folder, *[("feedback", thumb(f"r{n}", 1)) for n in range(3)], ("interactions", interaction("r0")))
    with monkeypatch.context() as patch:
        patch.setattr(where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            seal(lake, folder)
    assert ids(lake, journal=folder) == ["r0", "r1", "r2"]
    seal(lake, folder)
    assert list_segments(folder) == []
    assert (ids(lake), ids(lake, "interactions")) == (["r0", "r1", "r2"], ["r0"])


def test_sealers_of_two_machines_at_once_seal_each_row_once(lake, tmp_path):
    folders = [tmp_path / f"journal-{number}" for number in range(2)]
    for number, folder in enumerate(folders):
        journal_of(folder, *[("feedback", thumb(f"r{number}{n}", 1)) for n in range(3)])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda folder: seal(Lake(lake.uri, lake.config), folder), folders))
    assert ids(lake) == ["r00", "r01", "r02", "r10", "r11", "r12"]


def test_views_scoring_and_unsealed_rows_are_as_on_a_disk(lake, folder):
    put(lake, "interactions", [interaction("a"), interaction("b")])
    put(lake, "feedback", [thumb("a", 1)])
    journal_of(folder, ("interactions", interaction("c")), ("feedback", thumb("b", 0)))
    assert ids(lake, "interactions", folder) == ["a", "b", "c"]
    assert ids(lake, "feedback", folder) == ["a", "b"]
    assert score(lake, ScoringConfig()).scored == 2
    seal(lake, folder)
    assert score(lake, ScoringConfig()).scored == 2, "c, and b again"
    assert score(lake, ScoringConfig()).scored == 0
    with lake.connect() as connection:
        rewards = connection.sql("SELECT response_id, reward FROM current_rewards ORDER BY response_id").fetchall()
    assert rewards == [("a", 1.0), ("b", 0.0), ("c", None)]


def test_of_two_that_replace_a_file_one_fails_and_leaves_nothing(lake, monkeypatch):
    put(lake, "feedback", [thumb("kept", 1), thumb("erased", 1)])
    [file] = data_files(lake.table("feedback"))
    other, look, looked = Lake(lake.uri, lake.config), lake.table, []

    def then_the_other_commits(*arguments: str) -> DeltaTable:
        snapshot = look(*arguments)
        if not looked:
            looked.append(snapshot)
            other.replace("feedback", [file.path], table_of("feedback", [thumb("kept", 1)]))
            put(other, "feedback", [thumb("new", 1)])
        return snapshot

    everything = table_of("feedback", [thumb("kept", 1), thumb("erased", 1)])
    with monkeypatch.context() as patch:
        patch.setattr(lake, "table", then_the_other_commits)
        with pytest.raises(LakeConflictError, match="Concurrent transaction"):
            lake.replace("feedback", [file.path], everything)
    with pytest.raises(LakeConflictError, match="by another process"):
        lake.replace("feedback", [file.path], everything)
    assert ids(lake) == ["kept", "new"]
    assert len(stored(lake, "feedback")) == 3


def test_compaction_keeps_the_rows_is_not_seen_by_scoring_and_does_nothing_twice(lake):
    for number in range(4):
        put(lake, "interactions", [interaction(f"r{number}")])
    assert score(lake, ScoringConfig()).scored == 4
    put(lake, "interactions", [interaction("new")])
    assert compact(lake)["interactions"].files_before == 5
    assert ids(lake, "interactions") == ["new", "r0", "r1", "r2", "r3"]
    assert score(lake, ScoringConfig()).scored == 1
    assert compact(lake)["interactions"].files_before == 0


def test_a_vacuum_removes_what_is_old_and_no_file_that_may_still_be_committed(lake, monkeypatch):
    put(lake, "feedback", [thumb("a", 1)])
    put(lake, "feedback", [thumb("b", 1)])
    with monkeypatch.context() as patch:
        two_hours_ago = time.time_ns() - 2 * 3600 * 10**9
        patch.setattr("feedback.lake.tables.time.time_ns", lambda: two_hours_ago)
        compact(lake)
    [written] = lake.files("feedback").write("feedback", table_of("feedback", [thumb("c", 1)]))
    dry = vacuum(lake, dry_run=True)["feedback"]
    assert (len(dry.replaced), dry.orphans) == (2, [])
    assert vacuum(lake)["feedback"].replaced == dry.replaced
    assert len(stored(lake, "feedback")) == 2
    assert written.path in {file.path for file in stored(lake, "feedback")}
    assert ids(lake) == ["a", "b"]


def test_old_dates_are_dropped(lake):
    put(lake, "interactions", [interaction("old"), interaction("new", created_at=datetime.now(UTC))])
    keeping = Lake(lake.uri, lake.config.model_copy(update={"retain_days": 1, "retain_gap_days": None}))
    assert retain(keeping).rows["interactions"] == 1
    assert ids(lake, "interactions") == ["new"]
    assert maintain(keeping).retained.dates == []


def test_an_erased_user_is_in_no_object_and_rows_that_come_behind_are_dropped(lake, folder, tmp_path):
    secret = "Zaphod-Beeblebrox"
    texts = {"user": secret, "prompt": f"I am {secret}", "response": f"hello {secret}"}
    for number in range(2):
        put(lake, "interactions", [interaction(f"r{number}"), interaction(f"{secret}-{number}", **texts)])
    put(lake, "feedback", [thumb(f"{secret}-0", 1), thumb("r0", 1)])
    score(lake, ScoringConfig())
    compact(lake)
    journal_of(folder, ("interactions", interaction(f"{secret}-2", **texts)), ("interactions", interaction("r2")))
    elsewhere = tmp_path / "elsewhere"
    journal_of(elsewhere, ("interactions", interaction(f"{secret}-3", **texts)), ("interactions", interaction("r3")))

    done = erase(lake, folder, Target(user=secret))
    assert done.rows == {"interactions": 3, "feedback": 1, "rewards": 2}
    seal(lake, elsewhere)
    assert finish_erasures(lake) == {"interactions": 0, "feedback": 0, "rewards": 0}

    assert (ids(lake, "interactions"), ids(lake), ids(lake, "rewards")) == (
        ["r0", "r1", "r2", "r3"],
        ["r0"],
        ["r0", "r1"],
    )
    store = lake.store()
    for file in store.list(""):
        data = store.read_bytes(file.path)
        assert secret.encode() not in data, file.path
        if file.path.endswith(".parquet"):
            table = pq.read_table(pa.BufferReader(data))
            assert secret not in str(table.to_pylist()), file.path
    assert score(lake, ScoringConfig()).scored == 2, "r2 and r3"


def test_an_erasure_reports_files_that_a_writer_may_be_about_to_commit(lake, folder):
    [written] = lake.files("feedback").write("feedback", table_of("feedback", [thumb("c", 1)]))
    assert erase(lake, folder, Target(user="ann")).left == [f"feedback/{written.path}"]


def test_an_erasure_from_an_object_store_needs_the_path_of_its_key(lake, folder):
    without = Lake(lake.uri, lake.config.model_copy(update={"erasure_key": None}))
    with pytest.raises(LakeError, match=r"feedback\.lake\.erasure_key must name"):
        erase(without, folder, Target(user="ann"))
    assert lake.store().list("_erasures") == []


def test_of_two_machines_that_share_an_object_store_the_one_without_the_key_seals_nothing_that_may_be_erased(
    lake, folder, tmp_path
):
    other = Lake(lake.uri, lake.config.model_copy(update={"erasure_key": str(tmp_path / "other.key")}))
    erase(lake, folder, Target(user="zaphod"))
    elsewhere = tmp_path / "elsewhere"
    journal_of(elsewhere, ("interactions", interaction("a")), ("interactions", interaction("b", user="zaphod")))
    with pytest.raises(LakeError, match=r"another key than .*other\.key"):
        seal(other, elsewhere)
    assert len(list_segments(elsewhere)) == 2
    (tmp_path / "other.key").write_bytes((tmp_path / "erasure.key").read_bytes())
    seal(other, elsewhere)
    assert ids(lake, "interactions") == ["a"]


def test_the_sealers_process_is_handed_the_stores_keys(lake, folder):
    journal_of(folder, ("feedback", thumb("a", 1)))
    sealer = Sealer(Lake(lake.uri, lake.config.model_copy(update={"seal_seconds": 0.1})), folder)
    sealer.start()
    try:
        deadline = time.monotonic() + 180
        while not sealer.sealed_segments and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (sealer.error, sealer.sealed_segments) == (None, 1)
    finally:
        sealer.close()
    assert ids(lake) == ["a"]
