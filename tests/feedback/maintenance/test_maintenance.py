from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from feedback_rows import NOON, append, interaction, put, table_of, thumb
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from feedback.config import JournalConfig, LakeConfig, ScoringConfig
from feedback.ingest.seal import seal
from feedback.journal.writer import Journal
from feedback.lake.data_files import TableFiles, data_files
from feedback.lake.tables import Lake, LakeConflictError
from feedback.maintenance.external_sort import sort_rows
from feedback.maintenance.maintain import ClockError, compact, maintain, retain, vacuum
from feedback.scoring.run import score
from tests.feedback.journal.test_power_loss import EVERY, needs_strace, power_losses

SMALL = 200_000  # bytes: a target that a test's few rows stay far below


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path / "lake"), LakeConfig(compact_target_bytes=SMALL, vacuum_hours=1, lock_timeout_s=60))
    made.create()
    return made


def rows(lake: Lake, table: str = "feedback") -> list[dict[str, object]]:
    with lake.connect() as connection:
        return connection.sql(f"SELECT * FROM {table} ORDER BY ALL").to_arrow_table().to_pylist()


def ids(lake: Lake, table: str = "feedback") -> list[str]:
    return sorted(str(row["response_id"]) for row in rows(lake, table))


def paths(lake: Lake, table: str = "feedback") -> list[str]:
    return [file.path for file in data_files(lake.table(table))]


def on_disk(lake: Lake, table: str = "feedback") -> set[str]:
    folder = Path(lake.table_uri(table))
    return {str(path.relative_to(folder)) for path in folder.rglob("part-*.parquet")}


def age(path: Path, hours: float) -> None:
    then = time.time() - hours * 3600
    os.utime(path, (then, then))


def interrupt(*_: object, **__: object) -> None:
    """Where a process is killed."""
    raise KeyboardInterrupt


def thumbs(*names: str) -> pa.Table:
    return table_of("feedback", [thumb(name, 1) for name in names])


# Replacing files


def test_files_are_replaced_in_one_commit_that_is_no_change_to_readers_of_changes(lake):
    put(lake, "feedback", [thumb("a", 1)])
    put(lake, "feedback", [thumb("b", 1)])
    before = lake.versions()["feedback"]
    lake.replace("feedback", paths(lake), thumbs("a", "b"))
    assert lake.versions()["feedback"] == before + 1
    assert ids(lake) == ["a", "b"]
    assert len(paths(lake)) == 1
    put(lake, "feedback", [thumb("c", 1)])
    changes = pa.table(lake.table("feedback").load_cdf(starting_version=before + 1).read_all())
    assert changes["response_id"].to_pylist() == ["c"]


def test_files_are_replaced_by_nothing(lake):
    put(lake, "feedback", [thumb("a", 1)])
    assert lake.replace("feedback", paths(lake)) == []
    assert ids(lake) == []


@pytest.mark.parametrize("appended", [0, 1, 3])
def test_of_two_that_replace_a_file_the_second_fails_and_leaves_nothing(lake, appended):
    put(lake, "feedback", [thumb("kept", 1)])
    put(lake, "feedback", [thumb("erased", 1)])
    stale = paths(lake)
    lake.replace("feedback", stale, thumbs("kept"))
    for number in range(appended):
        put(lake, "feedback", [thumb(f"new{number}", 1)])
    files = on_disk(lake)
    for again in (stale, stale[1:]):
        with pytest.raises(LakeConflictError, match="were replaced by another process"):
            lake.replace("feedback", again, thumbs("kept", "erased"))
    assert ids(lake) == ["kept", *(f"new{number}" for number in range(appended))]
    assert on_disk(lake) == files


@pytest.mark.parametrize("appended", [0, 1, 3])
def test_of_two_that_find_their_files_at_the_same_version_one_commits(lake, monkeypatch, appended):
    """As on an object store, where no lock keeps the two apart."""
    put(lake, "feedback", [thumb("kept", 1), thumb("erased", 1)])
    lake.local = False
    [path] = paths(lake)
    other = Lake(lake.uri, lake.config)
    look = lake.table
    looked = []

    def then_the_other_commits(*arguments: str) -> DeltaTable:
        snapshot = look(*arguments)
        if not looked:
            looked.append(snapshot)
            other.replace("feedback", [path], thumbs("kept"))
            for number in range(appended):
                put(other, "feedback", [thumb(f"new{number}", 1)])
        return snapshot

    monkeypatch.setattr(lake, "table", then_the_other_commits)
    with pytest.raises(LakeConflictError):
        lake.replace("feedback", [path], thumbs("kept", "erased"))
    assert ids(other) == ["kept", *(f"new{number}" for number in range(appended))]
    assert len(on_disk(lake)) == 2 + appended


def test_an_append_from_before_a_replacement_and_a_replacement_from_before_an_append_both_hold(lake):
    put(lake, "feedback", [thumb("a", 1)])
    stale, before = lake.table("feedback"), paths(lake)
    put(lake, "feedback", [thumb("b", 1)])
    lake.replace("feedback", before, thumbs("a"))
    lake.append("feedback", thumbs("c"), transactions={"me": 1}, snapshot=stale)
    assert ids(lake) == ["a", "b", "c"]


def test_a_replacement_whose_source_is_removed_while_it_is_read_conflicts(lake):
    put(lake, "feedback", [thumb("a", 1)])
    [path] = paths(lake)

    def reading():
        yield from lake.files("feedback").batches("feedback", "date=2026-01-01/gone.parquet")

    with pytest.raises(LakeConflictError, match="removed while it was read"):
        lake.replace("feedback", [path], pa.RecordBatchReader.from_batches(thumbs().schema, reading()))
    assert ids(lake) == ["a"]


# Compaction


def fill(lake: Lake) -> None:
    for day in range(2):
        for number in range(4):
            at = NOON + timedelta(days=day, seconds=number)
            names = [f"r{number}{day}{letter}" for letter in "ca"]
            put(lake, "interactions", [interaction(name, created_at=at, user=f"user-{number}") for name in names])
            put(lake, "feedback", [thumb(name, 1, created_at=at) for name in names])


def test_small_files_of_a_date_become_one_with_the_same_rows_sorted_and_a_second_run_does_nothing(lake):
    fill(lake)
    before = rows(lake, "interactions"), rows(lake)
    done = compact(lake)
    assert (rows(lake, "interactions"), rows(lake)) == before
    assert (done["interactions"].files_before, done["interactions"].files_after, done["interactions"].rows) == (
        8,
        2,
        16,
    )
    assert done["interactions"].bytes_after < done["interactions"].bytes_before
    assert done["rewards"].files_before == 0
    for path in paths(lake, "interactions"):
        stored = pq.read_table(Path(lake.table_uri("interactions")) / path, partitioning=None)
        assert stored["response_id"].to_pylist() == sorted(stored["response_id"].to_pylist())
        assert stored.schema.field("logprobs").type == pa.list_(pa.float32())
    versions = lake.versions()
    assert {result.files_before for result in compact(lake).values()} == {0}
    assert lake.versions() == versions


def test_compacted_files_have_bounds_by_which_readers_skip_them(lake):
    fill(lake)
    compact(lake)
    [first, _] = data_files(lake.table("interactions"), ["response_id", "user", "session_id"])
    assert first.bounds["response_id"] == ("r00a", "r30c")
    assert first.bounds["user"] == ("user-0", "user-3")
    assert first.empty == {"session_id"}
    assert lake.table("interactions").file_uris(file_pruning_predicate="response_id > 's'") == []


def test_compacted_rows_are_not_scored_again_and_unscored_ones_are_scored_once(lake):
    config = ScoringConfig()
    fill(lake)
    assert score(lake, config).scored == 16
    compact(lake)
    assert score(lake, config).scored == 0
    put(lake, "interactions", [interaction("new1")])
    put(lake, "interactions", [interaction("new2")])
    put(lake, "feedback", [thumb("r00a", 0)])
    compact(lake)
    assert score(lake, config).scored == 3
    compact(lake)
    assert score(lake, config).scored == 0
    assert len(ids(lake, "rewards")) == 19
    assert len(ids(lake, "current_rewards")) == 18


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8), target=st.integers(3_000, 60_000))
def test_whatever_the_files_are_no_row_is_lost_or_doubled_and_one_small_file_a_date_is_left(
    tmp_path_factory, sizes, target
):
    lake = Lake(str(tmp_path_factory.mktemp("lake")), LakeConfig(compact_target_bytes=target))
    lake.create()
    expected = []
    for number, size in enumerate(sizes):
        names = [f"{number}-{row}" for row in range(size)]
        expected += names
        put(lake, "feedback", [thumb(name, 1, created_at=NOON) for name in names])
    compact(lake)
    assert ids(lake) == sorted(expected)
    assert sum(file.size < target / 2 for file in data_files(lake.table("feedback"))) <= 1
    assert compact(lake)["feedback"].files_before == 0


@given(st.lists(st.lists(st.tuples(st.sampled_from("abcé"), st.integers(0, 3)), max_size=30), max_size=12))
def test_rows_are_sorted_by_their_keys_however_they_are_cut_into_batches(batches):
    schema = pa.schema([("key", pa.string()), ("number", pa.int64()), ("position", pa.int64())])
    positions = iter(range(1000))
    made = [[(key, number, next(positions)) for key, number in batch] for batch in batches]
    arrow = [pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in b], schema) for b in made]
    found = [tuple(row.values()) for batch in sort_rows(arrow, schema, ("key", "number")) for row in batch.to_pylist()]
    assert found == sorted(row for batch in made for row in batch)


@pytest.mark.parametrize("where", ["write", "commit", "durable"])
def test_a_compaction_that_is_killed_loses_nothing_and_is_done_by_the_next(lake, monkeypatch, where):
    fill(lake)
    before = rows(lake)
    target = {
        "write": ("feedback.lake.data_files._FileWriter.write", interrupt),
        "commit": ("deltalake.DeltaTable.create_write_transaction", interrupt),
        "durable": ("feedback.lake.tables.make_log_durable", interrupt),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(*target)
        with pytest.raises(KeyboardInterrupt):
            compact(lake)
    assert rows(lake) == before
    compact(lake)
    assert rows(lake) == before
    assert len(paths(lake)) == 2


def test_compaction_runs_beside_sealers_scorers_and_another_compaction(lake, folder):
    done = threading.Event()
    journal = Journal(folder, JournalConfig(segment_bytes=1), "replica-0")
    journal.open()

    def again_and_again(work) -> None:
        while not done.is_set():
            work()

    with ThreadPoolExecutor(4) as pool:
        others = [
            pool.submit(again_and_again, lambda: seal(Lake(lake.uri, lake.config), folder)),
            pool.submit(again_and_again, lambda: score(Lake(lake.uri, lake.config), ScoringConfig())),
            pool.submit(again_and_again, lambda: compact(Lake(lake.uri, lake.config))),
        ]
        try:
            for number in range(60):
                append(journal, "interactions", interaction(f"r{number:02}"))
                if number % 6 == 0:
                    compact(lake)
        finally:
            done.set()
            for other in others:
                other.result(60)
    journal.close()
    seal(lake, folder)
    score(lake, ScoringConfig())
    compact(lake)
    expected = [f"r{number:02}" for number in range(60)]
    assert ids(lake, "interactions") == expected
    assert ids(lake, "rewards") == expected


# Vacuum


def test_what_was_replaced_goes_when_it_is_old_and_old_versions_are_read_until_then(lake, monkeypatch):
    put(lake, "feedback", [thumb("a", 1)])
    put(lake, "feedback", [thumb("b", 1)])
    compact(lake)
    assert vacuum(lake)["feedback"].replaced == []
    with lake.connect(versions={"feedback": 2}) as connection:
        assert len(connection.sql("SELECT response_id FROM feedback").fetchall()) == 2
    put(lake, "feedback", [thumb("c", 1)])
    with monkeypatch.context() as patch:
        two_hours_ago = time.time_ns() - 2 * 3600 * 10**9
        patch.setattr("feedback.lake.tables.time.time_ns", lambda: two_hours_ago)
        compact(lake)
    dry = vacuum(lake, dry_run=True)["feedback"]
    assert (len(dry.replaced), len(on_disk(lake))) == (2, 5)
    assert dry.bytes > 0
    assert vacuum(lake)["feedback"].replaced == dry.replaced
    assert on_disk(lake).isdisjoint(dry.replaced)
    assert ids(lake) == ["a", "b", "c"]
    assert vacuum(lake)["feedback"].replaced == []


def test_a_file_that_a_killed_writer_left_goes_once_it_is_old(lake, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(DeltaTable, "create_write_transaction", interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(lake, "feedback", [thumb("a", 1)])
    [orphan] = on_disk(lake)
    for hours, gone in ((0, False), (lake.config.orphan_hours - 0.1, False), (lake.config.orphan_hours + 0.1, True)):
        age(Path(lake.table_uri("feedback")) / orphan, hours)
        assert vacuum(lake)["feedback"].orphans == ([orphan] if gone else [])
        assert (orphan in on_disk(lake)) is not gone


def test_a_sealer_that_is_about_to_commit_keeps_its_file(lake, folder, monkeypatch):
    journal = Journal(folder, JournalConfig(), "replica-0")
    journal.open()
    append(journal, "feedback", thumb("a", 1))
    journal.close()
    write = TableFiles.write

    def then_a_vacuum(*arguments: object) -> object:
        actions = write(*arguments)
        assert len(on_disk(lake)) == 1
        assert vacuum(Lake(lake.uri, LakeConfig(vacuum_hours=1, orphan_hours=1)))["feedback"].orphans == []
        return actions

    monkeypatch.setattr(TableFiles, "write", then_a_vacuum)
    seal(lake, folder)
    assert ids(lake) == ["a"]


def test_an_age_at_which_a_living_writers_file_is_an_orphan_is_refused():
    with pytest.raises(ValidationError, match=r"orphan_hours \(1\) must be longer than lock_timeout_s \(7200 s\)"):
        LakeConfig(orphan_hours=1, lock_timeout_s=7200)


def test_old_log_entries_and_what_was_put_aside_go_and_the_table_stays_what_it_is(lake):
    for number in range(5):
        put(lake, "feedback", [thumb(f"r{number}", 1)])
    folder = Path(lake.table_uri("feedback"))
    for name in ("_torn", "_change_data"):
        (folder / name).mkdir()
        (folder / name / "old.parquet").write_bytes(b"x")
        age(folder / name / "old.parquet", 30)
    (folder / "_delta_log" / "_commit_1.json.tmp").write_bytes(b"x")
    for path in (folder / "_delta_log").iterdir():
        age(path, 30)
    put(lake, "feedback", [thumb("last", 1)])
    before = rows(lake)
    done = vacuum(lake)["feedback"]
    assert len(done.log) >= 5
    assert done.orphans == ["_change_data/old.parquet", "_delta_log/_commit_1.json.tmp", "_torn/old.parquet"]
    left = [path.name for path in (folder / "_delta_log").iterdir()]
    assert sorted(name for name in left if name.endswith(".json")) == [f"{6:020d}.json"]
    assert rows(lake) == before
    put(lake, "feedback", [thumb("later", 1)])
    assert len(rows(lake)) == 7


def test_the_time_for_which_versions_are_kept_follows_the_config(lake):
    changed = Lake(lake.uri, LakeConfig(vacuum_hours=5))
    vacuum(changed)
    configuration = lake.table("feedback").metadata().configuration
    assert configuration["delta.logRetentionDuration"] == "interval 5 hours"
    assert configuration["delta.enableChangeDataFeed"] == "true"
    version = lake.versions()
    vacuum(changed)
    assert lake.versions() == version, "said once"


MAINTENANCE = """
from feedback.maintenance.erasure import Target, erase
from feedback.maintenance.maintain import maintain

async def main():
    for life in range(3):
        journal = Journal(home / "journal", JournalConfig(), "replica-0")
        journal.open()
        for n in (3 * life, 3 * life + 1):
            await journal.append("interactions", interaction(f"i{n}"))
            acknowledged(f"i{n}")
        await asyncio.to_thread(journal.close)
        seal(lake, home / "journal")
        maintain(lake)
        if life == 1:
            erase(lake, home / "journal", Target(user="nobody"))  # which removes at once all that was replaced

asyncio.run(main())
"""


@needs_strace
@pytest.mark.timeout(600)
def test_a_power_loss_behind_any_io_call_of_the_maintenance_loses_and_doubles_nothing(tmp_path):
    for case, _, acknowledged, found in power_losses(MAINTENANCE, tmp_path, EVERY**2):
        assert acknowledged - found.keys() == set(), f"lost {case}"
        assert max(found.values(), default=1) == 1, f"doubled {case}"
    assert len(acknowledged) == 6


# Retention


def test_dates_older_than_retain_days_are_dropped_from_all_tables_and_today_never(tmp_path):
    lake = Lake(str(tmp_path / "lake"), LakeConfig(retain_days=2))
    lake.create()
    today = datetime.now(UTC).replace(hour=0)
    for days in range(5):
        at = today - timedelta(days=days)
        put(lake, "interactions", [interaction(f"r{days}", created_at=at)])
        put(lake, "feedback", [thumb(f"r{days}", 1, created_at=at)])
    assert score(lake, ScoringConfig()).scored == 5
    dry = retain(lake, dry_run=True)
    assert [today.date() - day for day in dry.dates] == [timedelta(4), timedelta(3)]
    assert ids(lake) == ["r0", "r1", "r2", "r3", "r4"]
    assert retain(lake) == dry
    assert dry.rows == {"interactions": 2, "feedback": 2, "rewards": 0}
    assert dry.later == {"feedback": 0, "rewards": 2}, "rewards are of today, and go with what they are about"
    assert ids(lake) == ids(lake, "interactions") == ["r0", "r1", "r2"]
    assert ids(lake, "rewards") == ["r0", "r1", "r2"]
    assert retain(lake).dates == []
    assert score(lake, ScoringConfig()).scored == 0
    believing = Lake(lake.uri, lake.config.model_copy(update={"retain_gap_days": None}))
    later = retain(believing, today=today.date() + timedelta(days=30))
    assert later.rows == {"interactions": 3, "feedback": 3, "rewards": 3}


def test_feedback_of_any_date_goes_with_the_response_it_is_about_which_alone_names_its_user(tmp_path):
    lake = Lake(str(tmp_path / "lake"), LakeConfig(retain_days=2, retain_gap_days=None))
    lake.create()
    today = datetime.now(UTC)
    old = today - timedelta(days=5)
    put(lake, "interactions", [interaction("old", user="ada", created_at=old), interaction("new", created_at=today)])
    late = [thumb("old", 1, feedback_id="late", created_at=today), thumb("new", 1, feedback_id="n", created_at=today)]
    put(lake, "feedback", [thumb("old", 1, feedback_id="early", created_at=old), *late])
    assert score(lake, ScoringConfig()).scored == 2
    assert retain(lake, dry_run=True).later == {"feedback": 1, "rewards": 1}
    assert len(ids(lake)) == 3
    assert retain(lake).later == {"feedback": 1, "rewards": 1}
    assert (ids(lake, "interactions"), ids(lake), ids(lake, "rewards")) == (["new"], ["new"], ["new"])
    assert score(lake, ScoringConfig()).scored == 0
    assert maintain(lake).retained.later == {"feedback": 0, "rewards": 0}


def test_the_oldest_dates_are_dropped_until_the_rest_fits_and_today_never(lake):
    days = [date(2026, 3, 1) + timedelta(days=number) for number in range(4)]
    for day in days:
        at = datetime(day.year, day.month, day.day, 3, tzinfo=UTC)
        put(lake, "interactions", [interaction(f"r{day}", created_at=at)])
        put(lake, "feedback", [thumb(f"r{day}", 1, created_at=at)])
    total = sum(file.size for table in ("interactions", "feedback") for file in data_files(lake.table(table)))
    limited = Lake(lake.uri, LakeConfig(retain_bytes=int(total * 0.6)))
    assert retain(limited, today=days[-1]).dates == days[:2]
    assert retain(limited, today=days[-1]).dates == []
    tiny = Lake(lake.uri, LakeConfig(retain_bytes=1))
    assert retain(tiny, today=days[-1]).dates == days[2:3]
    assert ids(lake) == ids(lake, "interactions") == [f"r{days[-1]}"]


def test_without_a_policy_everything_is_kept(lake):
    fill(lake)
    assert retain(lake).dates == []


def test_a_retention_that_is_killed_between_tables_is_finished_by_the_next(lake, monkeypatch):
    fill(lake)
    old = Lake(lake.uri, LakeConfig(retain_days=1, retain_gap_days=None))
    replace = Lake.replace

    def once(self: Lake, table: str, *arguments: object, **named: object) -> object:
        if table == "interactions":
            raise KeyboardInterrupt
        return replace(self, table, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Lake, "replace", once)
        with pytest.raises(KeyboardInterrupt):
            retain(old)
    assert (len(ids(lake, "interactions")), ids(lake)) == (16, [])
    retain(old)
    assert ids(lake, "interactions") == []


def test_a_retention_that_is_killed_goes_on_though_what_is_left_fits_by_then(lake, monkeypatch):
    old, today = datetime.now(UTC) - timedelta(days=3), datetime.now(UTC)
    for name, at in (("old", old), ("new", today)):
        put(lake, "interactions", [interaction(name, created_at=at)])
        put(lake, "feedback", [thumb(name, 1, created_at=at)])
    size = sum(file.size for table in ("interactions", "feedback") for file in data_files(lake.table(table)))
    limited = Lake(lake.uri, LakeConfig(retain_bytes=size - 1))
    replace = Lake.replace

    def once(self: Lake, table: str, *arguments: object, **named: object) -> object:
        if table == "interactions":
            raise KeyboardInterrupt
        return replace(self, table, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Lake, "replace", once)
        with pytest.raises(KeyboardInterrupt):
            retain(limited)
    assert (ids(lake, "interactions"), ids(lake)) == (["new", "old"], ["new"])
    assert retain(limited).dates == [old.date()]
    assert (ids(lake, "interactions"), ids(lake)) == (["new"], ["new"])
    assert retain(limited).dates == []


def a_month_of_rows(lake: Lake, *, also: timedelta | None = None) -> datetime:
    """A few rows on each day until today, and one on a later one."""
    today = datetime.now(UTC)
    for days in range(0, 30, 5):
        put(lake, "interactions", [interaction(f"r{days}", created_at=today - timedelta(days=days))])
    if also is not None:
        put(lake, "interactions", [interaction("ahead", created_at=today + also)])
    return today


@pytest.mark.parametrize("traffic", [False, True], ids=["no traffic meanwhile", "traffic meanwhile"])
def test_retention_drops_nothing_by_a_clock_that_is_far_ahead_of_the_rows_unless_it_is_allowed_to(tmp_path, traffic):
    lake = Lake(str(tmp_path / "lake"), LakeConfig(retain_days=30))
    lake.create()
    ahead = timedelta(days=40)
    today = a_month_of_rows(lake, also=ahead if traffic else None).date()
    before = ids(lake, "interactions")
    with pytest.raises(ClockError, match=rf"clock says {today + ahead}.* are of {today}, 40 days back.*days null"):
        retain(lake, today=today + ahead)
    assert ids(lake, "interactions") == before
    told_to = Lake(lake.uri, lake.config.model_copy(update={"retain_gap_days": None}))
    assert retain(told_to, today=today + ahead).rows["interactions"] == 6


def test_retention_goes_on_by_itself_when_rows_of_later_days_bear_the_clock_out(tmp_path):
    lake = Lake(str(tmp_path / "lake"), LakeConfig(retain_days=30))
    lake.create()
    now = a_month_of_rows(lake, also=timedelta(days=40))
    with pytest.raises(ClockError):
        retain(lake, today=now.date() + timedelta(days=41))
    assert retain(lake, today=now.date() + timedelta(days=42)).rows["interactions"] == 6


def test_a_day_without_rows_and_a_short_retention_are_no_jump_of_the_clock(tmp_path):
    lake = Lake(str(tmp_path / "lake"), LakeConfig(retain_days=1))
    lake.create()
    now = datetime.now(UTC)
    for days in (2, 3):
        put(lake, "interactions", [interaction(f"r{days}", created_at=now - timedelta(days=days))])
    assert retain(lake).rows["interactions"] == 2


def test_a_maintenance_that_does_not_believe_the_clock_compacts_and_says_so(tmp_path, monkeypatch):
    config = LakeConfig(retain_days=30, vacuum_hours=1)
    lake = Lake(str(tmp_path / "lake"), config)
    lake.create()
    for name in "ab":
        put(lake, "interactions", [interaction(name, created_at=datetime.now(UTC) - timedelta(days=40))])
    with pytest.raises(ClockError):
        maintain(lake)
    assert ids(lake, "interactions") == ["a", "b"]
    assert len(paths(lake, "interactions")) == 1


def test_a_file_is_kept_while_its_writer_lives_however_old_the_clock_makes_it(lake, monkeypatch):
    write = TableFiles.write

    def then_a_vacuum(*arguments: object) -> object:
        actions = write(*arguments)
        [unnamed] = on_disk(lake)
        age(Path(lake.table_uri("feedback")) / unnamed, 40 * 24)
        assert vacuum(Lake(lake.uri, lake.config))["feedback"].orphans == []
        return actions

    with monkeypatch.context() as patch:
        patch.setattr(TableFiles, "write", then_a_vacuum)
        put(lake, "feedback", [thumb("a", 1)])
    assert ids(lake) == ["a"]


def test_maintenance_does_all_of_it_and_then_nothing(lake):
    fill(lake)
    keeping = Lake(lake.uri, LakeConfig(retain_days=10_000, compact_target_bytes=SMALL))
    done = maintain(keeping)
    assert done.compacted["interactions"].files_before == 8
    assert done.retained.dates == []
    version = lake.versions()
    assert {result.files_before for result in maintain(keeping).compacted.values()} == {0}
    assert lake.versions() == version
