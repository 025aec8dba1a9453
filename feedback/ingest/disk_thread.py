"""One thread that reads from a disk, so that a disk which hangs holds up nobody for long, nor anything else."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from feedback.processes.exit import skip_teardown

_T = TypeVar("_T")


class DiskThread:
    """Does one reading after the other. One event loop uses it."""

    def __init__(self, what: str) -> None:
        """``what`` is read, in errors."""
        self._what = what
        self._thread = ThreadPoolExecutor(1, what)
        self._readings = deque[Future[Any]]()  # in order, but for some that are done
        self._late: Future[Any] | None = None  # a reading that somebody has waited for in vain
        self._ended = False

    @property
    def readings(self) -> int:
        """That are under way, or wait."""
        return sum(not one.done() for one in self._readings)

    async def run(self, work: Callable[[], _T], limit_s: float | None) -> _T:
        """What ``work`` returns. Raises what it raises, and OSError once ended, or without room for a thread.

        ``limit_s``: longest wait, for the readings before it too; TimeoutError is raised past it, and at once until
        what was waited for in vain is done. ``work`` goes on then. None: no limit.
        """
        if self._ended:
            raise OSError("the server ends")
        if self._late is not None and not self._late.done():
            raise TimeoutError(f"{self._what}: a reading has not ended in time, and is not done yet")
        while self._readings and self._readings[0].done():
            self._readings.popleft()
        try:
            reading = self._thread.submit(work)
        except RuntimeError as error:
            raise OSError(f"{self._what} can't be read: {error}") from error
        self._readings.append(reading)
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(reading)
        except TimeoutError:
            if reading.done() and not reading.cancelled():  # at this moment, or it raised one itself
                return reading.result()
            self._late = next((one for one in self._readings if not one.done()), None)
            raise TimeoutError(f"{self._what} was not read within {limit_s:g} s") from None

    def end(self, last: Callable[[], object], wait_s: float) -> None:
        """Do ``last`` behind all readings, and end; past ``wait_s`` it ends with the process, without teardown."""
        if self._ended:
            return
        self._ended = True
        try:
            self._thread.submit(last).result(wait_s)
        except (TimeoutError, RuntimeError):
            skip_teardown(f"{self._what} is still read")
        self._thread.shutdown(wait=False)
