"""A lake that is kept open shows what there is at each read, whatever happened in between."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from feedback_rows import append, put, thumb

from feedback.config import JournalConfig
from feedback.ingest.seal import seal
from feedback.journal.writer import Journal
from feedback.lake.open_lake import OpenLake
from feedback.lake.tables import Lake, NoLakeError
from feedback.maintenance.maintain import compact


@pytest.fixture
def kept(lake: Lake, tmp_path: Path) -> Iterator[OpenLake]:
    lake.create()
    found = OpenLake(lake, tmp_path / "journal")
    yield found
    found.close()


def ids(kept: OpenLake) -> list[str]:
    def work(connection: duckdb.DuckDBPyConnection) -> list[str]:
        return [name for (name,) in connection.execute("SELECT response_id FROM feedback ORDER BY 1").fetchall()]

    return kept.read(work)


def test_each_read_sees_the_rows_of_lake_and_journal_once_while_they_are_sealed(kept: OpenLake) -> None:
    assert ids(kept) == []
    put(kept.lake, "feedback", [thumb("a", 1)])
    assert ids(kept) == ["a"]
    journal = Journal(kept.journal_folder, JournalConfig(segment_bytes=1), "replica-0")
    journal.open()
    append(journal, "feedback", thumb("b", 1))
    assert ids(kept) == ["a", "b"]
    append(journal, "feedback", thumb("c", 1))
    journal.close()
    assert ids(kept) == ["a", "b", "c"]
    seal(kept.lake, kept.journal_folder)
    assert ids(kept) == ["a", "b", "c"]
    assert kept.read(lambda connection: connection.execute("SELECT count(*) FROM current_rewards").fetchall()) == [(0,)]


def test_files_that_a_compaction_and_a_vacuum_took_are_not_missed(kept: OpenLake) -> None:
    for name in ("a", "b", "c"):
        put(kept.lake, "feedback", [thumb(name, 1)])
    assert ids(kept) == ["a", "b", "c"]
    old = [Path(file) for file in kept.lake.table("feedback").file_uris()]

    def work(connection: duckdb.DuckDBPyConnection) -> list[tuple[int]]:
        if old[0].exists():  # the first time, while it is at work
            compact(kept.lake)
            for file in old:
                file.unlink()
        return connection.execute("SELECT count(*) FROM feedback").fetchall()

    assert kept.read(work) == [(3,)]
    assert ids(kept) == ["a", "b", "c"]


def test_a_lake_made_anew_is_read_and_one_that_is_gone_is_named(kept: OpenLake, tmp_path: Path) -> None:
    put(kept.lake, "feedback", [thumb("a", 1)])
    assert ids(kept) == ["a"]
    with pytest.raises(ZeroDivisionError):
        kept.read(lambda connection: 1 // 0)
    shutil.rmtree(kept.lake.uri)
    with pytest.raises(NoLakeError):
        ids(kept)
    kept.lake.create()
    put(kept.lake, "feedback", [thumb("b", 1)])
    assert ids(kept) == ["b"]
