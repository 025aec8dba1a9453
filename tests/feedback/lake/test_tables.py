from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from feedback_rows import NOON, append, interaction, put, table_of, thumb
from hypothesis import given, settings
from hypothesis import strategies as st

from feedback.config import JournalConfig, LakeConfig, ScoringConfig
from feedback.files import LockTimeoutError, locked
from feedback.ingest.seal import seal
from feedback.ingest.sealer_process import Sealer
from feedback.journal.segment import list_segments
from feedback.journal.writer import Journal
from feedback.lake import data_files
from feedback.lake.data_files import _lower, _upper
from feedback.lake.tables import Lake, LakeConflictError, LakeError
from feedback.scoring.run import score


def count(lake: Lake, journal_folder: Path | None = None, table: str = "feedback") -> tuple[int, int]:
    """(rows, distinct responses) of a view."""
    with lake.connect(journal_folder) as connection:
        [found] = connection.sql(f"SELECT count(*), count(DISTINCT response_id) FROM {table}").fetchall()
    return found


def interrupt(*_: object, **__: object) -> None:
    """Where a process is killed."""
    raise KeyboardInterrupt


def fill(folder: Path, names: list[str], writer: str = "replica-0", segment_bytes: int = 1) -> None:
    """A journal with these thumbs, by default in a closed segment each, whose writer has gone."""
    journal = Journal(folder, JournalConfig(segment_bytes=segment_bytes), writer)
    journal.open()
    for name in names:
        append(journal, "feedback", thumb(name, 1))
    journal.close()


def test_an_empty_lake_has_its_views_and_versions(lake):
    lake.create()
    assert lake.versions() == {"interactions": 0, "feedback": 0, "rewards": 0}
    assert lake.counts() == {"interactions": 0, "feedback": 0, "rewards": 0}
    for table in ("interactions", "feedback", "rewards", "current_rewards"):
        assert count(lake, table=table) == (0, 0)


def test_a_lake_that_is_not_there_and_a_version_that_is_not_are_named(tmp_path, lake):
    with pytest.raises(LakeError, match=r"no lake at .*/nowhere"):
        Lake(str(tmp_path / "nowhere"), LakeConfig()).versions()
    with pytest.raises(LakeError, match="version 99"):
        lake.table("feedback", 99)
    with pytest.raises(LakeError, match="no table 'salads'"):
        lake.table("salads")


def test_other_tools_read_the_table_and_rows_are_partitioned_by_their_own_date(lake):
    rows = [interaction("a"), interaction("b", created_at=NOON + timedelta(days=1), prompt=None)]
    put(lake, "interactions", rows)
    plain = DeltaTable(lake.table_uri("interactions")).to_pyarrow_table(columns=["response_id", "date"])
    days = {row["response_id"]: str(row["date"]) for row in plain.to_pylist()}
    assert days == {"a": "2026-03-01", "b": "2026-03-02"}
    with lake.connect() as connection:
        table = connection.sql("SELECT * FROM interactions ORDER BY response_id").to_arrow_table()
    [first, second] = table.to_pylist()
    assert second["prompt"] is None
    assert first["metadata"] == [("answer", "four")]
    assert first["policy_spans"] == [{"start": 0, "policy_version": 1}]
    assert first["created_at"] == NOON
    assert first["sampling"]["max_tokens"] == 8
    assert [str(row["date"]) for row in (first, second)] == ["2026-03-01", "2026-03-02"]


def test_views_have_the_same_types_with_and_without_files(lake):
    with lake.connect() as connection:
        empty = connection.sql("DESCRIBE interactions").fetchall()
    put(lake, "interactions", [interaction("a")])
    with lake.connect() as connection:
        assert connection.sql("DESCRIBE interactions").fetchall() == empty


def test_a_version_can_be_read_again_later(lake):
    put(lake, "feedback", [thumb("a", 1)])
    put(lake, "feedback", [thumb("b", 1)])
    with lake.connect(versions={"feedback": 1}) as connection:
        assert connection.sql("SELECT response_id FROM feedback").fetchall() == [("a",)]


def test_an_append_with_a_transaction_is_done_once(lake):
    rows = table_of("feedback", [thumb("a", 1)])
    assert lake.append("feedback", rows, transactions={"me": 0}) == 1
    assert lake.append("feedback", rows, transactions={"me": 0}) is None
    assert lake.append("feedback", rows, transactions={"me": 1}, metadata={"why": "more"}) == 2
    assert count(lake) == (2, 1)
    assert DeltaTable(lake.table_uri("feedback")).history(1)[0]["why"] == "more"


def test_two_appends_from_the_same_state_under_one_id_conflict_and_leave_no_file(lake):
    rows = table_of("feedback", [thumb("a", 1)])
    mine, others = lake.table("feedback"), lake.table("feedback")
    lake.append("feedback", rows, transactions={"me": 1}, snapshot=others)
    with pytest.raises(LakeConflictError):
        lake.append("feedback", rows, transactions={"me": 2}, snapshot=mine)
    assert count(lake) == (1, 1)
    assert len(list(Path(lake.table_uri("feedback")).rglob("*.parquet"))) == 1


def test_a_commit_that_was_made_before_an_error_keeps_its_files(lake, monkeypatch):
    commit = DeltaTable.create_write_transaction

    def failing(*args, **kwargs) -> None:
        commit(*args, **kwargs)
        raise CommitFailedError("the checkpoint failed")

    rows = table_of("feedback", [thumb("a", 1)])
    with monkeypatch.context() as patch:
        patch.setattr(DeltaTable, "create_write_transaction", failing)
        with pytest.raises(LakeError, match="the commit was made"):
            lake.append("feedback", rows, transactions={"me": 1})
    assert count(lake) == (1, 1)
    assert lake.append("feedback", rows, transactions={"me": 1}) is None


@settings(max_examples=15, deadline=None)
@given(ids=st.lists(st.integers(0, 40), max_size=6, unique=True))
def test_a_search_by_ids_finds_their_rows_in_whatever_row_groups_they_are(ids, tmp_path_factory):
    lake = Lake(str(tmp_path_factory.mktemp("lake")), LakeConfig())
    lake.create()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_files, "_ROW_GROUP_ROWS", 4)
        for first in (0, 20):
            rows = [thumb(f"r{number:02}", 1) for number in range(first, first + 20)]
            rows[3]["rejected_response_id"] = "r40"
            put(lake, "feedback", rows)
    paths = [file.path for file in data_files.data_files(lake.table("feedback"))]
    wanted = [f"r{number:02}" for number in ids]
    keys = ("response_id", "rejected_response_id")
    found = lake.files("feedback").search("feedback", paths, ("value", *keys), keys, wanted)
    expected = [number for number in range(40) if number in ids or (40 in ids and number % 20 == 3)]
    assert found.column_names == ["value", *keys]
    assert sorted(found["response_id"].to_pylist()) == [f"r{number:02}" for number in expected]


def test_appends_under_different_ids_do_not_conflict(lake):
    mine, others = lake.table("feedback"), lake.table("feedback")
    lake.append("feedback", table_of("feedback", [thumb("a", 1)]), transactions={"a": 1}, snapshot=others)
    assert lake.append("feedback", table_of("feedback", [thumb("b", 1)]), transactions={"b": 1}, snapshot=mine) == 2
    assert count(lake) == (2, 2)


def test_a_failing_stream_leaves_no_file_and_no_commit(lake):
    schema = table_of("feedback", []).schema

    def batches():
        yield from table_of("feedback", [thumb("a", 1)]).to_batches()
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        lake.append("feedback", pa.RecordBatchReader.from_batches(schema, batches()))
    assert lake.versions()["feedback"] == 0
    assert list(Path(lake.table_uri("feedback")).rglob("*.parquet")) == []


def test_sealing_moves_every_row_once_and_repeating_it_does_nothing(folder, lake):
    fill(folder, [f"r{i}" for i in range(5)])
    assert count(lake, folder) == (5, 5)
    assert len(seal(lake, folder)) == 5
    assert lake.counts()["feedback"] == 5
    assert lake.versions()["feedback"] == 1, "segments of a table share a commit"
    assert list_segments(folder) == []
    assert seal(lake, folder) == []
    assert count(lake, folder) == (5, 5)


def test_a_seal_killed_before_the_files_are_removed_is_finished_without_doubling(folder, lake, monkeypatch):
    fill(folder, ["a", "b"])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", interrupt)
        with pytest.raises(KeyboardInterrupt):
            seal(lake, folder)
    assert len(list_segments(folder)) == 2
    assert lake.counts()["feedback"] == 2
    assert count(lake, folder) == (2, 2), "the view sees each row once between commit and removal"
    fill(folder, ["c"])
    assert len(seal(lake, folder)) == 3
    assert count(lake, folder) == (3, 3)


def test_a_seal_killed_before_the_commit_loses_nothing(folder, lake, monkeypatch):
    fill(folder, ["a", "b"])
    with monkeypatch.context() as patch:
        patch.setattr(DeltaTable, "create_write_transaction", interrupt)
        with pytest.raises(KeyboardInterrupt):
            seal(lake, folder)
    assert count(lake, folder) == (2, 2)
    seal(lake, folder)
    assert count(lake) == (2, 2)


def test_files_are_fsynced_before_the_commit_names_them_and_the_log_before_segments_go(folder, lake, monkeypatch):
    fill(folder, ["a"])
    steps: list[str] = []
    real_fsync, real_commit, real_unlink = os.fsync, DeltaTable.create_write_transaction, Path.unlink

    def fsync(fd: int) -> None:
        steps.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        real_fsync(fd)

    def commit(*args, **kwargs) -> None:
        steps.append("commit")
        real_commit(*args, **kwargs)

    def unlink(path: Path, **kwargs) -> None:
        steps.append("unlink")
        real_unlink(path, **kwargs)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(DeltaTable, "create_write_transaction", commit)
    monkeypatch.setattr(Path, "unlink", unlink)
    seal(lake, folder)
    committed, removed = steps.index("commit"), steps.index("unlink")
    before, between = steps[:committed], steps[committed:removed]
    assert any(step.endswith(".parquet") for step in before)
    assert {"fsync date=" + step[-10:] for step in before if "date=" in step} & set(before)
    assert f"fsync {1:020d}.json" in between
    assert "fsync _delta_log" in between


def test_two_sealers_at_once_seal_each_row_once(folder, lake):
    fill(folder, [f"r{i}" for i in range(30)])
    with ThreadPoolExecutor(4) as pool:
        sealed = list(pool.map(lambda _: seal(Lake(lake.uri, lake.config), folder), range(4)))
    assert sorted(len(names) for names in sealed) == [0, 0, 0, 30]
    assert count(lake, folder) == count(lake) == (30, 30)


def test_a_sealer_that_is_kept_waiting_too_long_says_so(folder, lake):
    fill(folder, ["a"])
    impatient = Lake(lake.uri, LakeConfig(lock_timeout_s=0.1))
    with locked(folder / ".seal.lock", 5), pytest.raises(LockTimeoutError, match=r"\.seal\.lock.*0\.1 s"):
        seal(impatient, folder)


def test_a_living_writers_open_segment_is_read_but_not_sealed(folder, lake, journal):
    append(journal, "feedback", thumb("a", 1))
    assert seal(lake, folder) == []
    assert count(lake, folder) == (1, 1)
    assert count(lake) == (0, 0)


def test_segments_behind_an_open_one_wait_for_it(folder, lake):
    fill(folder, ["a", "b", "c"])
    first, second, _ = list_segments(folder)
    os.rename(second.path, second.path.with_suffix(".open"))
    with locked(second.path.with_suffix(".open"), 5):  # as its living writer holds it
        assert seal(lake, folder) == [str(first.name)]
        assert count(lake, folder) == (3, 3)
    assert len(seal(lake, folder)) == 2
    assert count(lake, folder) == (3, 3)


def test_many_segments_are_sealed_in_bounded_commits(folder, lake):
    fill(folder, [f"r{i}" for i in range(6)])
    size = list_segments(folder)[0].path.stat().st_size
    seal(Lake(lake.uri, LakeConfig(seal_bytes=2 * size)), folder)
    assert lake.versions()["feedback"] == 3
    assert count(lake) == (6, 6)


def test_a_damaged_segment_gives_its_whole_rows_and_is_kept_aside(folder, lake, caplog):
    fill(folder, ["a", "b", "c"], segment_bytes=1 << 20)
    [segment] = list_segments(folder)
    data = bytearray(segment.path.read_bytes())
    data[data.index(b"b", len(data) // 2) - 1] ^= 0x40
    segment.path.write_bytes(bytes(data))
    with caplog.at_level(logging.ERROR):
        seal(lake, folder)
    found = count(lake)
    assert found[0] == found[1] == 2
    assert [path.name for path in (folder / "damaged").iterdir()] == [segment.path.name]
    assert "damaged" in caplog.text
    assert seal(lake, folder) == []


async def test_every_row_is_in_the_view_once_at_every_moment_of_a_seal(folder, lake):
    journal = Journal(folder, JournalConfig(segment_bytes=1, segment_seconds=60), "replica-0")
    journal.open()
    stop = threading.Event()

    def seal_again_and_again() -> None:
        while not stop.is_set():
            seal(lake, folder)

    sealing = asyncio.create_task(asyncio.to_thread(seal_again_and_again))
    try:
        for number in range(1, 41):
            await journal.append("feedback", thumb(f"r{number}", 1))
            if number % 2 == 0:
                assert await asyncio.to_thread(count, lake, folder) == (number, number)
    finally:
        stop.set()
        await asyncio.wait_for(sealing, 120)
        journal.close()
    seal(lake, folder)
    assert count(lake) == (40, 40)


def test_a_full_disk_keeps_rows_in_the_journal_until_there_is_room_in_the_lake(folder, small_disk):
    lake = Lake(str(small_disk / "lake"), LakeConfig())
    lake.create()
    journal = Journal(folder, JournalConfig(), "replica-0")
    journal.open()
    for number in range(200):
        append(journal, "interactions", interaction(f"r{number}", response=os.urandom(5000).hex()))
    journal.close()
    filler = small_disk / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 65536)
    before = len(list_segments(folder))
    with pytest.raises(OSError, match="No space left"):
        seal(lake, folder)
    assert len(list_segments(folder)) == before
    filler.unlink()
    seal(lake, folder)
    assert list_segments(folder) == []
    with lake.connect() as connection:
        found = connection.sql("SELECT count(*), count(DISTINCT response_id) FROM interactions").fetchall()
    assert found == [(200, 200)]
    assert not [path for path in (small_disk / "lake").rglob("*.parquet") if path.stat().st_size == 0]


def test_the_sealer_seals_in_the_background_and_once_more_at_the_end(folder, tmp_path):
    lake = Lake(str(tmp_path / "lake"), LakeConfig(seal_seconds=0.05))
    lake.create()
    journal = Journal(folder, JournalConfig(segment_bytes=1), "replica-0")
    journal.open()
    sealer = Sealer(lake, folder)
    assert not sealer.healthy
    sealer.start()
    append(journal, "feedback", thumb("a", 1))
    for _ in range(400):
        if lake.counts()["feedback"] and sealer.healthy:
            break
        threading.Event().wait(0.02)
    assert count(lake) == (1, 1)
    assert sealer.healthy
    append(journal, "feedback", thumb("b", 1))
    journal.close()
    sealer.close()
    assert count(lake) == (2, 2)
    assert sealer.sealed_segments == 2


def test_a_sealer_that_fails_says_so_keeps_trying_and_recovers(folder, tmp_path, caplog):
    lake = Lake(str(tmp_path / "lake"), LakeConfig(seal_seconds=0.02))
    fill(folder, ["a"])
    sealer = Sealer(lake, folder)
    sealer.start()
    for _ in range(400):
        if "no lake at" in (sealer.error or ""):
            break
        threading.Event().wait(0.02)
    assert not sealer.healthy
    assert "no lake at" in (sealer.error or "")
    assert "no lake at" in caplog.text
    lake.create()
    for _ in range(400):
        if sealer.healthy:
            break
        threading.Event().wait(0.02)
    assert sealer.healthy
    sealer.close()
    assert count(lake) == (1, 1)


def test_a_sealer_whose_process_is_killed_gets_another_that_goes_on(folder, tmp_path, caplog):
    lake = Lake(str(tmp_path / "lake"), LakeConfig(seal_seconds=0.05))
    lake.create()
    sealer = Sealer(lake, folder)
    sealer.start()
    first = sealer._child
    assert first is not None
    first.kill()
    fill(folder, ["a"])
    for _ in range(1000):
        if lake.counts()["feedback"]:
            break
        threading.Event().wait(0.02)
    assert count(lake) == (1, 1)
    assert "ended with code -9" in caplog.text
    sealer.close()
    assert first is not sealer._child


def test_a_sealer_that_can_not_be_started_again_at_once_is_started_later(folder, tmp_path, caplog, monkeypatch):
    lake = Lake(str(tmp_path / "lake"), LakeConfig(seal_seconds=0.05))
    lake.create()
    monkeypatch.setattr("feedback.ingest.sealer_process._RESTART_DELAY_S", 0.1)
    sealer = Sealer(lake, folder)
    sealer.start()
    with monkeypatch.context() as without:
        without.setattr("sys.executable", str(tmp_path / "no python"))
        sealer._child.kill()
        for _ in range(1000):
            if caplog.text.count("the sealer can't be started") > 1:
                break
            threading.Event().wait(0.02)
    fill(folder, ["a"])
    for _ in range(1000):
        if lake.counts()["feedback"]:
            break
        threading.Event().wait(0.02)
    sealer.close()
    assert count(lake) == (1, 1)
    assert caplog.text.count("the sealer can't be started") > 1


def test_a_sealer_ends_when_its_parent_is_killed(folder, lake):
    code = (
        "import sys, time; from pathlib import Path; from feedback.config import LakeConfig; "
        "from feedback.lake.tables import Lake; from feedback.ingest.sealer_process import Sealer\n"
        "sealer = Sealer(Lake(sys.argv[1], LakeConfig(seal_seconds=0.05)), Path(sys.argv[2])); sealer.start()\n"
        "print(sealer._child.pid, flush=True); time.sleep(60)"
    )
    folder.mkdir()
    parent = subprocess.Popen([sys.executable, "-c", code, lake.uri, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait(120)
    parent.stdout.close()
    for _ in range(1000):
        # A zombie has ended too: whoever inherited it may not have asked for it yet.
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        threading.Event().wait(0.02)
    raise AssertionError("the sealer lives on")


@pytest.mark.parametrize("remains", [b"", b'{"add":{"path":"date=2026', b"\x00" * 300])
def test_a_commit_torn_by_a_power_loss_is_put_aside_and_its_rows_are_sealed_again(folder, lake, remains):
    put(lake, "feedback", [thumb("kept", 1)])
    fill(folder, ["a"])
    [segment] = list_segments(folder)
    data = segment.path.read_bytes()
    seal(lake, folder)
    # Power fails before the log is on disk, so before the segment is removed.
    segment.path.write_bytes(data)
    (Path(lake.table_uri("feedback")) / "_delta_log" / f"{2:020d}.json").write_bytes(remains)
    again = Lake(lake.uri, lake.config)
    again.create()
    assert count(again, folder) == (2, 2)
    seal(again, folder)
    assert count(again) == (2, 2)


def test_a_checkpoint_torn_by_a_power_loss_is_put_aside(lake):
    for number in range(3):
        put(lake, "feedback", [thumb(f"r{number}", 1)])
    lake.table("feedback").create_checkpoint()
    log = Path(lake.table_uri("feedback")) / "_delta_log"
    [checkpoint] = log.glob("*.checkpoint.parquet")
    checkpoint.write_bytes(checkpoint.read_bytes()[:50])
    again = Lake(lake.uri, lake.config)
    again.create()
    assert count(again) == (3, 3)


@pytest.mark.parametrize("name", ["o'brien's", "a b", "[1]", "*", "ü"])
def test_a_path_may_have_any_characters(tmp_path, name):
    lake = Lake(str(tmp_path / name), LakeConfig())
    lake.create()
    put(lake, "feedback", [thumb("a", 1)])
    assert count(lake) == (1, 1)


def test_a_path_that_deltalake_would_misread_is_refused(tmp_path):
    with pytest.raises(LakeError, match="'%'"):
        Lake(str(tmp_path / "100%25"), LakeConfig())


def test_timestamps_come_back_as_the_same_moment(lake):
    put(lake, "interactions", [interaction("a")])
    with lake.connect() as connection:
        assert isinstance(connection, duckdb.DuckDBPyConnection)
        [[micros]] = connection.sql("SELECT epoch_us(created_at) FROM interactions").fetchall()
    assert micros == int(NOON.timestamp() * 1e6)


def test_the_object_store_path_writes_seals_and_reads_the_same(folder, tmp_path):
    """Over a local folder, but through deltalake's store and Arrow datasets, as for s3:// and the like."""
    (tmp_path / "store").mkdir()
    lake = Lake(str(tmp_path / "store"), LakeConfig())
    lake.local = False
    lake.create()
    fill(folder, ["a", "b"])
    assert len(seal(lake, folder)) == 2
    put(lake, "interactions", [interaction("a"), interaction("b")])
    assert count(lake, folder) == (2, 2)
    mine, others = lake.table("feedback"), lake.table("feedback")
    rows = table_of("feedback", [thumb("c", 1)])
    lake.append("feedback", rows, transactions={"me": 1}, snapshot=others)
    with pytest.raises(LakeConflictError):
        lake.append("feedback", rows, transactions={"me": 1}, snapshot=mine)
    assert count(lake) == (3, 3)
    assert score(lake, ScoringConfig()).scored == 2
    with lake.connect() as connection:
        [[reward, metadata]] = connection.sql(
            "SELECT reward, metadata['answer'] FROM current_rewards JOIN interactions USING (response_id) "
            "WHERE response_id = 'a'"
        ).fetchall()
    assert (reward, metadata) == (1.0, "four")


FILTERS = {
    "response_id = 'b'": ["b"],
    "tenant = 'default' AND status = 'complete'": ["a", "b", "c"],
    "user = 'ann'": ["a"],
    "user IS NULL": ["b", "c"],
    "user IS NOT NULL": ["a"],
    "session_id IS NULL": ["a", "b", "c"],
    "session_id = 's'": [],
    "created_at >= TIMESTAMPTZ '2026-03-01 12:00:00.000999+00'": ["c"],
    "created_at < TIMESTAMPTZ '2026-03-01 12:00:00.000001+00'": ["a", "b"],
    "created_at = TIMESTAMPTZ '2026-03-01 12:00:00.000999+00'": ["c"],
    "response > 'z' AND length(response) > 100": ["c"],
    "response = repeat('z', 200)": ["c"],
    "sampling.max_tokens = 8": ["a", "b", "c"],
    "date = DATE '2026-03-01'": ["a", "b", "c"],
    "finish_reason = 'length'": [],
}


@pytest.mark.parametrize("condition", FILTERS)
@pytest.mark.parametrize("through", ["views", "arrow"])
def test_a_files_statistics_never_hide_a_row_from_a_reader(lake, condition, through):
    """Also where a file has null columns, long texts and fractions of a millisecond."""
    rows = [
        interaction("a", user="ann"),
        interaction("b"),
        interaction("c", response="z" * 200, created_at=NOON + timedelta(microseconds=999)),
    ]
    put(lake, "interactions", rows)
    with lake.connect() as connection:
        view = "interactions"
        if through == "arrow":
            view = "dataset"
            connection.register("dataset", DeltaTable(lake.table_uri("interactions")).to_pyarrow_dataset())
        found = connection.sql(f"SELECT response_id FROM {view} WHERE {condition} ORDER BY response_id").fetchall()
    assert [row for [row] in found] == FILTERS[condition]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.5])
def test_numbers_that_json_has_not_cost_the_bounds_and_no_row(lake, value):
    put(lake, "feedback", [thumb("a", 1) | {"value": value}, thumb("b", 1) | {"value": None}])
    with lake.connect() as connection:
        connection.register("dataset", DeltaTable(lake.table_uri("feedback")).to_pyarrow_dataset())
        assert connection.sql("SELECT response_id FROM dataset WHERE value IS NOT NULL").fetchall() == [("a",)]
        assert connection.sql("SELECT response_id FROM dataset WHERE response_id = 'b'").fetchall() == [("b",)]
    assert lake.counts()["feedback"] == 2


text = st.text(st.sampled_from("a\U0010ffff\ud7ffé"), max_size=70)


@given(text, text)
def test_text_bounds_are_bounds(first, second):
    low, high = sorted([first, second], key=lambda value: value.encode())
    assert _lower(low).encode() <= low.encode()
    assert _upper(high).encode() >= high.encode()
    assert _lower(low).encode() <= second.encode() <= _upper(high).encode()
