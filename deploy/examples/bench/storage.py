"""The lake under load: sealing, compacting and reading rates, and bytes a row against plain zstd Parquet."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from deploy.examples.bench import rows
from feedback.config import FeedbackConfig
from feedback.ingest.seal import seal
from feedback.lake.tables import Lake
from feedback.maintenance.maintain import compact

_SEALS = 8


def storage(folder: Path, config: FeedbackConfig, *, count: int) -> dict[str, Any]:
    """Journal ``count`` realistic interactions, seal them in eight turns, compact, and read them back."""
    lake = Lake(str(folder / "lake"), config.lake)
    lake.create()
    plain = folder / "plain.parquet"
    sealed_s = 0.0
    with pq.ParquetWriter(plain, rows.table("interactions", []).schema, compression="zstd") as writer:
        for turn in range(_SEALS):
            batch = rows.interactions(max(1, count // _SEALS), seed=turn)
            asyncio.run(rows.record(folder / "journal", config.journal, {"interactions": batch}))
            writer.write_table(rows.table("interactions", batch))
            started = time.perf_counter()
            seal(lake, folder / "journal")
            sealed_s += time.perf_counter() - started
    total, sealed_bytes = lake.counts()["interactions"], _bytes(lake)
    reading = {f"{name}_sealed": rate for name, rate in _reading(lake, total).items()}
    started = time.perf_counter()
    compact(lake)
    compact_s = time.perf_counter() - started
    return {
        "rows": total,
        "seal_rows_per_s": total / sealed_s,
        "compact_rows_per_s": total / compact_s,
        **reading,
        **{f"{name}_compacted": rate for name, rate in _reading(lake, total).items()},
        "bytes_per_row_sealed": sealed_bytes / total,
        "bytes_per_row_compacted": _bytes(lake) / total,
        "bytes_per_row_plain_zstd": plain.stat().st_size / total,
    }


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
