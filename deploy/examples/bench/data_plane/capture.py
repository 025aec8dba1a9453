"""The journal in turns with its peers on one disk: rows a second, and how long a writer waits.

A turn of each, then another of each in the opposite order, and so on, so that a machine whose speed drifts treats them
alike. Of each turn there is a number; the ratios to look at are those of one round.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from deploy.examples.bench.data_plane import peers, rows
from deploy.examples.bench.data_plane.peers import Append
from feedback.config import FeedbackConfig
from feedback.ingest.sealer_process import Sealer
from feedback.journal.segment import list_segments, scan
from feedback.journal.writer import Journal
from feedback.lake.tables import Lake

_POOL = 1024
_TICK_S = 0.0005
_PAUSE_S = 0.05
_START_S = 60.0
_DRAIN_S = 120.0


def capture(
    folder: Path, config: FeedbackConfig, *, writers: int, seconds: float, rate: float, turns: int
) -> dict[str, list[float]]:
    """Turns of some seconds: rows a second with ``writers`` writers, and milliseconds that a row takes at ``rate``.

    ``journal`` has a sealer beside it, as a server's has. ``alone`` has none, and ``disk`` is how fast the disk
    takes the same bytes in the same groups. ``added`` is what an append takes at ``rate`` rows a second, beside a
    sealer; ``fdatasync`` is what the write of one such row and an fdatasync take, as often, with nothing else at work.

    Raises AssertionError if the lake has other than the rows that were acknowledged beside the sealer.
    """
    pool, acknowledged = rows.interactions(_POOL), 0

    async def flat_out(append: Append) -> tuple[int, float]:
        return await _flat_out(append, pool, writers, seconds)

    async def paced(append: Append) -> list[float]:
        return await _at_a_rate(append, pool, rate, seconds)

    def journal(work: Callable[[Append], Awaitable[Any]]) -> Any:
        return uvloop.run(_with_journal(journal_folder, config, work))

    def alone(path: Path) -> dict[str, float]:
        count, elapsed = uvloop.run(_with_journal(path / "journal", config, flat_out))
        groups = list(_groups(path / "journal"))
        disk_s = peers.disk(path / "groups", groups)
        return {"alone": count / elapsed, "disk": count / disk_s, "rows_per_commit": count / len(groups)}

    def sqlite_grouped(path: Path) -> dict[str, float]:
        count, elapsed = uvloop.run(peers.with_sqlite_groups(path / "rows.db", flat_out))
        return {"sqlite_grouped": count / elapsed}

    def beside_sealer(_: Path) -> dict[str, float]:
        nonlocal acknowledged
        count, elapsed = journal(flat_out)
        acknowledged += count
        return {"journal": count / elapsed}

    def added(_: Path) -> dict[str, float]:
        nonlocal acknowledged
        waits = journal(paced)
        acknowledged += len(waits)
        return _percentiles("added", waits)

    measures: list[Callable[[Path], dict[str, float]]] = [
        beside_sealer,
        alone,
        sqlite_grouped,
        lambda path: {"sqlite": peers.sqlite_commit_per_row(path / "rows.db", pool, writers, seconds)},
        added,
        lambda path: _percentiles("fdatasync", peers.fdatasync_alone(path / "rows", pool[0], rate, seconds)),
    ]
    measured: dict[str, list[float]] = {}
    with _sealer(folder, config) as journal_folder:
        for turn in range(turns):
            for measure in measures if turn % 2 == 0 else reversed(measures):
                path = folder / "turn"
                path.mkdir()
                for name, value in measure(path).items():
                    measured.setdefault(name, []).append(value)
                shutil.rmtree(path)
                _wait(lambda: not list_segments(journal_folder), _DRAIN_S)
                os.sync()  # what a turn wrote and removed is not for the next one to wait for
        sealed = Lake(str(folder / "lake"), config.lake).counts()["interactions"]
    if sealed != acknowledged:
        raise AssertionError(f"{acknowledged} rows were acknowledged, {sealed} are in the lake")
    return measured


@contextmanager
def _sealer(folder: Path, config: FeedbackConfig) -> Iterator[Path]:
    """The folder of a journal that a sealer empties."""
    lake = Lake(str(folder / "lake"), config.lake)
    lake.create()
    journal_folder = folder / "journal"
    journal_folder.mkdir()
    sealer = Sealer(lake, journal_folder)
    sealer.start()
    try:
        _wait(lambda: sealer.healthy, _START_S)
        yield journal_folder
    finally:
        sealer.close()


def _wait(until: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the sealer is not where it should be after {seconds:g} s")
        time.sleep(_PAUSE_S)


async def _with_journal(folder: Path, config: FeedbackConfig, work: Callable[[Append], Awaitable[Any]]) -> Any:
    journal = Journal(folder, config.journal, "bench")
    journal.open()
    try:
        return await work(lambda row: journal.append("interactions", row))
    finally:
        await asyncio.to_thread(journal.close)


def _groups(folder: Path) -> Iterator[memoryview]:
    """The groups that a closed journal was written in: one message for each commit."""
    for segment in list_segments(folder):
        data = segment.path.read_bytes()
        for start, end in scan(data, segment.name).messages:
            yield memoryview(data)[start:end]


async def _flat_out(append: Append, pool: list[dict[str, Any]], writers: int, seconds: float) -> tuple[int, float]:
    """How many rows as many writers append in so many seconds, each a row at a time; and the seconds it took."""
    counts = [0] * writers
    started = time.perf_counter()

    async def write(number: int) -> None:
        for row in itertools.islice(itertools.cycle(pool), number, None, writers):
            if time.perf_counter() >= started + seconds:
                return
            await append(row)
            counts[number] += 1

    await asyncio.gather(*(write(number) for number in range(writers)))
    return sum(counts), time.perf_counter() - started


async def _at_a_rate(append: Append, pool: list[dict[str, Any]], rate: float, seconds: float) -> list[float]:
    """Seconds from when each row is due to its end, in an open loop: whatever became of others."""
    waits: list[float] = []

    async def write(row: dict[str, Any], due: float) -> None:
        await append(row)
        waits.append(time.perf_counter() - due)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(rate * seconds)):
            due = started + number / rate
            while (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(max(early, _TICK_S) if early > _TICK_S else 0)
            tasks.create_task(write(pool[number % _POOL], due))
    return waits


def _percentiles(name: str, waits: list[float]) -> dict[str, float]:
    waits.sort()
    return {f"{name}_ms_p{percent}": 1e3 * waits[int(len(waits) * percent / 100)] for percent in (50, 99)}
