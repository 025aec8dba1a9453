from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from feedback_rows import append, put, table_of, thumb

from feedback.config import JournalConfig, LakeConfig
from feedback.ingest.deduplication import append_feedback, take_counts
from feedback.ingest.id_index import SealedIds, take_in
from feedback.ingest.seal import seal
from feedback.ingest.sealer_process import Sealer
from feedback.journal.writer import Journal
from feedback.lake.tables import Lake, LakeConflictError
from feedback.maintenance.erasure import Target, erase, finish_erasures
from tests.object_store import serving


def vote(feedback_id: str, value: float = 1.0, **columns: Any):
    return thumb("r1", value, feedback_id=feedback_id, **columns)


def journaled(folder: Path, writer: str, *votes: dict[str, Any]) -> Path:
    journal = Journal(folder, JournalConfig(), writer)
    journal.open()
    for row in votes:
        append(journal, "feedback", row)
    journal.close()
    return folder


def in_lake(lake: Lake) -> list[tuple[str, float]]:
    with lake.connect() as connection:
        return connection.execute("SELECT feedback_id, value FROM feedback ORDER BY ALL").fetchall()


def last_commit(lake: Lake) -> dict[str, Any]:
    return lake.table("feedback").history(1)[0]


def test_what_two_replicas_took_under_one_id_is_in_the_lake_once(tmp_path, lake, caplog):
    take_counts()
    one = journaled(tmp_path / "one", "one", vote("same"), vote("other", 1.0), vote("mine"))
    two = journaled(tmp_path / "two", "two", vote("same"), vote("other", 0.0), vote("yours"))
    assert len(seal(lake, one)) == 1
    with caplog.at_level(logging.WARNING):
        assert len(seal(lake, two)) == 1
    assert in_lake(lake) == [("mine", 1.0), ("other", 1.0), ("same", 1.0), ("yours", 1.0)]
    assert "1 feedback rows are left out" in caplog.text
    assert "(other)" in caplog.text
    assert take_counts() == {"repeated_feedback": 1, "conflicting_feedback": 1}
    commit = last_commit(lake)
    assert (int(commit["repeated"]), list(commit["conflicts"])) == (1, ["other"])


def test_the_sealers_process_counts_what_it_leaves_out(folder, lake):
    put(lake, "feedback", [vote("same"), vote("other")])
    journaled(folder, "one", vote("same"), vote("other", 0.0), vote("mine"))
    sealer = Sealer(Lake(lake.uri, LakeConfig(seal_seconds=0.1)), folder)
    sealer.start()
    deadline = time.monotonic() + 120
    while not sealer.sealed_segments:
        assert time.monotonic() < deadline, sealer.error
        time.sleep(0.05)
    sealer.close()
    stats = sealer.stats()
    assert (stats["repeated_feedback"], stats["conflicting_feedback"]) == (1, 1)


def test_of_two_writers_in_one_journal_the_earlier_row_stands(folder, lake):
    early, late = vote("f", 0.0), vote("f", 1.0)
    journaled(folder, "a", late)
    journaled(folder, "b", early)
    seal(lake, folder)
    assert in_lake(lake) == [("f", 0.0)]


def test_a_segment_that_the_lake_has_wholly_is_removed_without_a_commit(tmp_path, lake):
    for writer in ("one", "two"):
        journaled(tmp_path / writer, writer, vote("f"))
    seal(lake, tmp_path / "one")
    version = lake.table("feedback").version()
    assert len(seal(lake, tmp_path / "two")) == 1
    assert lake.table("feedback").version() == version
    assert not list((tmp_path / "two").glob("*.arrows"))


def test_tenants_do_not_share_ids(tmp_path, lake):
    journaled(tmp_path / "one", "one", vote("f"))
    journaled(tmp_path / "two", "two", vote("f", 0.0, tenant="other"))
    for writer in ("one", "two"):
        seal(lake, tmp_path / writer)
    assert in_lake(lake) == [("f", 0.0), ("f", 1.0)]


def test_no_row_is_left_out_because_the_index_is_wrong(folder, lake):
    put(lake, "feedback", [vote("erased"), vote("kept")])
    take_in(lake, folder)
    lake.table("feedback").delete("feedback_id = 'erased'")
    journaled(folder, "one", vote("erased"), vote("kept"))
    seal(lake, folder)
    assert in_lake(lake) == [("erased", 1.0), ("kept", 1.0)]


@pytest.mark.parametrize("value", [1.0, 0.0])
def test_feedback_that_is_said_again_while_an_erasure_runs_is_there_when_it_is_done(tmp_path, lake, monkeypatch, value):
    """Another replica took it, whose ledger had not heard of the row that goes."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    put(lake, "feedback", [vote("f", source="eve"), vote("g", source="bob")])
    with monkeypatch.context() as patch:
        patch.setattr("feedback.maintenance.erasure._rewrite_all", interrupt)
        with pytest.raises(KeyboardInterrupt):
            erase(lake, tmp_path / "one", Target(user="eve"))
    for writer in ("two", "three"):  # the second finds what the first sealed, which stays
        seal(lake, journaled(tmp_path / writer, writer, vote("f", value, source="eve"), vote("g", source="bob")))
    assert in_lake(lake) == sorted([("f", 1.0), ("f", value), ("g", 1.0)])
    assert finish_erasures(lake)["feedback"] == 1
    assert in_lake(lake) == [("f", value), ("g", 1.0)]


@pytest.fixture(scope="module")
def object_store() -> Iterator[Lake]:
    with serving() as options:
        made = Lake("s3://bucket/lake", LakeConfig(storage_options=options, lock_timeout_s=60))
        made.create()
        yield made


@pytest.mark.parametrize("where", ["local", "object store"])
def test_seals_at_once_put_an_id_in_once(tmp_path, request, where):
    lake: Lake = request.getfixturevalue("lake" if where == "local" else "object_store")
    replicas = [
        journaled(tmp_path / f"replica-{i}", f"replica-{i}", *(vote(f"f{j}", float(i % 2)) for j in range(50)))
        for i in range(5)
    ]
    start = threading.Barrier(len(replicas), timeout=60)

    def seal_together(folder: Path) -> int:
        own = Lake(lake.uri, lake.config)
        start.wait()
        return len(seal(own, folder))

    with ThreadPoolExecutor(len(replicas)) as pool:
        assert list(pool.map(seal_together, replicas)) == [1] * len(replicas)
    rows = in_lake(lake)
    assert sorted(feedback_id for feedback_id, _ in rows) == sorted(f"f{j}" for j in range(50))
    assert len({value for _, value in rows}) == 1  # all are the ones of the replica that sealed first


def test_a_seal_whose_snapshot_is_old_looks_again(folder, lake):
    old = lake.table("feedback")
    append_feedback(
        lake, folder, table_of("feedback", [vote("a")]), transactions={}, metadata={}, snapshot=lake.table("feedback")
    )
    repeated, conflicts = append_feedback(
        lake, folder, table_of("feedback", [vote("a", 0.0), vote("b")]), transactions={}, metadata={}, snapshot=old
    )
    assert (repeated, conflicts) == (0, ["a"])
    assert in_lake(lake) == [("a", 1.0), ("b", 1.0)]


def test_the_guard_refuses_a_commit_between_look_and_append(folder, lake, monkeypatch):
    """Another seal commits each time after the lake was asked: it must be seen, and at some time given up."""
    rival = Lake(lake.uri, lake.config)
    rounds = []

    def append(table: str, rows: Any, **given: Any) -> Any:
        rounds.append(len(rounds))
        rows_of_rival = table_of("feedback", [vote(f"rival-{len(rounds)}")])
        guard = {"feedback.ids": rival.table("feedback").version() + 1}
        rival.append("feedback", rows_of_rival, transactions=guard)
        return Lake.append(lake, table, rows, **given)

    monkeypatch.setattr(lake, "append", append)
    with pytest.raises(LakeConflictError):
        append_feedback(
            lake,
            folder,
            table_of("feedback", [vote("a")]),
            transactions={},
            metadata={},
            snapshot=lake.table("feedback"),
        )
    assert len(rounds) == 8
    assert "a" not in {feedback_id for feedback_id, _ in in_lake(lake)}


def test_a_seal_takes_its_own_rows_in(folder, lake):
    journaled(folder, "one", *(vote(f"f{i}") for i in range(10)))
    seal(lake, folder)
    index = SealedIds(folder)
    index.reopen()
    assert index.version() == lake.table("feedback").version()
    index.close()
