"""The journal under writers: how many rows a second it makes durable, and how long a writer waits for that.

A sealer works beside it, as beside a server.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from deploy.examples.bench import rows
from feedback.config import FeedbackConfig
from feedback.ingest.sealer_process import Sealer
from feedback.journal.writer import Journal
from feedback.lake.tables import Lake

_POOL = 1024
_TICK_S = 0.0005


def capture(
    folder: Path, config: FeedbackConfig, *, writers: int, seconds: float, rate: float | None
) -> dict[str, Any]:
    """Append for some seconds: ``rate`` rows a second, or as many as ``writers`` can, each a row at a time.

    Milliseconds that ``append`` took, over all rows, and what the journal and the sealer did meanwhile.
    """
    import uvloop

    return uvloop.run(_capture(folder, config, writers, seconds, rate))


async def _capture(
    folder: Path, config: FeedbackConfig, writers: int, seconds: float, rate: float | None
) -> dict[str, Any]:
    pool = rows.interactions(_POOL)
    lake = Lake(str(folder / "lake"), config.lake)
    lake.create()
    journal = Journal(folder / "journal", config.journal, "bench")
    sealer = Sealer(lake, folder / "journal")
    journal.open()
    sealer.start()
    while not sealer.healthy:  # its start takes a second, which is not measured
        await asyncio.sleep(0.05)
    try:
        started = time.perf_counter()
        if rate is None:
            waits = await _flat_out(journal, pool, writers, seconds)
        else:
            waits = await _at_a_rate(journal, pool, rate, seconds)
        elapsed = time.perf_counter() - started
        stats = journal.stats()
    finally:
        await asyncio.to_thread(journal.close)
        await asyncio.to_thread(sealer.close)
    waits.sort()
    return {
        "rows": len(waits),
        "seconds": elapsed,
        "rows_per_s": len(waits) / elapsed,
        "ms_p50": 1e3 * waits[len(waits) // 2],
        "ms_p99": 1e3 * waits[int(len(waits) * 0.99)],
        "ms_max": 1e3 * waits[-1],
        "rows_per_commit": stats["rows"] / stats["commits"],
        "commit_ms": stats["commit_ms_total"] / stats["commits"],
        "bytes_per_row": stats["bytes"] / stats["rows"],
        "sealed_rows": lake.counts()["interactions"],
    }


async def _flat_out(journal: Journal, pool: list[dict[str, Any]], writers: int, seconds: float) -> list[float]:
    waits: list[float] = []
    end = time.perf_counter() + seconds

    async def write(at: int) -> None:
        while (started := time.perf_counter()) < end:
            await journal.append("interactions", pool[at % _POOL])
            waits.append(time.perf_counter() - started)
            at += writers

    await asyncio.gather(*(write(number) for number in range(writers)))
    return waits


async def _at_a_rate(journal: Journal, pool: list[dict[str, Any]], rate: float, seconds: float) -> list[float]:
    """An open loop: a row is due when its time has come, whatever became of those before it."""
    waits: list[float] = []

    async def write(row: dict[str, Any], due: float) -> None:
        await journal.append("interactions", row)
        waits.append(time.perf_counter() - due)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(rate * seconds)):
            due = started + number / rate
            while (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(max(early, _TICK_S) if early > _TICK_S else 0)
            tasks.create_task(write(pool[number % _POOL], time.perf_counter()))
    return waits
