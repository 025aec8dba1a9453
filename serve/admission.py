"""Whether a request may begin: room in the engine and the journal, and tokens in its key's rate limit.

While the server sleeps it waits.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from feedback.journal.writer import Journal
from serve.config import ServeConfig
from serve.engine import SamplingEngine
from serve.http import Problem, disconnected
from serve.middleware.keyring import Principal
from serve.middleware.rate_limits import Limiter

_RETRY_AFTER_S: Final = 5.0
_NEARLY_FULL: Final = 0.8  # of the journal's queue: past it, new rows may find no room
_COUNT_BYTES: Final = 8
_ASLEEP_RETRY_S: Final = 30.0
_ASLEEP_POLL_S: Final = 0.5


class ActiveRequests:
    """How many requests are at work in each of a server's API processes, in memory that all of them see.

    Each changes its own number alone, so there is no lock: of requests that come to several processes in the same
    microseconds one more a process may be let in than the bound allows.
    """

    def __init__(self, counts: MutableSequence[int] | memoryview | None = None, own: int = 0) -> None:
        """``counts``: by default of this process alone; ``own``: the place of this process among them."""
        self._counts: MutableSequence[int] | memoryview = [0] if counts is None else counts
        self._own = own

    @classmethod
    def in_file(cls, path: Path, processes: int, own: int) -> ActiveRequests:
        """Those in a file's memory, which the first process creates. Raises OSError."""
        if own == 0:
            path.write_bytes(bytes(_COUNT_BYTES * processes))
        with path.open("r+b") as file:
            return cls(memoryview(mmap.mmap(file.fileno(), _COUNT_BYTES * processes)).cast("q"), own)

    def add(self, change: int) -> None:
        """Change this process's number."""
        self._counts[self._own] += change

    def clear(self, place: int) -> None:
        """Another process has died, and what it had at work."""
        self._counts[place] = 0

    def total(self) -> int:
        """The sum over all processes."""
        return sum(self._counts)


class Admission:
    """Counts the requests at work and refuses those that would be neither served nor recorded."""

    def __init__(
        self,
        config: ServeConfig,
        engine: SamplingEngine,
        journal: Journal,
        unready: Callable[[], str | None],
        active: ActiveRequests | None = None,
    ) -> None:
        """``unready``: why no request can be served, or None. ``active``: those of all API processes."""
        self._config = config
        self._engine = engine
        self._journal = journal
        self._unready = unready
        self._active = active or ActiveRequests()
        self._awake = asyncio.Event()
        self._awake.set()
        self._waiting = 0

    @property
    def active(self) -> int:
        """Requests at work."""
        return self._active.total()

    @property
    def waiting(self) -> int:
        """Requests that wait until the server is awake."""
        return self._waiting

    def close(self) -> None:
        """Let no request begin before ``open``: they wait."""
        self._awake.clear()

    def open(self) -> None:
        """Let requests begin, those too that wait."""
        self._awake.set()

    @property
    def closed(self) -> bool:
        """Whether no request begins: the server sleeps, or is about to."""
        return not self._awake.is_set()

    async def wait_until_awake(self, receive: Receive) -> None:
        """Return at once unless the server sleeps, and else when it is awake. Call ``admit`` without waiting between.

        Raises Problem 503 if that takes longer than ``serve.sleep.wait_s``, or as many wait already as may, or as will
        be admitted; ClientDisconnect if the client leaves. ``receive``: of a request whose body is read.
        """
        sleep = self._config.sleep
        if self._awake.is_set():
            return
        if self._waiting >= min(sleep.waiting_requests, self._config.limits.concurrent_requests):
            raise Problem(503, f"the server sleeps, and {self._waiting} requests wait", retry_after=_ASLEEP_RETRY_S)
        until = time.monotonic() + sleep.wait_s
        self._waiting += 1
        awake, gone = asyncio.ensure_future(self._awake.wait()), asyncio.ensure_future(disconnected(receive))
        try:
            while not self._awake.is_set() and (left := until - time.monotonic()) > 0:
                if reason := self._unready():
                    raise Problem(503, reason, retry_after=_RETRY_AFTER_S)
                timeout = min(left, _ASLEEP_POLL_S)
                await asyncio.wait((awake, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    raise ClientDisconnect
        finally:
            self._waiting -= 1
            awake.cancel()
            gone.cancel()
        if not self._awake.is_set():
            raise Problem(503, f"the server sleeps, and did for {sleep.wait_s:g} s", retry_after=_ASLEEP_RETRY_S)

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request as active. Raises Problem 503."""
        limits = self._config.limits
        if reason := self._unready():
            raise Problem(503, reason, retry_after=_RETRY_AFTER_S)
        active = self._active.total()
        if active >= limits.concurrent_requests:
            raise Problem(503, f"{active} requests are at work already", retry_after=1)
        # vLLM reports its queue a few times a second. Requests since then are known here, though not their n.
        waiting = max(self._engine.stats["waiting"], active - self._config.engine.max_num_seqs)
        if waiting >= limits.waiting_responses:
            raise Problem(503, f"{waiting:g} responses wait for the engine already", retry_after=1)
        if self._journal.backlog >= _NEARLY_FULL:
            raise Problem(503, "the disk doesn't keep up: the journal's queue is nearly full", retry_after=1)
        self._active.add(1)
        try:
            yield
        finally:
            self._active.add(-1)


class TokenBudget:
    """The tokens that one request has reserved of its key's rate limit."""

    def __init__(self, limiter: Limiter, principal: Principal) -> None:
        self._limiter = limiter
        self._principal = principal
        self._reserved = 0

    async def reserve(self, tokens: int) -> None:
        """Reserve the prompts' tokens and the most that the responses may have. Raises Problem 429, 400 or 503."""
        await self._limiter.take_tokens(self._principal, tokens)
        self._reserved = tokens

    def refund(self, used: int) -> None:
        """Give back all but the ``used`` tokens."""
        self._limiter.give_back(self._principal, self._reserved - used)
        self._reserved = 0
