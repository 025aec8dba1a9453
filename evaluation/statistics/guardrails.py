"""What a candidate is measured by: success metrics that must rise, guardrails that must not fall by their margin.

Both are one-sided tests of a bounded mean by the same machinery (``betting``). A *gain* is a metric's mean, with its
sign turned where lower is better. A success metric's gain must be shown to exceed its margin (0: better); a guardrail's
to exceed minus its margin (non-inferiority). Beside each runs the test of the opposite, so that harm and hopelessness
are shown as well, and not inferred from a lack of evidence.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from evaluation.statistics import betting
from evaluation.statistics.intervals import Floats


@dataclass(frozen=True)
class Metric:
    """One figure per item in [low, high]: a paired difference candidate - incumbent, or a figure of the candidate.

    ``margin``, 0 or more: a success metric's gain must lie above it; a guardrail may lose less than it. ``worthwhile``
    (success metrics, above the margin): a gain that is shown to be smaller ends the race; by default the margin itself.
    A *watch* is a guardrail for which there may be too few items to show that nothing is lost: harm that is shown
    refuses, and a lack of evidence does not.
    """

    name: str
    role: Literal["success", "guardrail", "watch"]
    low: float
    high: float
    margin: float = 0.0
    better: Literal["higher", "lower"] = "higher"
    worthwhile: float | None = None

    def __post_init__(self) -> None:
        if self.margin < 0 or (self.role != "success" and self.margin == 0):
            raise ValueError(
                f"{self.name} can't have a margin of {self.margin:g}: "
                "that a guardrail loses nothing at all can't be shown by any number of items"
            )
        if self.worthwhile is not None and (self.role != "success" or self.worthwhile < self.margin):
            raise ValueError(f"{self.name}: a gain of {self.worthwhile:g} can't be what is worthwhile")
        _ = self.shown, self.refuted  # raise ValueError where a bound leaves nothing to test

    @property
    def shown(self) -> betting.Hypothesis:
        """Rejected when the gain is shown to exceed what it must."""
        return self._against(self.margin if self.role == "success" else -self.margin, "greater")

    @property
    def refuted(self) -> betting.Hypothesis:
        """Rejected when the gain is shown to fall short: below ``worthwhile``, or worse than a guardrail allows."""
        least = self.margin if self.worthwhile is None else self.worthwhile
        return self._against(least if self.role == "success" else -self.margin, "less")

    def _against(self, gain: float, evidence_for: Literal["greater", "less"]) -> betting.Hypothesis:
        if self.better == "higher":
            return betting.Hypothesis(gain, self.low, self.high, evidence_for)
        return betting.Hypothesis(-gain, self.low, self.high, "less" if evidence_for == "greater" else "greater")


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a metric's observations have shown so far: the states of its two tests."""

    shown: betting.Wealth
    refuted: betting.Wealth

    @classmethod
    def none(cls) -> Evidence:
        return cls(betting.start(), betting.start())


def observe(metric: Metric, evidence: Evidence, values: ArrayLike, items: Sequence[Hashable] | None = None) -> Evidence:
    """The evidence with ``values`` [n] of further items. Raises OutOfBounds, naming the metric and the item."""
    try:
        return Evidence(
            betting.bet(evidence.shown, values, metric.shown, items),
            betting.bet(evidence.refuted, values, metric.refuted, items),
        )
    except betting.OutOfBounds as error:
        raise betting.OutOfBounds(f"{metric.name}: {error}") from None


def relative_difference(candidate: ArrayLike, incumbent: ArrayLike) -> Floats:
    """``(candidate - incumbent) / max(candidate, incumbent)`` [n], in [-1, 1]; 0 where both are 0.

    For lengths and latencies, which have no bound of their own. Raises ValueError if one is negative.
    """
    a, b = np.asarray(candidate, np.float64), np.asarray(incumbent, np.float64)
    if (a < 0).any() or (b < 0).any():
        raise ValueError("relative differences are of figures that are 0 or more")
    larger = np.maximum(a, b)
    return np.divide(a - b, larger, out=np.zeros_like(larger), where=larger > 0)


# Margins are starting points: what a loss of this size costs users is for whoever sets the gate to say. Bounds are
# those of the paired difference, except KL's: nats a token to the other policy, cut off at 1 by the caller.
GUARDRAILS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("kl_incumbent", "guardrail", 0, 1, margin=0.2, better="lower"),
        Metric("kl_v1", "guardrail", 0, 1, margin=0.5, better="lower"),
        Metric("length", "guardrail", -1, 1, margin=0.1, better="lower"),  # by relative_difference
        Metric("truncation", "guardrail", -1, 1, margin=0.02, better="lower"),
        Metric("distinct_n", "guardrail", -1, 1, margin=0.05),
        Metric("repetition", "guardrail", -1, 1, margin=0.05, better="lower"),
        Metric("regression", "guardrail", -1, 1, margin=0.02),  # reward on items that decided before
        Metric("holdout_reward", "guardrail", -1, 1, margin=0.1),
        Metric("latency", "guardrail", -1, 1, margin=0.1, better="lower"),  # by relative_difference
    )
}


def segment_guardrails(success: Metric, segments: Iterable[str], margin: float) -> dict[str, Metric]:
    """A guardrail per segment on ``success``, named ``reward[segment]``: no segment falls by ``margin``."""
    of = replace(success, role="guardrail", margin=margin, worthwhile=None)
    return {segment: replace(of, name=f"{success.name}[{segment}]") for segment in segments}
