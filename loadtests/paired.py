"""Ratios of alternating turns: of their figures or of all their answers' times, with a 95 % interval, and bars."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 400


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
    return _within(middle, math.sqrt(total) / len(logs), freedom)


def pooled(
    numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]], percent: float, seed: int = 0
) -> Ratio:
    """A percentile of all turns' values together, over the same of the turns that they are paired with.

    Its interval is Student's t on the logarithm, with the standard error by a bootstrap that draws whole pairs of
    turns: values of one turn are not independent. Times sqrt(n / (n - 1)), as a mean's error has it; an interval of
    the bootstrap's own percentiles would be too narrow for a few turns. Each side needs values in each turn.
    """
    pairs = len(numerators)
    middle = math.log(percentile(numerators, percent) / percentile(denominators, percent))
    if pairs < 2:
        return Ratio(math.exp(middle), 0.0, math.inf)
    sides = [[np.asarray(turn) for turn in side] for side in (numerators, denominators)]
    logs = []
    for chosen in np.random.default_rng(seed).integers(pairs, size=(RESAMPLES, pairs)):
        above, below = (percentile([side[turn] for turn in chosen], percent) for side in sides)
        logs.append(math.log(above / below))
    return _within(middle, statistics.stdev(logs) * math.sqrt(pairs / (pairs - 1)), pairs - 1)


def percentile(turns: Sequence[ArrayLike], percent: float) -> float:
    """Of all turns' values together: the least one that ``percent`` of them do not exceed."""
    return float(np.percentile(np.concatenate(turns), percent, method="inverted_cdf"))


def _within(middle: float, error: float, freedom: float) -> Ratio:
    """From a logarithm, its standard error and that one's degrees of freedom."""
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))
