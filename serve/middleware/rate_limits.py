"""Rate limits of a key: requests and tokens per minute, each a token bucket.

A bucket earns its rate, holds what it earns in ``burst_seconds``, and pays for each request. Tokens are paid for when a
request is admitted, as if it used all that it may, and what it did not use comes back. The buckets are in this
process's memory; of several API processes the first has those of all, in a fleet one process those of all replicas
(``serve.fleet.rate_limit_store``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from serve.http import Problem
from serve.middleware.keyring import Principal
from serve.middleware.token_buckets import BucketName, Buckets


class SharedBuckets(Protocol):
    """Buckets in another process; as ``Buckets``. ``take`` raises Problem 503 when they can't be reached."""

    async def take(self, name: BucketName, rate: float, capacity: float, amount: float) -> tuple[float, float]: ...

    def give_back(self, name: BucketName, amount: float) -> None: ...


class Limiter:
    """The limits of all keys. A principal without limits costs a look at two attributes."""

    def __init__(
        self,
        burst_seconds: float,
        refused: Callable[[str, Principal], None] = lambda limit, principal: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``refused``: called for every refusal, with the limit's name: requests or tokens."""
        self.shared: SharedBuckets | None = None
        """The buckets, if not in this process; set before the first request."""
        self._burst_seconds = burst_seconds
        self._refused = refused
        self.buckets = Buckets(clock)
        """This process's own, by which the others of a server count too."""

    async def take_request(self, principal: Principal) -> None:
        """Pay for one request. Raises Problem 429, or 503 (``SharedBuckets``)."""
        rate = principal.requests_per_minute
        if rate is not None:
            await self._take("requests", principal, rate, 1.0)

    async def take_tokens(self, principal: Principal, tokens: int) -> None:
        """Pay for ``tokens``: the prompt's and all that the responses may have.

        Raises Problem 429, 400 if no waiting would help, or 503 (``SharedBuckets``).
        """
        rate = principal.tokens_per_minute
        if rate is not None:
            await self._take("tokens", principal, rate, float(tokens))

    def give_back(self, principal: Principal, tokens: int) -> None:
        """Return those of ``take_tokens`` that were not used."""
        if principal.tokens_per_minute is not None and tokens > 0:
            (self.shared or self.buckets).give_back(("tokens", principal.key), tokens)

    def __len__(self) -> int:
        return len(self.buckets)

    async def _take(self, limit: str, principal: Principal, per_minute: float, amount: float) -> None:
        rate = per_minute / 60
        # Whatever the rate, one request can pass at a time.
        capacity = max(1.0, rate * self._burst_seconds)
        name = limit, principal.key
        if self.shared is None:
            wait, level = self.buckets.take(name, rate, capacity, amount)
        else:
            wait, level = await self.shared.take(name, rate, capacity, amount)
        if wait == 0:
            return
        self._refused(limit, principal)
        whose = f"{limit}_per_minute is {per_minute:g} for {principal.name}"
        if wait == float("inf"):
            raise Problem(
                400,
                f"{whose}, and this request alone may use {amount:g} {limit}, more than the {capacity:g} that "
                "may be used at once: it could never pass; ask for fewer max_tokens, responses or prompt tokens",
            )
        raise Problem(
            429, f"{whose}; {level:.4g} {limit} are left, this takes {amount:g}", retry_after=wait, limit=limit
        )
