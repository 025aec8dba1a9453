"""Prometheus metrics that cost little where they are counted: prometheus_client's own, but for when they add up.

A histogram of prometheus_client takes a lock and looks through its buckets at each observation. At some thousand tokens
a second that is paid for with requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from prometheus_client import Counter, Histogram
from prometheus_client.samples import Sample

_MOST_WAITING: Final = 4096


class Tally(Histogram):
    """A histogram that sorts its observations into buckets when somebody looks, or many wait."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._waiting: deque[float] = deque()
        self._sorting = threading.Lock()  # /metrics is rendered beside the event loop

    def observe(self, amount: float, exemplar: Any = None) -> None:
        """Observe; an exemplar is not kept."""
        waiting = self._waiting
        waiting.append(amount)
        if len(waiting) >= _MOST_WAITING:
            self._sort()

    def _child_samples(self) -> Iterable[Sample]:
        self._sort()
        return super()._child_samples()

    def _sort(self) -> None:
        with self._sorting:
            values = np.array([self._waiting.popleft() for _ in range(len(self._waiting))])
        if len(values):
            bounds = self._upper_bounds
            counts = np.bincount(np.searchsorted(bounds, values), minlength=len(bounds))
            for bucket, count in zip(self._buckets, counts.tolist(), strict=False):
                if count:
                    bucket.inc(count)
            self._sum.inc(float(values.sum()))


class Count(Counter):
    """A counter for which adding nothing is nothing."""

    def inc(self, amount: float = 1, exemplar: Any = None) -> None:
        """Add."""
        if amount:
            super().inc(amount, exemplar)
