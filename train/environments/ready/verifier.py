"""Asks processes of their own for verdicts on what a policy wrote: each is killed when it takes too long."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from queue import Empty, LifoQueue
from threading import BoundedSemaphore
from typing import Any, Final, TypeAlias

from train.environments.ready.places import in_a_place

_Workers: TypeAlias = "LifoQueue[subprocess.Popen[bytes]]"
_AT_ONCE: Final = 2
_START_S: Final = 60.0
_MEMORY_BYTES: Final = 2**30


async def verdict(kind: str, *arguments: Any, seconds: float) -> bool:
    """What ``verifier_worker`` says; False where it takes longer than ``seconds``, or too much memory.

    The wait for a process, which other episodes ask too, is not the environment's time. Raises ValueError if what it
    should judge by is wrong.
    """
    idle, places = _pool()
    line = json.dumps([seconds, kind, *arguments]).encode() + b"\n"
    return await in_a_place(places, lambda begins: _ask(idle, line, seconds, begins))


def _ask(idle: _Workers, line: bytes, seconds: float, begins: Callable[[], None]) -> bool:
    worker = _idle(idle) or _start()
    begins()
    if (answer := _answer(worker, line, seconds)) == b"":  # what a process has judged before may have ended it
        worker = _start()
        answer = _answer(worker, line, seconds)
    if not answer:
        worker.kill()
        worker.wait()
        return False
    idle.put(worker)
    if not isinstance(verdict := json.loads(answer), bool):
        raise ValueError(verdict)
    return verdict


def _idle(workers: _Workers) -> subprocess.Popen[bytes] | None:
    """One that still runs."""
    with suppress(Empty):
        while True:
            if (worker := workers.get_nowait()).poll() is None:
                return worker
    return None


@cache
def _pool() -> tuple[_Workers, BoundedSemaphore]:
    return LifoQueue(), BoundedSemaphore(_AT_ONCE)


def _start() -> subprocess.Popen[bytes]:
    """A process that answers. Raises RuntimeError if it does not start."""
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", "train.environments.ready.verifier_worker", str(_MEMORY_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    if not _answer(worker, b'[%d, "ready", 0, 0]\n' % _START_S, _START_S):
        worker.kill()
        raise RuntimeError(f"the process that verifies did not start; it ended with {worker.wait()}")
    return worker


def _answer(worker: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes | None:
    """Its next line; nothing if it has ended, None if there is none in time."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(line)
        worker.stdin.flush()
    except BrokenPipeError:
        return b""
    deadline, found = time.monotonic() + seconds, b""
    with selectors.DefaultSelector() as selector:
        selector.register(worker.stdout, selectors.EVENT_READ)
        while not found.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            if not (more := os.read(worker.stdout.fileno(), 2**16)):
                return b""
            found += more
    return found
