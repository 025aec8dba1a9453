"""The lake under load: sealing and compacting in turns with deltalake's own writer, reading rates, and bytes a row."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake

from deploy.examples.bench.data_plane import rows
from feedback.config import FeedbackConfig
from feedback.files import fsync_tree
from feedback.ingest.seal import seal
from feedback.lake.data_files import dates
from feedback.lake.tables import Lake
from feedback.maintenance.maintain import compact

_SEALS = 8


def storage(folder: Path, config: FeedbackConfig, *, count: int, turns: int) -> dict[str, Any]:
    """Journal ``count`` realistic interactions, seal them in eight commits, compact, and read them back; in turns.

    ``seal_s`` and ``compact_s`` are lists of seconds, one per turn. Beside them are those that ``write_deltalake`` took
    to write the same rows, in eight commits and in one, without and with (``synced``) an fsync of all that it wrote,
    which sealing and compacting include. It reads no journal and sorts nothing.
    """
    batches = [rows.interactions(max(1, count // _SEALS), seed=turn) for turn in range(_SEALS)]
    tables = [rows.table("interactions", batch) for batch in batches]
    seconds: dict[str, list[float]] = {}
    for turn in range(turns):
        path = folder / f"turn-{turn}"

        def peer(path: Path = path) -> None:
            for name, commits in {"seal": tables, "compact": [pa.concat_tables(tables)]}.items():
                written = _written(path / name, commits)
                seconds.setdefault(f"deltalake_{name}_s", []).append(written)
                synced = _timed(lambda name=name: fsync_tree(path / name))  # type: ignore[misc]
                seconds.setdefault(f"deltalake_{name}_synced_s", []).append(written + synced)

        def ours(path: Path = path) -> dict[str, float]:
            return _sealed_and_compacted(path / "ours", config, batches, seconds)

        if turn % 2:
            peer()
        figures = ours()
        if turn % 2 == 0:
            peer()
        shutil.rmtree(path)
    plain = folder / "plain.parquet"
    pq.write_table(pa.concat_tables(tables), plain, compression="zstd")
    total = sum(map(len, batches))
    return {
        "rows": total,
        "seal_rows_per_s": total / statistics.median(seconds["seal_s"]),
        "compact_rows_per_s": total / statistics.median(seconds["compact_s"]),
        **figures,
        "bytes_per_row_plain_zstd": plain.stat().st_size / total,
        **seconds,
    }


def _sealed_and_compacted(
    folder: Path, config: FeedbackConfig, batches: list[list[dict[str, Any]]], seconds: dict[str, list[float]]
) -> dict[str, float]:
    """Reading rates and bytes a row before and behind compaction; the times go to ``seconds``."""
    lake = Lake(str(folder / "lake"), config.lake)
    lake.create()
    sealed_s = 0.0
    for batch in batches:
        asyncio.run(rows.record(folder / "journal", config.journal, {"interactions": batch}))
        sealed_s += _timed(lambda: seal(lake, folder / "journal"))
    seconds.setdefault("seal_s", []).append(sealed_s)
    total, sealed_bytes = lake.counts()["interactions"], _bytes(lake)
    reading = {f"{name}_sealed": rate for name, rate in _reading(lake, total).items()}
    seconds.setdefault("compact_s", []).append(_timed(lambda: compact(lake)))
    return {
        **reading,
        **{f"{name}_compacted": rate for name, rate in _reading(lake, total).items()},
        "bytes_per_row_sealed": sealed_bytes / total,
        "bytes_per_row_compacted": _bytes(lake) / total,
    }


def _written(folder: Path, commits: list[pa.Table]) -> float:
    """Seconds that deltalake takes to make a table of the same layout as the lake's."""
    dated = [table.append_column("date", dates(table, "created_at")) for table in commits]

    def write() -> None:
        for table in dated:
            write_deltalake(str(folder), table, mode="append", partition_by=["date"])

    return _timed(write)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _reading(lake: Lake, total: int) -> dict[str, float]:
    """Rows a second, of whole rows into Arrow and of one column through DuckDB."""
    with lake.connect() as connection:
        started = time.perf_counter()
        read = sum(batch.num_rows for batch in connection.sql("SELECT * FROM interactions").to_arrow_reader(8192))
        whole_s = time.perf_counter() - started
        started = time.perf_counter()
        connection.sql("SELECT avg(len(response)) FROM interactions").fetchall()
        column_s = time.perf_counter() - started
    if read != total:
        raise AssertionError(f"{read} rows were read of {total}")
    return {"read_rows_per_s": total / whole_s, "read_column_rows_per_s": total / column_s}


def _bytes(lake: Lake) -> int:
    """Of the files that the table consists of."""
    return sum(lake.table("interactions").get_add_actions().column("size_bytes").to_pylist())
