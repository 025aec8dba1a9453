from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from feedback_rows import append, put, rows, thumb

from feedback.config import JournalConfig, LakeConfig
from feedback.ingest.id_index import take_in
from feedback.ingest.idempotency import SeenFeedback, SeenFeedbackError
from feedback.ingest.seal import seal
from feedback.journal.writer import Journal, JournalBroken, JournalUnsure
from feedback.lake.tables import Lake
from feedback.maintenance.erasure import Target, erase, finish_erasures
from feedback.maintenance.maintain import retain


def body(value: float = 1.0, feedback_id: str = "f1", source: str = "user"):
    return thumb("r1", value, feedback_id=feedback_id, source=source)


@pytest.fixture
def quick_lake(lake: Lake) -> Lake:
    return Lake(lake.uri, LakeConfig(seal_seconds=0.02, lock_timeout_s=60))


@pytest.fixture
def opened(quick_lake: Lake, folder: Path) -> Iterator[Callable[[], SeenFeedback]]:
    """Opens a ledger over the lake and the journal's folder, as a start of a server does."""
    ledgers: list[SeenFeedback] = []

    def make() -> SeenFeedback:
        ledgers.append(SeenFeedback(quick_lake, folder))
        ledgers[-1].open()
        return ledgers[-1]

    yield make
    for ledger in ledgers:
        ledger.close()


def the_index(folder: Path) -> Path:
    (path,) = (folder / "ids").glob("*.db")
    return path


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


async def record_and_seal(ledger: SeenFeedback, folder: Path, lake: Lake) -> None:
    """Have feedback of eve come, and go into the lake."""
    journal = Journal(folder, JournalConfig(), "replica-0")
    journal.open()
    assert await ledger.record(body(source="eve"), journal) == "new"
    journal.close()
    seal(lake, folder)


async def until_checked(ledger: SeenFeedback, row: dict[str, Any], verdict: str) -> None:
    async with asyncio.timeout(120):
        while await ledger.check(row) != verdict:
            await asyncio.sleep(0.01)


async def until_compared(ledger: SeenFeedback, row: dict[str, Any], verdict: str) -> None:
    async with asyncio.timeout(120):
        while await ledger.compare(row) != verdict:
            await asyncio.sleep(0.01)


async def test_the_same_again_is_recorded_once_and_other_content_is_a_conflict(folder, journal, opened):
    ledger = opened()
    assert await ledger.record(body(), journal) == "new"
    assert await ledger.record(body(), journal) == "same"
    assert await ledger.record(body(0.0), journal) == "conflict"
    assert await ledger.record(body(source="somebody-else"), journal) == "conflict"
    assert rows(folder, "feedback").num_rows == ledger.stats()["unsealed"] == 1


async def test_each_tenant_has_ids_of_its_own(folder, journal, opened):
    ledger = opened()
    assert await ledger.record(body(), journal) == "new"
    assert await ledger.record(body(0.0) | {"tenant": "other"}, journal) == "new"
    assert await ledger.record(body(0.0) | {"tenant": "other"}, journal) == "same"
    assert rows(folder, "feedback").num_rows == 2


async def test_many_at_once_with_one_id_record_one_row(folder, journal, opened):
    ledger = opened()
    verdicts = await asyncio.gather(*(ledger.record(body(float(i % 2)), journal) for i in range(20)))
    assert sorted(verdicts) == ["conflict"] * 10 + ["new"] + ["same"] * 9
    assert rows(folder, "feedback").num_rows == 1


async def test_a_start_knows_what_lake_and_journal_hold(lake, journal, opened):
    put(lake, "feedback", [body(feedback_id="sealed")])
    append(journal, "feedback", body(feedback_id="unsealed"))
    ledger = opened()
    for known in ("sealed", "unsealed"):
        assert await ledger.check(body(feedback_id=known)) == "same"
        assert await ledger.check(body(0.0, feedback_id=known)) == "conflict"
    assert await ledger.check(body(feedback_id="other")) == "new"


async def test_what_has_been_sealed_is_known_still_and_no_longer_kept_aside(folder, lake, opened):
    ledger = opened()
    journal = Journal(folder, JournalConfig(), "replica-0")
    journal.open()
    assert {await ledger.record(body(feedback_id=f"f{i}"), journal) for i in range(500)} == {"new"}
    journal.close()
    follower = asyncio.create_task(ledger.follow())
    seal(lake, folder)
    await until(lambda: ledger.stats()["unsealed"] == 0)
    follower.cancel()
    assert set(await ledger.check_all([body(feedback_id=f"f{i}") for i in range(500)])) == {"same"}
    assert await ledger.check(body(0.0, feedback_id="f7")) == "conflict"


async def test_what_another_replica_sealed_becomes_known_at_this_ones_next_seal(folder, lake, opened):
    ledger = opened()
    put(lake, "feedback", [body(feedback_id="theirs")])
    assert await ledger.check(body(feedback_id="theirs")) == "new"
    seal(lake, folder)  # there is nothing to seal
    assert await ledger.check(body(feedback_id="theirs")) == "same"
    assert await ledger.check(body(0.0, feedback_id="theirs")) == "conflict"


async def test_a_damaged_index_refuses_feedback_until_it_is_built_anew(folder, lake, journal, opened):
    put(lake, "feedback", [body(feedback_id=f"f{i}") for i in range(2000)])
    ledger = opened()
    with the_index(folder).open("r+b") as index:
        index.seek(4096)
        index.write(b"\xff" * (1 << 20))
    with pytest.raises(SeenFeedbackError, match=r"compared with what is recorded.*malformed"):
        await ledger.record(body(feedback_id="f0"), journal)
    assert rows(folder, "feedback").num_rows == 0
    assert ledger.stats()["healthy"] == 0
    follower = asyncio.create_task(ledger.follow())
    await until(lambda: ledger.stats()["healthy"] == 1)
    follower.cancel()
    assert set(await ledger.check_all([body(feedback_id=f"f{i}") for i in range(2000)])) == {"same"}


async def test_an_index_that_somebody_removed_is_built_anew(folder, lake, opened):
    put(lake, "feedback", [body()])
    ledger = opened()
    shutil.rmtree(folder / "ids")
    follower = asyncio.create_task(ledger.follow())
    await until(lambda: (folder / "ids").exists() and ledger.stats()["healthy"] == 1)
    follower.cancel()
    assert await ledger.check(body()) == "same"


async def test_seen_feedback_goes_over_to_an_index_that_another_process_built(folder, lake, opened):
    ledger = opened()
    put(lake, "feedback", [body()])
    take_in(lake, folder, rebuild=True)
    follower = asyncio.create_task(ledger.follow())
    await until_checked(ledger, body(), "same")
    follower.cancel()


async def test_ids_beyond_the_cache_are_kept_on_disk_and_found(journal, opened):
    ledger = opened()
    for i in range(150_000):  # 6 MB, the cache is 4
        key = i.to_bytes(16, "big")
        ledger._remember(key, key)
    assert ledger._recorded((149_999).to_bytes(16, "big")) == (149_999).to_bytes(16, "big")
    assert ledger.stats()["unsealed"] == 150_000
    assert await ledger.record(body(), journal) == "new"


async def test_an_append_that_fails_leaves_the_id_free_and_the_waiting_ones_try_again(folder, opened):
    ledger = opened()
    closed = Journal(folder, JournalConfig(), "replica-0")
    results = await asyncio.gather(*(ledger.record(body(), closed) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(result, JournalBroken) for result in results)
    assert await ledger.check(body()) == "new"
    closed.open()
    assert await ledger.record(body(), closed) == "new"
    closed.close()


async def test_a_caller_that_goes_away_does_not_block_the_id(folder, journal, opened):
    ledger = opened()
    gone = asyncio.create_task(ledger.record(body(), journal))
    while not ledger.stats()["pending"]:  # until it appends
        await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    async with asyncio.timeout(120):
        assert await ledger.record(body(), journal) == "same"
    assert rows(folder, "feedback").num_rows == 1


async def test_a_recorded_id_that_cannot_be_remembered_is_reported_and_is_in_the_lake_once(folder, lake, opened):
    ledger = opened()
    ledger._unsealed.execute("DROP TABLE ids")
    journal = Journal(folder, JournalConfig(), "replica-0")
    journal.open()
    for _ in range(2):
        assert await ledger.record(body(), journal, generated_id=True) == "new"
    journal.close()
    assert ledger.stats()["healthy"] == 0
    with pytest.raises(SeenFeedbackError, match="no such table"):
        await ledger.check(body())
    seal(lake, folder)
    assert lake.counts()["feedback"] == 1


async def test_feedback_that_was_erased_before_it_was_sealed_is_new_when_it_is_sent_again(folder, lake, opened):
    journal = Journal(folder, JournalConfig(segment_seconds=0.05), "replica-0")
    journal.open()
    ledger = opened()
    following = asyncio.create_task(ledger.follow())
    try:
        assert await ledger.record(body(feedback_id="gone", source="eve"), journal) == "new"
        assert await ledger.record(body(feedback_id="kept", source="bob"), journal) == "new"
        erased = await asyncio.to_thread(erase, lake, folder, Target(user="eve"))
        assert erased.rows["feedback"] == 1
        await until_checked(ledger, body(feedback_id="gone", source="eve"), "new")
        assert await ledger.check(body(feedback_id="kept", source="bob")) == "same"
        assert await ledger.record(body(feedback_id="gone", source="eve"), journal) == "new"
    finally:
        following.cancel()
        await asyncio.to_thread(journal.close)
    seal(lake, folder)
    with lake.connect() as connection:
        found = connection.sql("SELECT feedback_id FROM feedback ORDER BY ALL").fetchall()
    assert found == [("gone",), ("kept",)]


def gone_by(how: str, lake: Lake, elsewhere: Path) -> None:
    """Feedback of eve leaves the lake, by what another machine does."""
    if how == "erasure":
        erase(lake, elsewhere, Target(user="eve"))
    elif how == "killed erasure":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("feedback.maintenance.erasure._purge_all", interrupt)
            with pytest.raises(KeyboardInterrupt):
                erase(lake, elsewhere, Target(user="eve"))
    elif how == "retention":
        old = lake.config.model_copy(update={"retain_days": 1, "retain_gap_days": None})
        assert retain(Lake(lake.uri, old), today=date(2030, 1, 1)).rows["feedback"] == 1
    else:
        lake.table("feedback").delete("feedback_id = 'f1'")


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["erasure", "killed erasure", "retention", "another tool"])
@pytest.mark.parametrize("restarted", [False, True])
async def test_feedback_that_left_the_lake_elsewhere_is_recorded_when_it_is_sent_again(
    folder, tmp_path, lake, opened, how, restarted
):
    ledger = opened()
    journal = Journal(folder, JournalConfig(segment_seconds=0.05), "replica-0")
    journal.open()
    assert await ledger.record(body(source="eve"), journal) == "new"
    journal.close()
    seal(lake, folder)
    assert await ledger.check(body(source="eve")) == "same"
    await asyncio.to_thread(gone_by, how, lake, tmp_path / "another machine's journal")
    seal(lake, folder)  # this machine's sealer turns on
    if restarted:
        ledger = opened()
    following = asyncio.create_task(ledger.follow())
    await until_checked(ledger, body(source="eve"), "new")
    again = Journal(folder, JournalConfig(), "replica-0")
    again.open()
    assert await ledger.record(body(source="eve"), again) == "new"
    following.cancel()
    again.close()
    seal(lake, folder)
    assert lake.counts()["feedback"] == 1


@pytest.mark.parametrize("how", ["erasure", "retention"])
@pytest.mark.parametrize("where", ["lake", "journal"])
async def test_feedback_is_never_known_from_the_moment_at_which_it_is_gone(folder, tmp_path, lake, opened, how, where):
    ledger = opened()  # it does not follow the lake, as between two turns
    journal = Journal(folder, JournalConfig(segment_seconds=0.05), "replica-0")
    journal.open()
    assert await ledger.record(body(source="eve"), journal) == "new"
    if where == "lake" or how == "retention":
        await asyncio.to_thread(journal.close)
        seal(lake, folder)
        gone_by(how, lake, tmp_path / "elsewhere")
        journal = Journal(folder, JournalConfig(), "replica-0")
        journal.open()
    else:
        await asyncio.to_thread(erase, lake, folder, Target(user="eve"))
    assert await ledger.record(body(source="eve"), journal) == "new"
    assert await ledger.record(body(source="eve"), journal) == "same"
    journal.close()
    seal(lake, folder)
    assert lake.counts()["feedback"] == 1


async def test_feedback_recorded_while_two_repeats_of_erased_feedback_wait_stays_known(
    folder, tmp_path, lake, opened, monkeypatch
):
    journal = Journal(folder, JournalConfig(), "replica-0")
    journal.open()
    ledger = opened()
    for name in ("f1", "f2"):
        assert await ledger.record(body(feedback_id=name, source="eve"), journal) == "new"
    journal.close()
    seal(lake, folder)
    journal = Journal(folder, JournalConfig(segment_seconds=600), "replica-0")
    journal.open()
    ledger = opened()
    gone_by("erasure", lake, tmp_path / "elsewhere")
    numbers, reached, free = itertools.count(1), threading.Event(), threading.Event()

    def held_up(*given: Any, **named: Any) -> int:
        if next(numbers) == 3:  # both have found that feedback has left, and the first has looked through the journal
            reached.set()
            assert free.wait(120)
        return take_in(*given, **named)

    monkeypatch.setattr("feedback.ingest.idempotency.take_in", held_up)
    one = asyncio.create_task(ledger.record(body(feedback_id="f1", source="eve"), journal))
    two = asyncio.create_task(ledger.record(body(feedback_id="f2", source="eve"), journal))
    assert await asyncio.to_thread(reached.wait, 20)
    assert await ledger.record(body(feedback_id="b1", source="bob"), journal) == "new"
    free.set()
    assert await asyncio.gather(one, two) == ["new", "new"]
    assert await ledger.record(body(0.0, feedback_id="b1", source="bob"), journal) == "conflict"
    journal.close()


async def test_feedback_that_an_unfinished_erasure_means_is_not_acknowledged_as_known_and_is_new_behind_it(
    folder, tmp_path, lake, opened, monkeypatch
):
    put(lake, "feedback", [body(source="eve"), body(feedback_id="b1", source="bob")])
    with monkeypatch.context() as patch:
        patch.setattr("feedback.maintenance.erasure._drain", interrupt)
        with pytest.raises(KeyboardInterrupt):
            erase(lake, tmp_path / "elsewhere", Target(user="eve"))
    journal = Journal(folder, JournalConfig(), "replica-0")
    journal.open()
    ledger = opened()
    with pytest.raises(SeenFeedbackError, match=r"'f1' is known, but an erasure.*lake maintain"):
        await ledger.record(body(source="eve"), journal)
    assert await ledger.record(body(feedback_id="b1", source="bob"), journal) == "same"
    assert finish_erasures(lake, folder)["feedback"] == 1
    assert await ledger.record(body(source="eve"), journal) == "new"
    assert await ledger.record(body(source="eve"), journal) == "same"
    journal.close()
    seal(lake, folder)
    assert finish_erasures(lake, folder)["feedback"] == 0
    assert lake.counts()["feedback"] == 2


async def test_feedback_that_was_sealed_and_left_the_lake_before_the_index_knew_it_is_new_when_it_is_sent_again(
    folder, tmp_path, lake, opened, monkeypatch
):
    ledger = opened()
    journal = Journal(folder, JournalConfig(), "replica-0")
    journal.open()
    assert await ledger.record(body(source="eve"), journal) == "new"
    journal.close()
    with monkeypatch.context() as patch:
        patch.setattr("feedback.ingest.seal.take_in_if_used", interrupt)
        with pytest.raises(KeyboardInterrupt):
            seal(lake, folder)
    gone_by("retention", lake, tmp_path / "elsewhere")
    following = asyncio.create_task(ledger.follow())
    seal(lake, folder)
    await until_checked(ledger, body(source="eve"), "new")
    following.cancel()


def test_the_index_holds_hashes_only(folder, lake, opened):
    put(lake, "feedback", [body(feedback_id="a-secret-id", source="a-secret-name")])
    opened()
    with sqlite3.connect(the_index(folder)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert b"secret" not in the_index(folder).read_bytes()


async def test_what_a_hanging_disk_may_have_recorded_is_not_acknowledged_with_another_content(
    folder, opened, quick_lake, monkeypatch
):
    free, sync = threading.Event(), os.fdatasync

    def fdatasync(file: int) -> None:
        assert free.wait(120)
        sync(file)

    free.set()
    ledger = opened()
    journal = Journal(folder, JournalConfig(folder=str(folder), commit_timeout_s=0.2), "r")
    journal.open()
    assert await ledger.record(body(feedback_id="before"), journal) == "new"
    monkeypatch.setattr("feedback.journal.session.os.fdatasync", fdatasync)
    free.clear()
    with pytest.raises(JournalUnsure, match="may or may not be recorded"):
        await ledger.record(body(), journal)
    with pytest.raises(SeenFeedbackError, match="'f1' may be recorded with another content, as the disk hung"):
        await ledger.record(body(0.0), journal)
    free.set()
    await until(lambda: journal.healthy)
    with pytest.raises(SeenFeedbackError, match="'f1' may be recorded"):
        await ledger.record(body(0.0), journal)
    assert await ledger.record(body(), journal) == "new"
    assert await ledger.record(body(), journal) == "same"
    assert await ledger.record(body(0.0), journal) == "conflict"
    journal.close()
    seal(quick_lake, folder)
    kept = quick_lake.read(lambda lake: lake.execute("SELECT feedback_id, value FROM feedback ORDER BY 1").fetchall())
    assert kept == [("before", 1.0), ("f1", 1.0)]


class Held:
    """Keeps the thread that reads an index at its first look-up, before or behind it, until it is let go."""

    def __init__(self, ledger: SeenFeedback, *, behind: bool = False) -> None:
        self.reached, self.free = asyncio.Event(), threading.Event()
        index, loop = ledger._sealed, asyncio.get_running_loop()
        get, waits = index.get, [True]

        def held(key: bytes) -> bytes | None:
            found = get(key) if behind else None
            if waits:
                loop.call_soon_threadsafe(self.reached.set)
                assert self.free.wait(120)
                waits.clear()
            return found if behind else get(key)

        index.get = held  # type: ignore[method-assign]

    def let_go(self) -> None:
        self.free.set()


async def test_a_disk_that_hangs_holds_up_look_ups_alone_and_each_of_them_for_a_limited_time(
    folder, journal, opened, monkeypatch
):
    monkeypatch.setattr("feedback.ingest.idempotency._READ_S", 0.2)
    ledger = opened()
    assert await ledger.record(body(), journal) == "new"
    disk = Held(ledger)
    try:
        for why in (r"was not read within 0\.2 s", r"a reading has not ended in time"):
            with pytest.raises(SeenFeedbackError, match=why):
                await ledger.record(body(), journal)
        for _ in range(100):
            with pytest.raises(SeenFeedbackError):
                await ledger.check(body())
        assert ledger._index.readings == 1  # nothing piles up
        assert ledger.stats()["healthy"] == 0
        assert await ledger.record(body(feedback_id="f2"), journal, generated_id=True) == "new"
    finally:
        disk.let_go()
    await until(lambda: not ledger._index.readings)
    assert await ledger.record(body(), journal) == "same"
    assert await ledger.record(body(0.0), journal) == "conflict"
    assert rows(folder, "feedback").num_rows == 2


async def test_a_ledger_on_a_disk_that_hangs_closes_and_leaves_the_process_to_end_without_it(folder, monkeypatch, lake):
    reasons: list[str] = []
    monkeypatch.setattr("feedback.ingest.disk_thread.skip_teardown", reasons.append)
    monkeypatch.setattr("feedback.ingest.idempotency._CLOSE_S", 0.2)
    ledger = SeenFeedback(lake, folder)
    ledger.open()
    disk = Held(ledger)
    waiting = asyncio.create_task(ledger.check(body()))
    await disk.reached.wait()
    queued = asyncio.create_task(ledger.check(body()))
    await asyncio.sleep(0)
    ledger.close()
    ledger.close()
    assert reasons == ["the index of feedback ids is still read"]
    with pytest.raises(SeenFeedbackError, match="the server ends"):
        await ledger.check(body())
    disk.let_go()
    for asked in (waiting, queued):  # answered somehow, and neither cancelled nor left waiting
        with pytest.raises(SeenFeedbackError):
            await asyncio.wait_for(asked, 20)


async def test_an_id_that_is_recorded_while_it_is_looked_up_is_recorded_once(folder, journal, opened):
    ledger = opened()
    slow = Held(ledger, behind=True)
    looked_up = [asyncio.create_task(ledger.record(body(value), journal)) for value in (1.0, 0.0)]
    await slow.reached.wait()
    assert await ledger.record(body(), journal, generated_id=True) == "new"
    slow.let_go()
    assert await asyncio.gather(*looked_up) == ["same", "conflict"]
    assert rows(folder, "feedback").num_rows == 1


async def test_an_id_that_is_sealed_and_forgotten_while_it_is_looked_up_is_known(folder, lake, opened, monkeypatch):
    ledger = opened()
    journal = Journal(folder, JournalConfig(), "replica-0")
    journal.open()
    read, looks = ledger._read, 0

    async def read_and_fall_behind(work: Any) -> Any:
        nonlocal looks
        looks += 1
        found, behind = await read(work), looks == 1
        if behind:
            assert await ledger.record(body(), journal, generated_id=True) == "new"
            await asyncio.to_thread(journal.close)
            await asyncio.to_thread(seal, lake, folder)
            await ledger._forget_sealed()
            assert ledger.stats()["unsealed"] == 0
        return found

    monkeypatch.setattr(ledger, "_read", read_and_fall_behind)
    assert await ledger.check_all([body(), body(0.0), body(feedback_id="f2"), body()]) == [
        "same",
        "conflict",
        "new",
        "same",
    ]


@pytest.mark.parametrize("value", [1.0, 0.0])
async def test_feedback_that_leaves_the_lake_and_the_index_while_it_is_looked_up_is_new(
    folder, tmp_path, lake, opened, value
):
    put(lake, "feedback", [body(source="eve")])
    ledger = opened()
    journal = Journal(folder, JournalConfig(), "replica-0")
    journal.open()
    slow = Held(ledger, behind=True)
    recording = asyncio.create_task(ledger.record(body(value, source="eve"), journal))
    await slow.reached.wait()
    await asyncio.to_thread(gone_by, "retention", lake, tmp_path / "elsewhere")
    await asyncio.to_thread(seal, lake, folder)
    following = asyncio.create_task(ledger.follow())  # it opens the index that was built anew, behind the look-up
    await until(lambda: ledger._index.readings > 1)
    slow.let_go()
    assert await recording == "new"
    following.cancel()
    journal.close()
    seal(lake, folder)
    assert lake.counts()["feedback"] == 1


async def test_feedback_is_not_known_while_what_left_the_lake_is_being_forgotten(folder, tmp_path, lake, opened):
    ledger = opened()
    await record_and_seal(ledger, folder, lake)
    gone_by("retention", lake, tmp_path / "elsewhere")
    seal(lake, folder)
    reached, free, in_journal = threading.Event(), threading.Event(), ledger._in_journal

    def slow() -> dict[bytes, bytes]:
        reached.set()
        assert free.wait(120)
        return in_journal()

    ledger._in_journal = slow  # it has opened the index that was built anew, and not forgotten by it
    following = asyncio.create_task(ledger.follow())
    assert await asyncio.to_thread(reached.wait, 120)
    again = Journal(folder, JournalConfig(), "replica-0")
    again.open()
    recording = asyncio.create_task(ledger.record(body(source="eve"), again))
    await asyncio.sleep(0.2)
    free.set()
    assert await recording == "new"
    following.cancel()
    again.close()
    seal(lake, folder)
    assert lake.counts()["feedback"] == 1


async def test_what_leaves_the_lake_while_something_else_is_forgotten_is_forgotten_behind_it(
    folder, tmp_path, lake, opened, monkeypatch
):
    ledger = opened()
    await record_and_seal(ledger, folder, lake)
    gone_by("retention", lake, tmp_path / "elsewhere")
    seal(lake, folder)
    again = Journal(folder, JournalConfig(), "replica-0")
    again.open()
    assert await ledger.record(body(feedback_id="f2", source="eve"), again, generated_id=True) == "new"
    reached, free, forget = asyncio.Event(), asyncio.Event(), ledger._forget

    async def slow(*which: Any, before_turn: int) -> bytes | None:
        reached.set()
        await free.wait()
        return await forget(*which, before_turn=before_turn)

    monkeypatch.setattr(ledger, "_forget", slow)
    asking = asyncio.create_task(ledger.compare(body(source="eve")))
    await reached.wait()
    await asyncio.to_thread(again.close)
    await asyncio.to_thread(seal, lake, folder)
    await asyncio.to_thread(gone_by, "retention", lake, tmp_path / "elsewhere")
    await asyncio.to_thread(seal, lake, folder)
    following = asyncio.create_task(ledger.follow())
    await asyncio.sleep(0.2)
    free.set()
    assert await asking == "new"
    await until_compared(ledger, body(feedback_id="f2", source="eve"), "new")
    following.cancel()
    assert ledger.stats()["unsealed"] == 0


async def test_an_index_that_was_opened_too_late_for_who_asked_is_not_taken_for_one_that_was_forgotten_by(
    folder, tmp_path, lake, opened, monkeypatch
):
    ledger = opened()
    await record_and_seal(ledger, folder, lake)
    gone_by("retention", lake, tmp_path / "elsewhere")
    reopen, free = ledger._sealed.reopen, threading.Event()

    def slow() -> None:
        assert free.wait(120)
        reopen()

    with monkeypatch.context() as patch:
        patch.setattr("feedback.ingest.idempotency._READ_S", 0.2)
        patch.setattr(ledger._sealed, "reopen", slow)
        with pytest.raises(SeenFeedbackError, match=r"not read within 0\.2 s"):
            await ledger.compare(body(source="eve"))
        free.set()
        await until(lambda: not ledger._index.readings)
    assert await ledger.compare(body(source="eve")) == "new"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_what_is_sealed_and_leaves_while_the_lake_is_looked_at_is_forgotten_the_next_time(
    folder, tmp_path, lake, opened, when
):
    ledger = opened()
    await record_and_seal(ledger, folder, lake)
    journal = Journal(folder, JournalConfig(), "replica-0")
    journal.open()
    other = body(feedback_id="f2", source="eve")
    if when == "before":
        assert await ledger.record(other, journal) == "new"
    gone_by("retention", lake, tmp_path / "elsewhere")
    reached, free, in_journal = threading.Event(), threading.Event(), ledger._in_journal

    def slow() -> dict[bytes, bytes]:
        found = in_journal()
        reached.set()
        assert free.wait(120)
        return found

    ledger._in_journal = slow
    take_in(lake, folder)
    following = asyncio.create_task(ledger.follow())
    assert await asyncio.to_thread(reached.wait, 120)
    if when == "meanwhile":
        assert await ledger.record(other, journal) == "new"
    ledger._in_journal = in_journal
    journal.close()
    await asyncio.to_thread(seal, lake, folder)
    await asyncio.to_thread(gone_by, "retention", lake, tmp_path / "elsewhere")
    free.set()
    seal(lake, folder)
    await until_compared(ledger, other, "new")
    following.cancel()
    assert ledger.stats()["unsealed"] == 0


async def test_a_segment_that_a_killed_sealer_left_behind_holds_nothing_that_has_left_the_lake(
    folder, tmp_path, lake, opened
):
    ledger = opened()
    journal = Journal(folder, JournalConfig(), "replica-0")
    journal.open()
    assert await ledger.record(body(source="eve"), journal) == "new"
    journal.close()
    (segment,) = folder.glob("*feedback*")
    content = segment.read_bytes()
    seal(lake, folder)
    segment.write_bytes(content)  # as if the sealer had been killed between its commit and this
    gone_by("retention", lake, tmp_path / "elsewhere")
    ledger = opened()
    again = Journal(folder, JournalConfig(), "replica-0")
    again.open()
    assert await ledger.record(body(source="eve"), again) == "new"
    assert await ledger.record(body(source="eve"), again) == "same"
    again.close()
    seal(lake, folder)
    assert lake.counts()["feedback"] == 1


async def test_a_lake_that_hangs_holds_up_repeats_alone_and_each_of_them_for_a_limited_time(
    folder, tmp_path, opened, monkeypatch, quick_lake
):
    quick_lake.config = quick_lake.config.model_copy(update={"lock_timeout_s": 0.5})
    ledger = opened()
    journal = Journal(folder, JournalConfig(), "replica-0")
    journal.open()
    assert await ledger.record(body(), journal) == "new"
    free = threading.Event()

    def hung(*_: Any) -> frozenset[str]:
        assert free.wait(120)
        return frozenset()

    with monkeypatch.context() as patch:
        patch.setattr("feedback.ingest.idempotency.registered", hung)
        repeats = [asyncio.create_task(ledger.record(body(), journal)) for _ in range(50)]
        await asyncio.sleep(0.1)
        await asyncio.wait_for(asyncio.to_thread(int), 5)  # whatever else needs a thread has one
        assert await ledger.record(body(feedback_id="f2"), journal) == "new"
        refused = await asyncio.wait_for(asyncio.gather(*repeats, return_exceptions=True), 20)
        assert {type(error) for error in refused} == {SeenFeedbackError}
        free.set()
        await until(lambda: not ledger._tables.readings)
    assert await ledger.record(body(), journal) == "same"
    journal.close()


async def test_a_slow_disk_ends_a_forgetting_and_other_look_ups_wait_for_a_moment_of_it(
    folder, lake, opened, monkeypatch
):
    monkeypatch.setattr("feedback.ingest.idempotency._READ_S", 1.0)
    ledger = opened()
    journal = Journal(folder, JournalConfig(), "replica-0")
    journal.open()
    count = 400
    for i in range(count):
        await ledger.record(body(feedback_id=f"f{i}"), journal, generated_id=True)
    journal.close()
    seal(lake, folder)
    get = ledger._sealed.get

    def slow(key: bytes) -> bytes | None:
        threading.Event().wait(0.008)  # 200 of these are more than a look-up may take
        return get(key)

    monkeypatch.setattr(ledger._sealed, "get", slow)
    following = asyncio.create_task(ledger.follow())
    asked = 0
    async with asyncio.timeout(120):
        while ledger.stats()["unsealed"]:
            assert await ledger.check(body(feedback_id="f0")) == "same"
            assert await ledger.check(body(feedback_id="other")) == "new"
            asked += 1
    following.cancel()
    assert asked > 1
    assert ledger.error is None
