"""What the journal is measured against: SQLite with a commit per row, SQLite with group commit, and the disk itself.

SQLite keeps the same columns: texts and numbers as they are, lists of numbers as bytes, nested values as JSON. Both
have WAL and ``synchronous=FULL``, so that a row is on disk when its writer goes on, as in the journal.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from feedback.files import write_all
from feedback.journal.codec import to_batch
from feedback.journal.segment import SegmentName, encode_batch
from feedback.schema import INTERACTIONS

Append = Callable[[dict[str, Any]], Awaitable[None]]
"""Returns when a row is on disk."""

_COLUMNS: Final = INTERACTIONS.names
_INSERT: Final = f"INSERT INTO interactions VALUES ({', '.join('?' * len(_COLUMNS))})"
_NUMBERS: Final = {"prompt_token_ids": "I", "response_token_ids": "I", "logprobs": "f"}
_JSON: Final = ("policy_spans", "sampling", "timings", "metadata")
_TIMES: Final = ("created_at", "completed_at")
_BUSY_S: Final = 60.0
# With group commit on a disk these took the least processor time of pages of 4 to 64 KiB, checkpoints of 4 to 256 MiB.
_PAGE_BYTES: Final = 32768
_CHECKPOINT_PAGES: Final = 4096


def connect(path: Path, *, alone: bool = False) -> sqlite3.Connection:
    """A connection that commits when it is told to.

    alone: no other one comes; its locks stay, its index of the WAL is in memory of its own, and pages and checkpoints
    are as large as is fastest.
    """
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    if alone:
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if alone:
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    connection.execute(f"CREATE TABLE IF NOT EXISTS interactions ({', '.join(_COLUMNS)})")
    return connection


def values(row: dict[str, Any]) -> list[Any]:
    """A row as SQLite takes it."""
    row = dict(row)
    for name in _TIMES:
        row[name] = int(row[name].timestamp() * 1e6)
    for name, code in _NUMBERS.items():
        numbers = row[name]
        row[name] = numbers.tobytes() if isinstance(numbers, np.ndarray) else array(code, numbers).tobytes()
    for name in _JSON:
        row[name] = orjson.dumps(row[name])
    return [row.get(name) for name in _COLUMNS]


class SqliteGroups:
    """SQLite with group commit: tasks convert and queue rows, one thread inserts all that wait and commits once."""

    def __init__(self, path: Path) -> None:
        self._connection = connect(path, alone=True)
        self._condition = threading.Condition()
        self._queue: list[tuple[list[Any], asyncio.Future[None]]] = []
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def append(self, row: dict[str, Any]) -> None:
        """Return when the row is on disk."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        converted = values(row)  # while the disk has the rows before
        with self._condition:
            self._queue.append((converted, waiter))
            if len(self._queue) == 1:
                self._loop.call_soon(self._wake)  # when the tasks that are ready have queued their rows, too
        await waiter

    def close(self) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join(_BUSY_S)
        self._connection.close()

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._closing, _BUSY_S)
                taken, self._queue = self._queue, []
            if not taken:
                return
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(_INSERT, [row for row, _ in taken])
            self._connection.execute("COMMIT")
            self._loop.call_soon_threadsafe(_resolve, [waiter for _, waiter in taken])


async def with_sqlite_groups(path: Path, work: Callable[[Append], Awaitable[Any]]) -> Any:
    """What ``work`` returns, whose rows are committed in groups."""
    groups = SqliteGroups(path)
    try:
        return await work(groups.append)
    finally:
        await asyncio.to_thread(groups.close)


def _resolve(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        waiter.set_result(None)


def sqlite_commit_per_row(path: Path, pool: Sequence[dict[str, Any]], writers: int, seconds: float) -> float:
    """Rows a second that as many threads commit, each a row at a time on a connection of its own."""
    connections = [connect(path) for _ in range(writers)]
    counts, ready = [0] * writers, threading.Barrier(writers + 1)

    def write(number: int) -> None:
        connection, at = connections[number], number
        ready.wait(_BUSY_S)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.execute(_INSERT, values(pool[at % len(pool)]))
            counts[number] += 1
            at += writers

    threads = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(writers)]
    for thread in threads:
        thread.start()
    ready.wait(_BUSY_S)
    started = time.perf_counter()
    for thread in threads:
        thread.join(seconds + _BUSY_S)
    elapsed = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return sum(counts) / elapsed


def disk(path: Path, groups: Sequence[memoryview]) -> float:
    """Seconds that writing these bytes takes, appended to a file, with an fdatasync behind each group."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        started = time.perf_counter()
        for group in groups:
            write_all(fd, group)
            os.fdatasync(fd)
        return time.perf_counter() - started
    finally:
        os.close(fd)


def fdatasync_alone(path: Path, row: dict[str, Any], rate: float, seconds: float) -> list[float]:
    """Seconds that each write of a row, as a message of a journal, and an fdatasync took, ``rate`` times a second."""
    name = SegmentName("interactions", "bench", "0" * 32, 1)
    data = memoryview(encode_batch(to_batch([row], INTERACTIONS), name, 1))
    waits = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        started = time.perf_counter()
        for number in range(int(rate * seconds)):
            time.sleep(max(0.0, started + number / rate - time.perf_counter()))
            began = time.perf_counter()
            write_all(fd, data)
            os.fdatasync(fd)
            waits.append(time.perf_counter() - began)
    finally:
        os.close(fd)
    return waits
