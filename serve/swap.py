"""The swap, step by step, in one replica: follow the store's serving pointer without failing a request.

verify and prefetch, still serving -> hold between two engine steps -> load -> compare checksums -> resume. Requests in
flight go on under the new policy. If anything fails, the old weights are what serves, the replica says so, and the
pointer's generation is not tried again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from serve.config import SwapConfig
from serve.engine import Engine
from serve.policies import Pointer, Policy, PolicyError, PolicyStore
from serve.swappable import require_finite, require_swappable

log = logging.getLogger(__name__)

REMEMBERED: Final = 20


@dataclass(frozen=True)
class Swap:
    """One swap as it is recorded; times in milliseconds. ``hold_ms``: how long no token was made."""

    at: str
    from_version: int
    to_version: int
    generation: int
    ok: bool
    error: str | None
    prefetch_ms: float
    hold_ms: float
    load_ms: float
    in_flight: int

    def to_json(self) -> dict[str, Any]:
        """The record with its keys as they are written: ``from`` and ``to``."""
        record = asdict(self)
        return {"at": record.pop("at"), "from": record.pop("from_version"), "to": record.pop("to_version"), **record}


class Swapper:
    """Keeps one engine on the policy that the store's pointer names."""

    def __init__(
        self,
        store: PolicyStore,
        engine: Engine,
        config: SwapConfig,
        record: Path,
        *,
        observe: Callable[[Swap], None] = lambda swap: None,
    ) -> None:
        """``record``: the file that each swap is appended to, one JSON a line; ``observe`` is called after each."""
        self.store = store
        self.engine = engine
        self.config = config
        self.record = record
        self.broken: str | None = None
        """Why the engine can't serve any more, if a swap failed and the old weights could not be put back."""
        self.failed: dict[str, Any] | None = None
        """The pointer that could not be followed, until another one is."""
        self._observe = observe
        self._policy: Policy | None = None
        self._pointer: Pointer | None = None
        self._seen = 0  # the newest generation that was acted upon, well or not
        self._since = _now()
        self._swaps: deque[Swap] = deque(maxlen=REMEMBERED)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine on what the pointer names and begin to follow the pointer.

        Raises PolicyError (no pointer, no such policy, a damaged one), EngineError.
        """
        pointer = self.store.serving()
        if pointer is None:
            raise PolicyError(f"{self.store.root} has no serving policy yet: promote one first (millrace init)")
        policy = await asyncio.to_thread(self.store.verify, pointer.version)
        await self.engine.start(policy)
        self._policy, self._pointer, self._seen, self._since = policy, pointer, pointer.generation, _now()
        self._task = asyncio.create_task(self._follow(), name="swapper")

    async def close(self) -> None:
        """Stop following. A swap under way is brought to its end first, by its own timeouts."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not task.cancelled():  # it is this call that was cancelled
                raise

    @property
    def healthy(self) -> bool:
        """Whether pointer changes are noticed and the engine holds whole weights."""
        return self.broken is None and self._task is not None and not self._task.done()

    def status(self) -> dict[str, Any]:
        """What ``GET /policy`` says of this replica."""
        pointer = self._pointer
        return {
            "version": self.engine.version,
            "previous": pointer.previous if pointer else None,
            "since": self._since,
            "generation": pointer.generation if pointer else 0,
            "swaps": [swap.to_json() for swap in self._swaps],
            "failed": self.failed,
        }

    async def _follow(self) -> None:
        unreadable = None
        while self.broken is None:
            await asyncio.sleep(self.config.poll_seconds)
            try:
                pointer = self.store.serving()
                unreadable = None
            except (PolicyError, OSError) as error:
                if str(error) != unreadable:  # once, not at every look
                    log.error("the serving pointer can't be read, policy %d stays: %s", self.engine.version, error)
                unreadable = str(error)
                continue
            if pointer is not None and pointer.generation != self._seen:
                self._seen = pointer.generation
                # Shielded: once begun, a swap is finished or undone, also when the server stops.
                swap = asyncio.create_task(self._act(pointer), name=f"swap to {pointer.version}")
                try:
                    await asyncio.shield(swap)
                except asyncio.CancelledError:
                    await swap
                    raise

    async def _act(self, pointer: Pointer) -> None:
        if pointer.version == self.engine.version:
            self._pointer, self.failed = pointer, None
            return
        swap = await self.swap_to(pointer)
        self._swaps.append(swap)
        if swap.ok:
            self._pointer, self._since, self.failed = pointer, swap.at, None
            log.info("policy %d serves, held for %.0f ms", swap.to_version, swap.hold_ms)
        else:
            self.failed = {
                "version": pointer.version,
                "generation": pointer.generation,
                "error": swap.error,
                "at": swap.at,
            }
            log.error("policy %d refused, %d stays: %s", swap.to_version, swap.from_version, swap.error)
        self._observe(swap)
        try:
            await asyncio.to_thread(_append, self.record, swap.to_json())
        except OSError as error:
            log.error("the swap to policy %d could not be recorded: %s", swap.to_version, error)

    async def swap_to(self, pointer: Pointer) -> Swap:
        """Serve another policy from the next token on, or keep the old one; which it was is in the result."""
        old = self._policy
        assert old is not None, "start() comes first"
        started = time.monotonic()
        held: float | None = None
        prefetch_ms = hold_ms = load_ms = 0.0
        in_flight = 0
        error: str | None = None
        try:
            policy = await asyncio.to_thread(self._prepare, old, pointer.version)
            await self.engine.prefetch(policy, self.config.prefetch_timeout_s)
            prefetch_ms = _since_ms(started)
            in_flight, held = self.engine.in_flight, time.monotonic()
            await self.engine.hold(recompute=self.config.recompute, timeout_s=self.config.hold_timeout_s)
            loading = time.monotonic()
            await self.engine.load(policy, self.config.hold_timeout_s)
            load_ms = _since_ms(loading)
            await self.engine.resume(self.config.hold_timeout_s)
            hold_ms = _since_ms(held)
            self._policy = policy
        except Exception as failure:  # noqa: BLE001 - whatever it was, the old policy must serve on and the cause be told
            error = _describe(failure)
            if held is not None:
                await self._restore(old, error)
                hold_ms = _since_ms(held)
        return Swap(
            at=_now(),
            from_version=old.version,
            to_version=pointer.version,
            generation=pointer.generation,
            ok=error is None,
            error=error,
            prefetch_ms=round(prefetch_ms, 3),
            hold_ms=round(hold_ms, 3),
            load_ms=round(load_ms, 3),
            in_flight=in_flight,
        )

    def _prepare(self, old: Policy, version: int) -> Policy:
        policy = self.store.verify(version)
        require_swappable(old, policy)
        if self.config.check_finite:
            require_finite(policy)
        return policy

    async def _restore(self, old: Policy, cause: str) -> None:
        """Put the old weights back into the held engine and go on; else stop the engine rather than serve a mixture."""
        try:
            await self.engine.hold(recompute=self.config.recompute, timeout_s=self.config.hold_timeout_s)
            await self.engine.prefetch(old, self.config.prefetch_timeout_s)
            await self.engine.load(old, self.config.hold_timeout_s)
            await self.engine.resume(self.config.hold_timeout_s)
        except Exception as failure:  # noqa: BLE001 - the end of the line: the engine must not go on with unknown weights
            self.broken = f"{cause}; and policy {old.version} could not be put back: {_describe(failure)}"
            log.critical("the engine is stopped: %s", self.broken)
            await self.engine.close()


def _append(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, PolicyError) else f"{type(error).__name__}: {error}"


def _since_ms(started: float) -> float:
    return (time.monotonic() - started) * 1e3


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
