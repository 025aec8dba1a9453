"""How much a key may ask for: requests and tokens a minute, each a token bucket, in this process's memory.

A bucket earns its rate, holds what it earns in ``burst_seconds``, and pays for each request. Tokens are paid for when a
request is admitted, as if it used all that it may, and what it did not use comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from serve.api.http import Problem
from serve.auth import Principal

_SWEEP_EVERY: Final = 1024  # buckets made between two looks for those that are full again
_ENOUGH: Final = 1e-9  # a level that is this little short was earned, but for rounding


class Bucket:
    """One bucket: earns ``rate`` a second up to ``capacity``, full at first. Times in seconds, of any one clock."""

    __slots__ = ("at", "capacity", "level", "rate")

    def __init__(self, rate: float, capacity: float, now: float) -> None:
        self.rate = rate
        self.capacity = capacity
        self.level = capacity
        self.at = now

    def take(self, amount: float, now: float) -> float:
        """Pay ``amount`` and return 0, or pay nothing and return the seconds until it could be paid.

        Infinity if the bucket can't hold as much.
        """
        level = self.fill(now)
        missing = amount - level
        if missing <= _ENOUGH * self.capacity:
            self.level = max(0.0, level - amount)
            return 0.0
        return missing / self.rate if amount <= self.capacity else float("inf")

    def give_back(self, amount: float, now: float) -> None:
        """Undo part of a payment; what doesn't fit is lost."""
        self.level = min(self.capacity, self.fill(now) + amount)

    def fill(self, now: float) -> float:
        """The level at ``now``; a clock that goes back earns nothing."""
        if now > self.at:
            self.level = min(self.capacity, self.level + (now - self.at) * self.rate)
            self.at = now
        return self.level


class Limiter:
    """The buckets of all keys. A principal without limits costs a look at two attributes."""

    def __init__(
        self,
        burst_seconds: float,
        refused: Callable[[str, Principal], None] = lambda limit, principal: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``refused``: told of every refusal, with the limit's name: requests or tokens."""
        self._burst_seconds = burst_seconds
        self._refused = refused
        self._clock = clock
        self._buckets: dict[tuple[str, str | None], Bucket] = {}
        self._sweep_at = _SWEEP_EVERY

    def take_request(self, principal: Principal) -> None:
        """Pay for one request. Raises Problem 429."""
        rate = principal.requests_per_minute
        if rate is not None:
            self._take("requests", principal, rate, 1.0)

    def take_tokens(self, principal: Principal, tokens: int) -> None:
        """Pay for ``tokens``: the prompt's and all that the responses may have.

        Raises Problem 429, or 400 if no waiting would help.
        """
        rate = principal.tokens_per_minute
        if rate is not None:
            self._take("tokens", principal, rate, float(tokens))

    def give_back(self, principal: Principal, tokens: int) -> None:
        """Return those of ``take_tokens`` that were not used."""
        rate = principal.tokens_per_minute
        if rate is not None and tokens > 0:
            bucket = self._buckets.get(("tokens", principal.key))
            if bucket is not None:  # else it was full, and has been dropped
                bucket.give_back(tokens, self._clock())

    def __len__(self) -> int:
        return len(self._buckets)

    def _take(self, limit: str, principal: Principal, per_minute: float, amount: float) -> None:
        now = self._clock()
        bucket = self._bucket(limit, principal.key, per_minute, now)
        wait = bucket.take(amount, now)
        if wait == 0:
            return
        self._refused(limit, principal)
        whose = f"{limit}_per_minute is {per_minute:g} for {principal.name}"
        if wait == float("inf"):
            raise Problem(
                400,
                f"{whose}, and this request alone may use {amount:g} {limit}, more than the {bucket.capacity:g} that "
                "may be used at once: it could never pass; ask for fewer max_tokens, responses or prompt tokens",
            )
        raise Problem(
            429, f"{whose}; {bucket.level:.4g} {limit} are left, this takes {amount:g}", retry_after=wait, limit=limit
        )

    def _bucket(self, limit: str, key: str | None, per_minute: float, now: float) -> Bucket:
        rate = per_minute / 60
        # Whatever the rate, one request can pass at a time.
        capacity = max(1.0, rate * self._burst_seconds)
        bucket = self._buckets.get((limit, key))
        if bucket is None:
            if len(self._buckets) >= self._sweep_at:
                self._sweep(now)
            bucket = self._buckets[limit, key] = Bucket(rate, capacity, now)
        elif bucket.rate != rate:  # the key file has changed
            level = bucket.fill(now)
            bucket.rate, bucket.capacity, bucket.level = rate, capacity, min(level, capacity)
        return bucket

    def _sweep(self, now: float) -> None:
        """Drop the buckets that are full: a fresh one is the same."""
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if bucket.fill(now) < bucket.capacity}
        self._sweep_at = len(self._buckets) + _SWEEP_EVERY
