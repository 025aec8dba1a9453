"""Calls of which only so many run at once in this process. The wait for a place is not an environment's time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import BoundedSemaphore
from typing import TypeVar

from train.environments.time_limit import Stopped

_Result = TypeVar("_Result")


async def in_a_place(places: BoundedSemaphore, call: Callable[[Callable[[], None]], _Result]) -> _Result:
    """What ``call`` returns, run in a thread once there is a place. It is handed what it has to call as it begins."""
    loop, clocks = asyncio.get_running_loop(), Stopped()

    def begins() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(clocks.resume)

    def work() -> _Result:
        with places:
            return call(begins)

    try:
        return await asyncio.to_thread(work)
    finally:
        clocks.resume()
