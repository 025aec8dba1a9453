from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest
from feedback_rows import append, interaction, rows, thumb

from feedback.config import JournalConfig
from feedback.journal import session
from feedback.journal.codec import RowError
from feedback.journal.recovery import recover
from feedback.journal.segment import list_segments
from feedback.journal.writer import Journal, JournalBroken, JournalError, JournalFull

REAL_FDATASYNC = os.fdatasync


@pytest.fixture
def disk(monkeypatch):
    """A disk whose fdatasync can be held, counted and made to fail."""

    class Disk:
        def __init__(self) -> None:
            self.free = threading.Event()
            self.free.set()
            self.syncs = 0
            self.held = 0
            self.error: OSError | None = None

        def fdatasync(self, fd: int) -> None:
            self.held += not self.free.is_set()
            assert self.free.wait(120)
            self.syncs += 1
            if self.error is not None:
                raise self.error
            REAL_FDATASYNC(fd)

    made = Disk()
    monkeypatch.setattr("feedback.journal.session.os.fdatasync", made.fdatasync)
    yield made
    made.free.set()


def opened(folder: Path, **config: float) -> Journal:
    journal = Journal(folder, JournalConfig(**({"segment_seconds": 60} | config)), "replica-0")
    journal.open()
    return journal


async def until(condition) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_row_is_acknowledged_only_after_the_disk_has_it(folder, disk, journal):
    await journal.append("feedback", thumb("first", 1))
    disk.free.clear()
    task = asyncio.create_task(journal.append("feedback", thumb("a", 1)))
    await asyncio.sleep(0.05)
    assert not task.done()
    disk.free.set()
    await asyncio.wait_for(task, 120)
    assert rows(folder, "feedback").column("response_id").to_pylist() == ["first", "a"]


def test_a_segment_with_what_people_wrote_is_its_owners_alone_open_and_closed(folder):
    journal = opened(folder)
    append(journal, "interactions", interaction("a"))
    open_ = {path.stat().st_mode & 0o777 for path in folder.glob("interactions*")}
    journal.close()
    assert open_ == {path.stat().st_mode & 0o777 for path in folder.glob("interactions*")} == {0o600}


async def test_all_that_wait_share_one_fdatasync_and_the_loop_is_never_blocked(folder, disk, journal):
    await journal.append("feedback", thumb("first", 1))
    disk.free.clear()
    held = asyncio.create_task(journal.append("feedback", thumb("held", 1)))
    await until(lambda: disk.held)
    tasks = [asyncio.create_task(journal.append("feedback", thumb(f"r{i}", 1))) for i in range(200)]
    await until(lambda: journal.stats()["queued_rows"] == 200)
    before = disk.syncs
    disk.free.set()
    await asyncio.wait_for(asyncio.gather(held, *tasks), 120)
    assert disk.syncs - before == 2
    assert rows(folder, "feedback").num_rows == 202


async def test_tables_are_kept_apart_and_in_order(folder, journal):
    for number in range(5):
        await journal.append("interactions", interaction(f"r{number}"))
        await journal.append("feedback", thumb(f"r{number}", 1))
    assert rows(folder, "interactions").column("response_id").to_pylist() == [f"r{i}" for i in range(5)]
    assert rows(folder, "feedback").column("response_id").to_pylist() == [f"r{i}" for i in range(5)]


def test_many_event_loops_and_threads_may_append_at_once(folder, journal):
    def loop(name: str) -> None:
        async def main() -> None:
            await asyncio.gather(*(journal.append("feedback", thumb(f"{name}-{i}", 1)) for i in range(50)))

        asyncio.run(main())

    def plain(name: str) -> None:
        for i in range(20):
            append(journal, "feedback", thumb(f"{name}-{i}", 1))

    threads = [threading.Thread(target=loop, args=(f"loop{i}",)) for i in range(3)]
    threads += [threading.Thread(target=plain, args=(f"plain{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    found = rows(folder, "feedback").column("response_id").to_pylist()
    assert len(found) == len(set(found)) == 210


@pytest.mark.parametrize(
    ("table", "row", "says"),
    [
        ("salads", {}, "no table 'salads'"),
        ("feedback", thumb("a", 1, colour="red"), "unknown column 'colour'"),
        ("feedback", thumb("a", 1, tenant=None), "'tenant' is required"),
        ("feedback", thumb("a", 1, created_at=datetime(2026, 1, 1)), "time zone"),
        ("feedback", thumb("a", 1, text="\ud800"), "column 'text'"),
        ("feedback", thumb("a", 1) | {"value": "much"}, "column 'value'"),
        ("interactions", interaction("a", prompt_token_ids=[1 << 40]), "column 'prompt_token_ids'"),
        ("interactions", interaction("a", metadata={"k": 1}), "column 'metadata'"),
    ],
)
async def test_a_row_that_does_not_fit_is_refused_and_its_neighbours_are_kept(folder, journal, table, row, says):
    results = await asyncio.gather(
        journal.append("feedback", thumb("before", 1)),
        journal.append(table, row),
        journal.append("feedback", thumb("after", 1)),
        return_exceptions=True,
    )
    assert isinstance(results[1], RowError)
    assert says in str(results[1])
    assert results[0] is results[2] is None
    assert rows(folder, "feedback").column("response_id").to_pylist() == ["before", "after"]
    assert journal.healthy


async def test_past_the_bound_callers_wait_are_refused_with_a_time_and_leave_no_row(folder, disk):
    journal = opened(folder, max_queued_rows=2, append_timeout_s=0.2)
    await journal.append("feedback", thumb("first", 1))
    disk.free.clear()
    held = asyncio.create_task(journal.append("feedback", thumb("held", 1)))
    await until(lambda: disk.held)
    queued = [asyncio.create_task(journal.append("feedback", thumb(f"queued{i}", 1))) for i in range(2)]
    await until(lambda: journal.stats()["queued_rows"] == 2)
    with pytest.raises(JournalFull) as refusal:
        await journal.append("feedback", thumb("refused", 1))
    assert refusal.value.retry_after == pytest.approx(0.2)
    with pytest.raises(JournalFull):
        await asyncio.to_thread(append, journal, "feedback", thumb("refused-too", 1))
    assert journal.stats()["waiting_rows"] == 0
    late = asyncio.create_task(journal.append("feedback", thumb("late", 1)))
    await until(lambda: journal.stats()["waiting_rows"] == 1)
    disk.free.set()
    await asyncio.wait_for(asyncio.gather(held, late, *queued), 120)
    journal.close()
    found = rows(folder, "feedback").column("response_id").to_pylist()
    assert found == ["first", "held", "queued0", "queued1", "late"]


async def test_rows_that_come_together_are_recorded_together_or_not_at_all(folder, disk):
    journal = opened(folder, max_queued_rows=4, append_timeout_s=0.2)
    await journal.append("interactions", *(interaction(f"together{i}") for i in range(3)))
    assert journal.stats()["rows"] == 3
    assert journal.stats()["commits"] == 1
    disk.free.clear()
    held = asyncio.create_task(journal.append("interactions", interaction("held")))
    await until(lambda: disk.held)
    queued = asyncio.create_task(journal.append("interactions", *(interaction(f"queued{i}") for i in range(3))))
    last = asyncio.create_task(journal.append("interactions", *(interaction(f"last{i}") for i in range(3))))
    await until(lambda: journal.stats()["queued_rows"] == 6)
    assert journal.backlog == 1.5
    with pytest.raises(JournalFull):
        await journal.append("interactions", *(interaction(f"refused{i}") for i in range(3)))
    assert journal.stats()["refused"] == 3
    disk.free.set()
    await asyncio.wait_for(asyncio.gather(held, queued, last), 120)
    await journal.append("interactions")
    journal.close()
    assert rows(folder, "interactions").column("response_id").to_pylist() == [
        *("together0", "together1", "together2", "held"),
        *("queued0", "queued1", "queued2", "last0", "last1", "last2"),
    ]


async def test_sessions_of_a_disk_that_fails_again_and_again_are_let_go_and_their_counts_kept(folder, disk):
    journal = opened(folder, probe_seconds=0.01)
    for number in range(5):
        await journal.append("feedback", thumb(f"kept{number}", 1))
        before = journal.stats()["bytes"]
        disk.error = OSError(errno.EIO, "the disk is gone")
        with pytest.raises(JournalBroken):
            await journal.append("feedback", thumb(f"refused{number}", 1))
        disk.error = None
        await until(lambda number=number: journal.stats()["failures"] == number + 1 and journal.healthy)
        assert journal.stats()["bytes"] >= before
    assert not journal._ended_sessions
    journal.close()
    assert rows(folder, "feedback").column("response_id").to_pylist() == [f"kept{i}" for i in range(5)]


async def test_a_failed_fsync_is_final_and_what_was_refused_is_not_recorded(folder, disk):
    journal = opened(folder, probe_seconds=60)
    await journal.append("feedback", thumb("kept", 1))
    await journal.append("interactions", interaction("kept"))
    disk.error = OSError(errno.EIO, "the disk is gone")
    with pytest.raises(JournalBroken, match="the disk is gone"):
        await journal.append("feedback", thumb("refused", 1))
    disk.error = None
    await until(lambda: not journal.healthy)
    with pytest.raises(JournalBroken, match="the disk is gone"):
        await journal.append("feedback", thumb("refused-later", 1))
    with pytest.raises(JournalBroken):
        await asyncio.to_thread(append, journal, "feedback", thumb("refused-later", 1))
    journal.close()

    again = opened(folder)
    await again.append("feedback", thumb("afterwards", 1))
    assert again.healthy
    again.close()
    assert rows(folder, "feedback").column("response_id").to_pylist() == ["kept", "afterwards"]
    assert rows(folder, "interactions").num_rows == 1


async def test_after_a_failed_fsync_nothing_is_acknowledged_until_the_disk_is_proven(folder, disk, monkeypatch):
    real, proofs = os.fsync, []

    def fsync(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if "proof" in name:
            proofs.append(name)
            if disk.error is not None:
                raise disk.error
        real(fd)

    monkeypatch.setattr("feedback.files.os.fsync", fsync)
    journal = opened(folder, probe_seconds=0.05)
    await journal.append("feedback", thumb("kept", 1))
    disk.error = OSError(errno.EIO, "the disk is gone")
    with pytest.raises(JournalBroken, match="the disk is gone"):
        await journal.append("feedback", thumb("refused", 1))
    await until(lambda: len(proofs) >= 2)
    assert not journal.healthy
    with pytest.raises(JournalBroken, match="the disk is gone"):
        await journal.append("feedback", thumb("refused-later", 1))
    disk.error = None
    await until(lambda: journal.healthy)
    await journal.append("feedback", thumb("afterwards", 1))
    assert journal.stats()["failures"] == 1
    journal.close()
    assert rows(folder, "feedback").column("response_id").to_pylist() == ["kept", "afterwards"]
    assert len({segment.name.incarnation for segment in list_segments(folder)}) == 2, (
        "the old segment got no further row"
    )
    assert not list(folder.glob(".*proof*"))


async def test_rows_that_a_failing_disk_keeps_from_being_cut_are_not_sealed_before_they_are_cut(
    folder, disk, monkeypatch
):
    journal = opened(folder, probe_seconds=0.05)
    await journal.append("feedback", thumb("kept", 1))

    def failing(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "no way")

    with monkeypatch.context() as patch:
        patch.setattr("feedback.journal.session.os.ftruncate", failing)
        disk.error = OSError(errno.EIO, "the disk is gone")
        with pytest.raises(JournalBroken, match="the disk is gone"):
            await journal.append("feedback", thumb("refused", 1))
        disk.error = None
        await asyncio.sleep(0.3)
        assert not journal.healthy
        assert recover(folder) == [], "it is locked still"
    await until(lambda: journal.healthy)
    journal.close()
    assert len(recover(folder)) == 1
    assert rows(folder, "feedback").column("response_id").to_pylist() == ["kept"]


async def test_a_disk_that_is_really_full_refuses_and_recovers_when_there_is_room(small_disk):
    folder = small_disk / "journal"
    journal = opened(folder, probe_seconds=0.05, segment_seconds=0.2)
    kept = []

    async def write(rows: int) -> None:
        for _ in range(rows):
            await journal.append("interactions", interaction(f"r{len(kept)}", response="x" * 10_000))
            kept.append(f"r{len(kept)}")

    await write(100)
    filler = small_disk / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 65536)
    with pytest.raises(JournalBroken, match="No space left"):
        await write(10_000)
    with pytest.raises(JournalBroken, match="No space left"):
        await journal.append("interactions", interaction("refused"))
    assert not journal.healthy
    filler.unlink()
    await until(lambda: journal.healthy)
    await journal.append("interactions", interaction("afterwards"))
    await asyncio.to_thread(journal.close)
    recover(folder)
    assert rows(folder, "interactions").column("response_id").to_pylist() == [*kept, "afterwards"]


async def test_a_full_disk_refuses_and_keeps_what_is_there(folder, monkeypatch):
    journal = opened(folder, probe_seconds=60)
    await journal.append("feedback", thumb("kept", 1))
    real = os.write

    def full(fd: int, data) -> int:
        if len(data) > 100:
            return real(fd, data[:100])  # a short write, and then no more
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("feedback.files.os.write", full)
    with pytest.raises(JournalBroken, match="no space left"):
        await journal.append("feedback", thumb("refused", 1))
    monkeypatch.undo()
    journal.close()
    assert rows(folder, "feedback").column("response_id").to_pylist() == ["kept"]


async def test_a_disk_that_hangs_is_reported_and_forgiven_once_it_answers(folder, disk):
    journal = opened(folder, commit_timeout_s=0.2)
    await journal.append("feedback", thumb("first", 1))
    disk.free.clear()
    with pytest.raises(JournalBroken, match=r"no commit within 0\.2 s; the row may or may not be recorded"):
        await journal.append("feedback", thumb("unknown", 1))
    with pytest.raises(JournalBroken, match="the row is not recorded"):
        await journal.append("feedback", thumb("withdrawn", 1))
    assert not journal.healthy
    disk.free.set()
    await until(lambda: journal.stats()["commits"] >= 2)
    await journal.append("feedback", thumb("afterwards", 1))
    assert journal.healthy
    journal.close()
    assert rows(folder, "feedback").column("response_id").to_pylist() == ["first", "unknown", "afterwards"]


async def test_a_disk_that_hangs_while_a_segment_is_replaced_is_forgiven_without_a_further_row(folder, disk):
    journal = opened(folder, commit_timeout_s=0.2, segment_seconds=0.05)
    await journal.append("feedback", thumb("first", 1))
    disk.free.clear()
    await until(lambda: disk.held)
    with pytest.raises(JournalBroken, match="the row is not recorded"):
        await journal.append("feedback", thumb("withdrawn", 1))
    assert not journal.healthy
    disk.free.set()
    await until(lambda: journal.healthy)
    await journal.append("feedback", thumb("afterwards", 1))
    journal.close()
    assert rows(folder, "feedback").column("response_id").to_pylist() == ["first", "afterwards"]


async def test_a_cancelled_caller_harms_no_other(folder, disk, journal):
    await journal.append("feedback", thumb("first", 1))
    disk.free.clear()
    gone = asyncio.create_task(journal.append("feedback", thumb("gone", 1)))
    stays = asyncio.create_task(journal.append("feedback", thumb("stays", 1)))
    await asyncio.sleep(0.02)
    gone.cancel()
    disk.free.set()
    await asyncio.wait_for(stays, 120)
    assert "stays" in rows(folder, "feedback").column("response_id").to_pylist()
    assert journal.healthy


async def test_segments_close_by_size(folder):
    journal = opened(folder, segment_bytes=10_000)
    for number in range(40):
        await journal.append("feedback", thumb(f"r{number}", 1))
    closed = [segment for segment in list_segments(folder) if not segment.is_open]
    assert len(closed) >= 2
    journal.close()
    assert rows(folder, "feedback").column("response_id").to_pylist() == [f"r{i}" for i in range(40)]


async def test_segments_close_by_age_without_further_traffic(folder):
    journal = opened(folder, segment_seconds=0.1)
    await journal.append("feedback", thumb("a", 1))
    await until(lambda: [segment.is_open for segment in list_segments(folder)] == [False])
    assert rows(folder, "feedback").num_rows == 1
    journal.close()


async def test_closing_writes_what_is_queued_and_later_rows_are_refused(folder):
    journal = opened(folder)
    tasks = [asyncio.create_task(journal.append("feedback", thumb(f"r{i}", 1))) for i in range(20)]
    await asyncio.sleep(0)
    await asyncio.to_thread(journal.close)
    await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert rows(folder, "feedback").num_rows == 20
    assert all(not segment.is_open for segment in list_segments(folder))
    assert not journal.healthy
    with pytest.raises(JournalBroken, match="not open"):
        await journal.append("feedback", thumb("late", 1))
    journal.close()


async def test_a_journal_that_is_not_open_refuses(folder):
    journal = Journal(folder, JournalConfig(), "replica-0")
    assert not journal.healthy
    with pytest.raises(JournalBroken, match="not open"):
        await journal.append("feedback", thumb("a", 1))


def test_opening_twice_is_an_error(journal):
    with pytest.raises(JournalError, match="open already"):
        journal.open()


def test_two_writers_share_a_folder(folder, journal):
    other = Journal(folder, JournalConfig(), "replica-1")
    other.open()
    append(journal, "feedback", thumb("a", 1))
    append(other, "feedback", thumb("b", 1))
    other.close()
    assert sorted(rows(folder, "feedback").column("response_id").to_pylist()) == ["a", "b"]


def test_a_forked_child_does_not_keep_the_segments_locked(folder):
    journal = opened(folder)
    append(journal, "feedback", thumb("a", 1))
    [segment] = list_segments(folder)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        held = any(os.path.realpath(f"/proc/self/fd/{fd}") == str(segment.path) for fd in os.listdir("/proc/self/fd"))
        os.write(write_end, b"held" if held else b"free")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 4) == b"free"
    os.close(read_end)
    os.close(write_end)
    journal.close()


async def test_rows_that_are_more_than_one_message_holds_become_several(folder, monkeypatch):
    convert = session.convert

    def of_few(table, rows):
        if len(rows) > 3:
            raise pa.ArrowCapacityError("array cannot contain more than 2147483646 bytes")
        return convert(table, rows)

    monkeypatch.setattr(session, "convert", of_few)
    journal = opened(folder)
    bad = thumb("bad", 1) | {"value": "much"}
    given = [*(thumb(f"r{i}", 1) for i in range(9)), bad, *(thumb(f"s{i}", 1) for i in range(9))]
    results = await asyncio.gather(*(journal.append("feedback", row) for row in given), return_exceptions=True)
    assert [type(result) for result in results if result is not None] == [RowError]
    assert isinstance(results[9], RowError)
    journal.close()
    kept = [row["response_id"] for row in given if row is not bad]
    assert rows(folder, "feedback").column("response_id").to_pylist() == kept


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_journal_whose_thread_has_ended_says_so_and_a_closed_one_has_not(folder, monkeypatch):
    journal = opened(folder)
    await journal.append("feedback", thumb("kept", 1))
    assert not journal.ended

    def broken(*_, **__):
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(session.WriterSession, "close_segments", broken)
        await asyncio.gather(journal.append("feedback", thumb("lost", 1)), return_exceptions=True)
        await until(lambda: journal.ended)
    closed = opened(folder)
    closed.close()
    assert not closed.ended
