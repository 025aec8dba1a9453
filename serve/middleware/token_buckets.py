"""Token buckets. A process that counts for a whole fleet imports this and no more."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

BucketName = tuple[str, str | None]
"""Which limit, and whose: a key's id, None without keys."""

_SWEEP_EVERY: Final = 1024  # new buckets between two sweeps for those that are full again
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


class Buckets:
    """Buckets by name. One that is full again is dropped: a fresh one is the same."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[BucketName, Bucket] = {}
        self._sweep_at = _SWEEP_EVERY

    def take(self, name: BucketName, rate: float, capacity: float, amount: float) -> tuple[float, float]:
        """Pay from a bucket that earns ``rate`` a second up to ``capacity``.

        Returns what ``Bucket.take`` does, and the level. With another rate than before, the level is kept.
        """
        now = self._clock()
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= self._sweep_at:
                self._sweep(now)
            bucket = self._buckets[name] = Bucket(rate, capacity, now)
        elif bucket.rate != rate:
            level = bucket.fill(now)
            bucket.rate, bucket.capacity, bucket.level = rate, capacity, min(level, capacity)
        return bucket.take(amount, now), bucket.level

    def give_back(self, name: BucketName, amount: float) -> None:
        """Return part of what was paid."""
        bucket = self._buckets.get(name)
        if bucket is not None:  # else it was full, and has been dropped
            bucket.give_back(amount, self._clock())

    def __len__(self) -> int:
        return len(self._buckets)

    def _sweep(self, now: float) -> None:
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if bucket.fill(now) < bucket.capacity}
        self._sweep_at = len(self._buckets) + _SWEEP_EVERY
