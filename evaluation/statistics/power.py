"""How many items a gain needs, before any is spent: the test itself, played on draws of what items may give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from evaluation.statistics import betting
from evaluation.statistics.intervals import Floats

_RUNS = 1000
_BLOCK = 50


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What an item may give: ``values`` [k], paired differences, with ``probabilities`` [k] of sum 1."""

    values: Floats
    probabilities: Floats

    @property
    def mean(self) -> float:
        return float(self.values @ self.probabilities)


@dataclass(frozen=True)
class Need:
    """``items`` are enough in a share ``power`` of runs; None if ``max_items`` are not. ``median``: in half of them."""

    items: int | None
    median: int | None
    power: float
    max_items: int


def three_points(gain: float, differing: float, spread: float = 1.0) -> Outcomes:
    """A share ``differing`` of items differs, by +spread or -spread, so that the mean is ``gain``.

    Raises ValueError if no such distribution exists: |gain| can't exceed differing * spread.
    """
    if not 0 < differing <= 1 or not spread > 0 or abs(gain) > differing * spread:
        raise ValueError(
            f"a gain of {gain:g} is not to be had where {differing:.1%} of items differ by {spread:g}: "
            f"it lies within ±{differing * spread:g}"
        )
    up = (differing + gain / spread) / 2
    return Outcomes(np.array([-spread, 0.0, spread]), np.array([differing - up, 1 - differing, up]))


def tilted(differences: ArrayLike, gain: float) -> Outcomes:
    """Past ``differences`` [n], weighted so that their mean is ``gain``: what differed goes on differing as much.

    Weights are proportional to exp(t * difference), the nearest distribution in relative entropy that has this mean
    (Csiszár 1975, "I-divergence geometry"). Values, and with them the bounds and the share of zeros among equals, stay.
    Raises ValueError if ``gain`` lies outside the past differences.
    """
    values, counts = np.unique(np.asarray(differences, np.float64), return_counts=True)
    if not len(values) or not values[0] < gain < values[-1]:
        seen = f"[{values[0]:g}, {values[-1]:g}]" if len(values) else "none"
        raise ValueError(f"a gain of {gain:g} can't come from past differences within {seen}")

    def weigh(t: float) -> Outcomes:
        logs = np.log(counts) + t * (values - gain)
        weights = np.exp(logs - logs.max())
        return Outcomes(values, weights / weights.sum())

    reach = 1.0
    while not weigh(-reach).mean <= gain <= weigh(reach).mean:
        reach *= 2
    below, above = -reach, reach
    for _ in range(100):
        middle = (below + above) / 2
        below, above = (middle, above) if weigh(middle).mean < gain else (below, middle)
    return weigh(above)


def items_needed(
    outcomes: Outcomes,
    hypothesis: betting.Hypothesis,
    alpha: float,
    *,
    power: float = 0.9,
    max_items: int = 100_000,
    seed: int = 0,
) -> Need:
    """How many items reject ``hypothesis`` at level ``alpha`` with probability ``power``, rounded up to 50.

    ``betting.bet`` is played 1,000 times on independent draws, so the power at that number is right within 0.02 or so.
    """
    if not 0 < power < 1 or not 0 < alpha < 1:
        raise ValueError(f"power {power:g} at level {alpha:g}: both must lie between 0 and 1")
    rng = np.random.default_rng(seed)
    cumulative = np.cumsum(outcomes.probabilities)[:-1]
    wealth = betting.start((_RUNS,))
    median: int | None = None
    while wealth.n < max_items:
        drawn = outcomes.values[np.searchsorted(cumulative, rng.random((_RUNS, min(_BLOCK, max_items - wealth.n))))]
        wealth = betting.bet(wealth, drawn, hypothesis)
        share = float(np.mean(betting.rejects(wealth, alpha)))
        if median is None and share >= 0.5:
            median = wealth.n
        if share >= power:
            return Need(wealth.n, median, power, max_items)
    return Need(None, median, power, max_items)


def detectable_gain(items: int, differing: float, alpha: float, *, spread: float = 1.0) -> float:
    """About which gain ``items`` items show half of the time, where a share ``differing`` differs by ``spread``.

    The expected log-wealth of the best constant bet, gain² / (2 · variance) an item, against log(1/alpha) and the
    mixture's price of half a log of the items that differ. A first guess for ``items_needed``.
    """
    price = -math.log(alpha) + 0.5 * math.log(max(1.0, items * differing)) + 0.5
    return min(differing * spread, spread * math.sqrt(2 * differing * price / items))
