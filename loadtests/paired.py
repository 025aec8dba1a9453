"""Ratios of alternating turns: their mean with a 95 % interval, and what that says of a bar."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

from scipy.special import stdtrit

CONFIDENCE: Final = 0.95


class Ratio(NamedTuple):
    """A geometric mean, and its interval; its ends are infinitely far apart where one turn is all."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Of the interval, over the value."""
        return (self.high - self.low) / self.value

    def judge(self, relation: str, bar: float) -> str:
        """Of a bar, "at least" or "at most" a number: met or missed if all of the interval is, or else undecided."""
        above, below = self.low >= bar, self.high <= bar
        met, missed = (above, self.high < bar) if relation == "at least" else (below, self.low > bar)
        return "met" if met else "missed" if missed else "undecided"

    def interval(self) -> list[float | None]:
        """Its ends; an end that one turn leaves open is None, as JSON has no infinity."""
        return [round(end, 3) if math.isfinite(end) else None for end in (self.low, self.high)]


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Of pairs measured one after the other."""
    return mean([[a / b for a, b in zip(numerators, denominators, strict=True)]])


def mean(samples: Sequence[Sequence[float]]) -> Ratio:
    """The geometric mean of several cells' ratios, each cell with the same weight, and its 95 % interval.

    Student's t on the logarithms of the pairs; over cells with Welch's and Satterthwaite's degrees of freedom.
    """
    logs = [[math.log(ratio) for ratio in ratios] for ratios in samples]
    middle = statistics.fmean(statistics.fmean(each) for each in logs)
    variances = [(statistics.variance(each) / len(each), len(each) - 1) for each in logs if len(each) > 1]
    total = sum(variance for variance, _ in variances)
    if len(variances) < len(logs):
        return Ratio(math.exp(middle), 0.0, math.inf)
    if total == 0:
        return Ratio(*[math.exp(middle)] * 3)
    freedom = total**2 / sum(variance**2 / freedom for variance, freedom in variances)
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(total) / len(logs)
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))
