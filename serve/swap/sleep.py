"""A server that sleeps: training or evaluation has its devices for a while, and requests wait until it is awake.

Whoever wants the devices holds a lease, and renews it. The server sleeps while anybody does, and wakes when the last
one lets go or is overdue: so nobody's end, however it comes, leaves it asleep.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any, Final, Literal

from serve.admission import Admission
from serve.config import SleepConfig
from serve.swap.swapper import Swapper
from serve.vllm.engine import Engine

log = logging.getLogger(__name__)

_POLL_S: Final = 0.02
_LOOK_S: Final = 0.1
_ABORTED_S: Final = 10.0  # for requests that were aborted to record what they have

State = Literal["awake", "falling asleep", "asleep", "waking"]


class CannotSleep(RuntimeError):
    """The server serves on; the text says why."""


class Sleeper:
    """Has one server sleep and wake. Its engine's part is stopped, and gives a GPU's memory back."""

    def __init__(self, engine: Engine, swapper: Swapper, admission: Admission, config: SleepConfig) -> None:
        self._engine, self._swapper, self._admission, self._config = engine, swapper, admission, config
        self.state: State = "awake"
        self.broken: str | None = None
        """Why the engine can't go on, if it could not be woken."""
        self._leases: dict[str, float] = {}  # by holder, until when, by time.monotonic
        self._changing = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    def status(self) -> dict[str, Any]:
        """The state, whose leases last for how many seconds yet, and how many requests wait."""
        now = time.monotonic()
        holders = {holder: round(max(0.0, until - now), 1) for holder, until in self._leases.items()}
        return {"state": self.state, "holders": holders, "waiting": self._admission.waiting}

    def holds(self, holder: str) -> bool:
        """Whether the holder has a lease."""
        return holder in self._leases

    async def sleep(self, holder: str, lease_s: float) -> None:
        """Return when the server sleeps, and will for ``lease_s`` seconds from then on, unless the holder lets go.

        A holder that has a lease renews it. Raises CannotSleep: it serves on.
        """
        async with self._changing:
            if self.broken is not None:
                raise CannotSleep(self.broken)
            if self.state == "awake":
                await self._fall_asleep(holder)
            self._leases[holder] = time.monotonic() + lease_s
            if self._watch is None or self._watch.done():
                self._watch = asyncio.create_task(self._watch_leases(), name="sleep")

    async def wake(self, holder: str) -> None:
        """The holder lets go; return when the server is awake, unless another one holds a lease."""
        async with self._changing:
            self._leases.pop(holder, None)
            if not self._leases and self.state == "asleep":
                await self._wake(f"{holder} has let go")

    async def close(self) -> None:
        """Leave everything as it is: the server ends."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch

    async def _watch_leases(self) -> None:
        while self.state != "awake" and self.broken is None:
            await asyncio.sleep(_LOOK_S)
            async with self._changing:
                overdue = [holder for holder, until in self._leases.items() if until < time.monotonic()]
                for holder in overdue:
                    log.warning("%s has not renewed its lease", holder)
                    del self._leases[holder]
                if not self._leases and self.state == "asleep":
                    await self._wake("nobody holds a lease any more")

    async def _fall_asleep(self, holder: str) -> None:
        began = time.monotonic()
        self.state = "falling asleep"
        try:
            await self._swapper.rest()
        except BaseException:
            self.state = "awake"
            raise
        self._admission.close()
        try:
            aborted = await self._drain()
        except BaseException:
            self._go_on()
            raise
        try:
            given = await self._engine.sleep(self._config.timeout_s)
        except Exception as error:  # whatever it was: it is to serve on
            await self._wake("it can't sleep")
            raise CannotSleep(f"the engine can't sleep: {_reason(error)}") from error
        self.state = "asleep"
        log.info(
            "asleep for %s after %.2f s: %d MiB of devices given back, %d requests aborted",
            holder,
            time.monotonic() - began,
            given >> 20,
            aborted,
        )

    async def _drain(self) -> int:
        """Return when no request is at work; how many were aborted for that. Raises CannotSleep."""
        if await self._idle_within(self._config.drain_timeout_s):
            return 0
        requests = list(self._engine.requests)
        log.warning("%d requests still at work after serve.sleep.drain_timeout_s: aborting them", len(requests))
        await asyncio.gather(*map(self._engine.abort, requests), return_exceptions=True)
        # A client that does not read may keep a request that the engine is done with.
        if not await self._idle_within(_ABORTED_S) and self._engine.unfinished:
            raise CannotSleep(f"{self._admission.active} requests do not end")
        return len(requests)

    async def _idle_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._admission.active or self._engine.requests:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _wake(self, why: str) -> None:
        began = time.monotonic()
        self.state = "waking"
        try:
            await self._engine.wake(self._config.timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever it was: the server has to be started again
            self.broken = f"the engine can't be woken: {_reason(error)}"
            return
        self._go_on()
        log.info("awake after %.2f s: %s", time.monotonic() - began, why)

    def _go_on(self) -> None:
        self.state = "awake"
        self._swapper.go_on()
        self._admission.open()


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "it took longer than serve.sleep.timeout_s"
    return f"{type(error).__name__}: {error}"
