"""Responses that go out while they are made: whatever happens to them, the lake has one row, with the right end."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from feedback_rows import interaction, rows, thumb
from hypothesis import given, settings
from hypothesis import strategies as st

from feedback.config import JournalConfig, LakeConfig
from feedback.ingest.seal import seal
from feedback.journal.codec import RowError
from feedback.journal.segment import list_segments
from feedback.journal.session import WriterSession
from feedback.journal.streams import Stream
from feedback.journal.writer import Journal, JournalBroken, JournalFull
from feedback.lake.tables import Lake
from tests.paths import ROOT

REAL_FDATASYNC = os.fdatasync


def opened(folder: Path, **config: float) -> Journal:
    journal = Journal(folder, JournalConfig(**({"segment_seconds": 60} | config)), "replica-0")
    journal.open()
    return journal


def tokens(name: str, number: int, **columns: Any) -> dict[str, Any]:
    """An interaction with ``number`` tokens."""
    return interaction(
        name,
        response="x" * number,
        response_token_ids=[7] * number,
        logprobs=[-0.5] * number,
        policy_spans=[{"start": 0, "policy_version": 1}] if number else [],
        **columns,
    )


def in_lake(lake: Lake) -> dict[str, tuple[str, str, int]]:
    """Response id -> (status, finish reason, tokens); fails if one is there twice."""
    with lake.connect() as connection:
        found = connection.sql(
            "SELECT response_id, status, finish_reason, len(response_token_ids) FROM interactions"
        ).fetchall()
    assert len({row[0] for row in found}) == len(found)
    return {row[0]: row[1:] for row in found}


async def until(condition) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_stream_that_ends_is_one_complete_row_and_its_start_is_durable_before_it(folder, lake):
    journal = opened(folder)
    stream = await journal.begin(tokens("a", 0), lambda: tokens("a", 1))
    assert rows(folder, "interactions").column("status").to_pylist() == ["started"]
    await journal.append("interactions", interaction("plain"))
    await journal.end(stream, tokens("a", 5))
    journal.close()
    seal(lake, folder)
    assert in_lake(lake) == {"a": ("complete", "stop", 5), "plain": ("complete", "stop", 2)}


async def test_a_stream_that_its_client_left_is_aborted_with_the_tokens_so_far(folder, lake):
    journal = opened(folder)
    stream = await journal.begin(tokens("a", 0), lambda: tokens("a", 1))
    await journal.end(stream, tokens("a", 3, status="aborted", finish_reason="abort"))
    journal.close()
    seal(lake, folder)
    assert in_lake(lake) == {"a": ("aborted", "abort", 3)}


async def test_a_stream_outlives_many_segments_and_the_seals_of_all_of_them(folder, lake):
    journal = opened(folder, segment_seconds=0.05)
    made = 0
    stream = await journal.begin(tokens("a", 0), lambda: tokens("a", made))
    other = await journal.begin(tokens("b", 0), lambda: tokens("b", made))
    for number in range(5):
        made += 1
        before = journal.stats()["segments"]
        await journal.append("interactions", interaction(f"plain-{number}"))
        await until(lambda before=before: journal.stats()["segments"] > before)
        seal(lake, folder)
        assert "a" not in in_lake(lake)
    await journal.end(stream, tokens("a", 9))
    await asyncio.to_thread(journal.close)
    seal(lake, folder)
    found = in_lake(lake)
    assert len(found) == 7
    assert found["a"] == ("complete", "stop", 9)
    assert found["b"] == ("aborted", "abort", 5)
    assert other.lost is None


async def test_streams_that_are_larger_than_a_segment_are_not_repeated_at_each_commit(folder, lake):
    journal = opened(folder, segment_bytes=30_000)
    streams = [await journal.begin(tokens(f"s{i}", 400), lambda i=i: tokens(f"s{i}", 400)) for i in range(12)]
    before = journal.stats()["segments"]
    for number in range(20):
        await journal.append("interactions", interaction(f"plain-{number}", response="x" * 500))
    assert 1 <= journal.stats()["segments"] - before <= 5
    for stream in streams:
        await journal.end(stream, tokens(stream.response_id, 500))
    await asyncio.to_thread(journal.close)
    seal(lake, folder)
    assert {name: of for name, of in in_lake(lake).items() if name.startswith("s")} == {
        f"s{i}": ("complete", "stop", 500) for i in range(12)
    }
    assert len(in_lake(lake)) == 32


def test_streams_that_take_long_to_repeat_are_repeated_less_often(folder):
    def slow() -> dict[str, Any]:
        time.sleep(0.1)
        return tokens("a", 2)

    folder.mkdir()
    session = WriterSession(folder, JournalConfig(segment_seconds=0.05), "replica-0")
    row = tokens("a", 1) | {"status": "started"}
    session.write("interactions", [row])
    session.sync()
    session.streams["a"] = Stream("a", row, slow)
    time.sleep(0.06)
    session.close_segments(everything=False)
    assert session.closed_segments == 1
    assert 0.1 < session.seconds_to_rotation() <= 30
    session.close_segments(everything=True)
    assert session.closed_segments == 2


async def test_a_row_that_does_not_belong_to_the_stream_can_t_end_it(folder):
    journal = opened(folder)
    stream = await journal.begin(tokens("a", 0), lambda: tokens("a", 1))
    with pytest.raises(ValueError, match="response b can't end the stream a"):
        await journal.end(stream, tokens("b", 5))
    with pytest.raises(RowError, match="tenant"):
        await journal.begin(interaction("c", tenant=None), lambda: {})
    journal.close()


async def test_a_stream_whose_progress_can_t_be_read_keeps_its_last_record(folder, lake, caplog):
    def broken() -> dict[str, Any]:
        raise RuntimeError("no idea")

    journal = opened(folder)
    await journal.begin(tokens("a", 2), broken)
    await journal.begin(tokens("b", 2), lambda: {"nonsense": 1})
    journal.close()
    assert "stream a: so_far failed; its last record is kept" in caplog.text
    seal(lake, folder)
    assert in_lake(lake) == {"a": ("aborted", "abort", 2), "b": ("aborted", "abort", 2)}


async def test_a_disk_that_fails_under_a_stream_refuses_its_end_and_leaves_it_aborted(folder, lake, monkeypatch):
    journal = opened(folder, probe_seconds=0.05)
    stream = await journal.begin(tokens("a", 1), lambda: tokens("a", 1))

    def failing(fd: int) -> None:
        raise OSError(5, "the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr("feedback.journal.session.os.fdatasync", failing)
        with pytest.raises(JournalBroken):
            await journal.append("interactions", interaction("refused"))
        await until(lambda: journal.stats()["failures"] == 1)
    await until(lambda: journal.healthy)
    with pytest.raises(JournalBroken, match="counts as aborted"):
        await journal.end(stream, tokens("a", 5))
    await journal.append("interactions", interaction("afterwards"))
    journal.close()
    seal(lake, folder)
    assert in_lake(lake) == {"a": ("aborted", "abort", 1), "afterwards": ("complete", "stop", 2)}


@pytest.mark.parametrize("call", ["write_all", "os.fdatasync"])
async def test_a_stream_whose_end_a_full_disk_refused_has_all_its_tokens_in_the_lake_once_the_disk_has_room(
    folder, lake, monkeypatch, call
):
    journal = opened(folder, probe_seconds=0.05)
    made = 0
    stream = await journal.begin(tokens("a", 0), lambda: tokens("a", made))
    other = await journal.begin(tokens("b", 0), lambda: tokens("b", 2 * made))
    refusals = []

    def full(fd: int, *_: Any) -> None:
        refusals.append(fd)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"feedback.journal.session.{call}", full)
        made = 5
        with pytest.raises(JournalBroken, match="No space left on device"):
            await journal.end(stream, tokens("a", 5))
        await until(lambda: len(refusals) >= 3)  # the proof is taken, the streams' rows are not
        assert not journal.healthy
        assert seal(lake, folder) == []  # nobody seals them without their tokens meanwhile
    await until(lambda: journal.healthy)
    with pytest.raises(JournalBroken, match="counts as aborted"):
        await journal.end(other, tokens("b", 12))
    await journal.append("interactions", interaction("afterwards"))
    journal.close()
    seal(lake, folder)
    assert in_lake(lake) == {
        "a": ("aborted", "abort", 5),
        "b": ("aborted", "abort", 10),
        "afterwards": ("complete", "stop", 2),
    }
    assert list_segments(folder) == []
    assert not (folder / "damaged").exists()


async def test_a_journal_that_is_closed_on_a_full_disk_lets_go_of_its_streams_as_they_were(folder, lake, monkeypatch):
    journal = opened(folder, probe_seconds=0.05)
    stream = await journal.begin(tokens("a", 1), lambda: tokens("a", 5))

    def full(fd: int, data: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("feedback.journal.session.write_all", full)
        with pytest.raises(JournalBroken):
            await journal.end(stream, tokens("a", 5))
        await asyncio.to_thread(journal.close)
    seal(lake, folder)
    assert in_lake(lake) == {"a": ("aborted", "abort", 1)}


@pytest.fixture
def held(monkeypatch):
    """A disk whose fdatasync can be held: ``free`` is cleared to hold it, ``calls`` counts those that came."""

    class Disk:
        free = threading.Event()
        calls = 0

        def fdatasync(self, fd: int) -> None:
            self.calls += 1
            assert self.free.wait(120)
            REAL_FDATASYNC(fd)

    disk = Disk()
    disk.free.set()
    monkeypatch.setattr("feedback.journal.session.os.fdatasync", disk.fdatasync)
    yield disk
    disk.free.set()


async def hold(disk: Any, journal: Journal) -> asyncio.Task[None]:
    """Hold the disk under a row; returns the task that appends it."""
    disk.free.clear()
    calls = disk.calls
    task = asyncio.create_task(journal.append("feedback", thumb("held", 1)))
    await until(lambda: disk.calls > calls)
    return task


async def rotated(journal: Journal) -> None:
    """Return when the open segments have been replaced."""
    before = journal.stats()["segments"]
    object.__setattr__(journal.config, "segment_seconds", 0.001)
    with journal._condition:
        journal._condition.notify_all()
    await until(lambda: journal.stats()["segments"] > before)
    object.__setattr__(journal.config, "segment_seconds", 60)


async def test_streams_whose_end_or_begin_a_hanging_disk_refused_are_ended_once_it_answers(folder, lake, held):
    journal = opened(folder, commit_timeout_s=0.3)
    stream = await journal.begin(tokens("ended", 0), lambda: tokens("ended", 3))
    held.free.clear()
    calls = held.calls
    taken = asyncio.create_task(journal.begin(tokens("begun", 0), lambda: tokens("begun", 2)))
    await until(lambda: held.calls > calls)
    queued = asyncio.create_task(journal.begin(tokens("never-begun", 0), lambda: tokens("never-begun", 2)))
    with pytest.raises(JournalBroken, match="is not recorded"):
        await journal.end(stream, tokens("ended", 5))
    with pytest.raises(JournalBroken, match="may or may not be recorded"):
        await taken
    with pytest.raises(JournalBroken, match="is not recorded"):
        await queued
    held.free.set()
    await until(lambda: journal.healthy and journal.stats()["open_streams"] == 0)
    await rotated(journal)
    assert "started" not in rows(folder, "interactions").column("status").to_pylist()[3:]
    seal(lake, folder)
    assert in_lake(lake) == {"ended": ("error", None, 5), "begun": ("aborted", "abort", 2)}
    journal.close()
    seal(lake, folder)
    assert in_lake(lake) == {"ended": ("error", None, 5), "begun": ("aborted", "abort", 2)}


async def test_a_stream_whose_end_finds_no_room_in_the_queue_is_ended_once_there_is(folder, lake, held):
    journal = opened(folder, max_queued_rows=1, append_timeout_s=0.1)
    stream = await journal.begin(tokens("a", 0), lambda: tokens("a", 3))
    other = await journal.begin(tokens("b", 0), lambda: tokens("b", 4))
    first = await hold(held, journal)
    second = asyncio.create_task(journal.append("feedback", thumb("queued", 1)))
    await until(lambda: journal.stats()["queued_rows"] == 1)
    with pytest.raises(JournalFull):
        await journal.end(stream, tokens("a", 5))
    gone = asyncio.create_task(journal.end(other, tokens("b", 6)))
    await until(lambda: journal.stats()["waiting_rows"] == 1)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    held.free.set()
    await asyncio.gather(first, second)
    await until(lambda: journal.stats()["open_streams"] == 0)
    journal.close()
    seal(lake, folder)
    assert in_lake(lake) == {"a": ("error", None, 5), "b": ("complete", "stop", 6)}


async def test_a_stream_whose_beginner_was_cancelled_is_ended(folder, lake, held):
    journal = opened(folder)
    first = await hold(held, journal)
    queued = asyncio.create_task(journal.begin(tokens("queued", 0), lambda: tokens("queued", 1)))
    await until(lambda: journal.stats()["queued_rows"] == 1)
    queued.cancel()
    await asyncio.gather(queued, return_exceptions=True)
    held.free.set()
    await first
    held.free.clear()
    calls = held.calls
    taken = asyncio.create_task(journal.begin(tokens("taken", 0), lambda: tokens("taken", 1)))
    await until(lambda: held.calls > calls)
    taken.cancel()
    await asyncio.gather(taken, return_exceptions=True)
    held.free.set()
    await journal.append("feedback", thumb("afterwards", 1))
    await until(lambda: journal.stats()["open_streams"] == 0)
    journal.close()
    seal(lake, folder)
    assert in_lake(lake) == {"taken": ("aborted", "abort", 1)}


async def test_a_stream_that_its_owner_abandons_is_aborted_with_the_tokens_so_far_and_one_that_ended_is_not(
    folder, lake
):
    journal = opened(folder)
    stream = await journal.begin(tokens("a", 0), lambda: tokens("a", 3))
    ended = await journal.begin(tokens("b", 0), lambda: tokens("b", 3))
    await journal.end(ended, tokens("b", 5))
    for each in (stream, ended, stream):
        journal.abandon(each)
    await until(lambda: journal.stats()["open_streams"] == 0)
    with pytest.raises(JournalBroken, match="has ended"):
        await journal.end(stream, tokens("a", 9))
    journal.close()
    journal.abandon(stream)
    seal(lake, folder)
    assert in_lake(lake) == {"a": ("aborted", "abort", 3), "b": ("complete", "stop", 5)}


@pytest.mark.parametrize("bad", [{"response": "\ud800"}, {"tenant": None}])
async def test_an_end_that_does_not_fit_is_refused_and_the_stream_keeps_what_did(folder, lake, bad):
    journal = opened(folder)
    stream = await journal.begin(tokens("a", 0), lambda: tokens("a", 3))
    other = await journal.begin(tokens("b", 0), lambda: tokens("b", 3) | bad)
    third = await journal.begin(tokens("c", 2), lambda: tokens("c", 3) | bad)
    await rotated(journal)
    with pytest.raises(RowError):
        await journal.end(stream, tokens("a", 5) | bad)
    with pytest.raises(RowError):
        await journal.end(other, tokens("b", 5) | bad)
    journal.abandon(third)
    await until(lambda: journal.stats()["open_streams"] == 0)
    await journal.append("interactions", interaction("afterwards"))
    await rotated(journal)
    seal(lake, folder)
    assert in_lake(lake) == {
        "a": ("aborted", "abort", 3),
        "b": ("aborted", "abort", 0),
        "c": ("aborted", "abort", 2),
        "afterwards": ("complete", "stop", 2),
    }
    assert not (folder / "damaged").exists()
    journal.close()


async def test_a_journal_that_is_closed_writes_the_ends_that_it_owes(folder, lake, held):
    journal = opened(folder, commit_timeout_s=0.3)
    stream = await journal.begin(tokens("a", 0), lambda: tokens("a", 3))
    first = await hold(held, journal)
    with pytest.raises(JournalBroken):
        await journal.end(stream, tokens("a", 5))
    await asyncio.gather(first, return_exceptions=True)
    object.__setattr__(journal.config, "commit_timeout_s", 20)
    closing = asyncio.create_task(asyncio.to_thread(journal.close))
    held.free.set()
    await closing
    seal(lake, folder)
    assert in_lake(lake) == {"a": ("error", None, 5)}


KILLED = """
import asyncio, os, sys
from pathlib import Path
from feedback.config import JournalConfig
from feedback.journal.writer import Journal
from tests.feedback.journal.test_streams import tokens

async def main(folder):
    journal = Journal(Path(folder), JournalConfig(segment_seconds=0.1), "replica-0")
    journal.open()
    made = 0
    await journal.begin(tokens("open", 0), lambda: tokens("open", made))
    ended = await journal.begin(tokens("ended", 0), lambda: tokens("ended", made))
    for made in range(1, 6):
        before = journal.stats()["segments"]
        while journal.stats()["segments"] == before:
            await asyncio.sleep(0.01)
    await journal.end(ended, tokens("ended", 8))
    os.kill(os.getpid(), 9)

asyncio.run(main(sys.argv[1]))
"""


def test_after_a_kill_an_open_stream_is_aborted_with_the_tokens_of_the_last_segment(folder, lake):
    here = ROOT / "tests" / "feedback"
    prelude = f"import sys; sys.path[:0] = {[str(here), str(ROOT)]!r}\n"
    killed = subprocess.run([sys.executable, "-c", prelude + KILLED, str(folder)], timeout=60, check=False)
    assert killed.returncode == -9
    seal(lake, folder)
    assert in_lake(lake) == {"open": ("aborted", "abort", 5), "ended": ("complete", "stop", 8)}


def test_a_kill_between_the_next_segment_and_its_first_message_still_records_the_stream(folder, lake):
    async def main() -> None:
        journal = opened(folder)
        await journal.begin(tokens("a", 2), lambda: tokens("a", 2))
        # As killed: files stay as they are, and nobody holds them.
        journal._forget_in_child()

    asyncio.run(main())
    [only] = list_segments(folder)
    # The next segment has its name and its schema, and the repetition was torn.
    torn = only.path.with_name(str(only.path.name).replace("0000000001", "0000000002"))
    torn.write_bytes(only.path.read_bytes()[:100])
    seal(lake, folder)
    assert in_lake(lake) == {"a": ("aborted", "abort", 2)}
    assert list_segments(folder) == []


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "abandon", "plain", "rotate", "seal"]), st.integers(0, 3)), max_size=25
)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS, killed=st.booleans())
def test_any_order_of_starts_ends_segments_and_seals_gives_each_response_one_row(steps, killed, tmp_path_factory):
    home = tmp_path_factory.mktemp("streams")
    folder, left, lake = home / "journal", home / "left", Lake(str(home / "lake"), LakeConfig())
    lake.create()
    expected: dict[str, str] = {}

    async def main() -> None:
        journal = opened(folder)
        streams: dict[int, Any] = {}
        for number, (step, which) in enumerate(steps):
            if step == "begin" and which not in streams:
                name = f"stream-{number}"
                streams[which] = await journal.begin(tokens(name, 0), lambda name=name: tokens(name, 1))
                expected[name] = "aborted"
            elif step == "end" and which in streams:
                stream = streams.pop(which)
                await journal.end(stream, tokens(stream.response_id, 4))
                expected[stream.response_id] = "complete"
            elif step == "abandon" and which in streams:
                journal.abandon(streams.pop(which))
            elif step == "plain":
                await journal.append("interactions", interaction(f"plain-{number}"))
                expected[f"plain-{number}"] = "complete"
            elif step == "rotate":
                before = journal.stats()["segments"]
                if [segment for segment in list_segments(folder) if segment.is_open]:
                    object.__setattr__(journal.config, "segment_seconds", 0.001)
                    with journal._condition:
                        journal._condition.notify_all()
                    await until(lambda before=before: journal.stats()["segments"] > before)
                    object.__setattr__(journal.config, "segment_seconds", 60)
            elif step == "seal":
                await asyncio.to_thread(seal, lake, folder)
        await journal.append("feedback", thumb("last", 1))  # behind a change of segment that is under way
        if killed:  # the files as they are, held by nobody
            shutil.copytree(folder, left)
        await asyncio.to_thread(journal.close)

    asyncio.run(main())
    seal(lake, left if killed else folder)
    assert {name: status for name, (status, _, _) in in_lake(lake).items()} == expected
