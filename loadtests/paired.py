"""Ratios of alternating turns: their mean with a 95 % interval, and what that says of a bar."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import t

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """A geometric mean with its interval; ``low`` and ``high`` are infinitely far apart where one turn is all."""

    mean: float
    low: float
    high: float
    turns: int

    def judge(self, relation: str, bar: float) -> dict[str, Any]:
        """A bar, "at least" or "at most" a number: met or missed if all of the interval is, or else undecided."""
        above, below = self.low >= bar, self.high <= bar
        met, missed = (above, self.high < bar) if relation == "at least" else (below, self.low > bar)
        return {"bar": f"{relation} {bar:g}", "verdict": "met" if met else "missed" if missed else "undecided"}

    def interval(self) -> list[float]:
        return [round(self.low, 3), round(self.high, 3)]


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Of pairs measured one after the other: Student's interval of the mean of their logarithms."""
    logs = [math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]
    mean, turns = statistics.fmean(logs), len(logs)
    if turns == 1:
        return Ratio(math.exp(mean), 0.0, math.inf, 1)
    half = t.ppf((1 + CONFIDENCE) / 2, turns - 1) * statistics.stdev(logs) / math.sqrt(turns)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), turns)
