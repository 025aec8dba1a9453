"""Whether a request may begin: room in the engine and the journal, and tokens in its key's rate limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from feedback.journal.writer import Journal
from serve.config import ServeConfig
from serve.engine import SamplingEngine
from serve.http import Problem
from serve.middleware.keyring import Principal
from serve.middleware.rate_limits import Limiter

_RETRY_AFTER_S: Final = 5.0
_NEARLY_FULL: Final = 0.8  # of the journal's queue: past it, new rows may find no room


class Admission:
    """Counts the requests at work and refuses those that would be neither served nor recorded."""

    def __init__(
        self, config: ServeConfig, engine: SamplingEngine, journal: Journal, unready: Callable[[], str | None]
    ) -> None:
        """``unready``: why no request can be served, or None."""
        self._config = config
        self._engine = engine
        self._journal = journal
        self._unready = unready
        self._active = 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request as active. Raises Problem 503."""
        limits = self._config.limits
        if reason := self._unready():
            raise Problem(503, reason, retry_after=_RETRY_AFTER_S)
        if self._active >= limits.concurrent_requests:
            raise Problem(503, f"{self._active} requests are at work already", retry_after=1)
        # vLLM reports its queue a few times a second. Requests since then are known here, though not their n.
        waiting = max(self._engine.stats["waiting"], self._active - self._config.engine.max_num_seqs)
        if waiting >= limits.waiting_responses:
            raise Problem(503, f"{waiting:g} responses wait for the engine already", retry_after=1)
        if self._journal.backlog >= _NEARLY_FULL:
            raise Problem(503, "the disk doesn't keep up: the journal's queue is nearly full", retry_after=1)
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1


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
