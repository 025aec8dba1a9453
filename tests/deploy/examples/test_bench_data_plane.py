"""The peers of the journal, and the lakes that scoring is measured on."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from deploy.examples.bench.data_plane import peers, rows, scoring
from feedback.config import FeedbackConfig
from feedback.lake.tables import Lake
from feedback.scoring.run import score


def test_every_row_that_the_grouped_peer_acknowledges_is_in_its_file(tmp_path: Path) -> None:
    pool = rows.interactions(20, tokens=8)

    async def work(append: peers.Append) -> None:
        await asyncio.gather(*(append(row) for row in pool))

    asyncio.run(peers.with_sqlite_groups(tmp_path / "rows.db", work))
    with sqlite3.connect(tmp_path / "rows.db") as connection:
        kept = {response_id for (response_id,) in connection.execute("SELECT response_id FROM interactions")}
    connection.close()
    assert kept == {row["response_id"] for row in pool}


def test_the_peer_that_commits_each_row_counts_what_is_in_its_file(tmp_path: Path) -> None:
    rate = peers.sqlite_commit_per_row(tmp_path / "rows.db", rows.interactions(8, tokens=8), 4, 0.2)
    connection = sqlite3.connect(tmp_path / "rows.db")
    [[kept]] = connection.execute("SELECT count(*) FROM interactions").fetchall()
    connection.close()
    assert kept >= 4
    assert rate * 0.2 <= kept


def test_scoring_a_copy_leaves_the_lake_that_it_is_of_as_it_was(tmp_path: Path) -> None:
    config = FeedbackConfig()
    lake = Lake(str(tmp_path / "lake"), config.lake)
    lake.create()
    scoring.fill(lake, 0, 300)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (tmp_path / "lake").rglob("*") if path.is_file()}

    before = files()
    for _ in range(2):
        with scoring._copy(tmp_path / "lake", config.lake) as copy:
            for number in range(1, 13):  # commits beyond a checkpoint of the log
                scoring.fill(copy, 300 * number, 300 * number + 10)
            assert score(copy, config.scoring, config.kinds).scored == 420
        assert files() == before
    assert [path.name for path in tmp_path.iterdir()] == ["lake"]
