"""What pairs of responses to the same requests show: harm, none beyond the margins, or nothing yet.

Each pair is one observation, in the order in which its request was answered, and each measure a mean of bounded
numbers, tested by betting: valid at every look (``evaluation.statistics.betting``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from evaluation.config import FEW_MISSING, JUDGED_MISSING, SCORER_DOWN, ShadowConfig
from evaluation.statistics import betting
from evaluation.statistics.guardrails import Evidence, Metric, observe, relative_difference
from evaluation.statistics.intervals import Floats

Decision = Literal["harm", "no worse", "no harm shown", "can't tell"]
Measure = Literal["reward", "length", "truncation", "errors"]

MEASURES: Final[tuple[Measure, ...]] = ("reward", "length", "truncation", "errors")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Answer(_Record):
    """One response: its reward, None without one, its length, whether max_tokens cut it, whether the policy failed.

    ``withheld``: there is nothing to measure, as it was redacted or the engine refused the request.
    """

    reward: float | None
    tokens: int
    cut: bool
    failed: bool = False
    withheld: bool = False


class Pair(_Record):
    """A request that both policies have answered. ``unit`` and ``draw``: hashes of whose it is, and of which it is."""

    unit: str
    draw: str
    candidate: Answer
    incumbent: Answer


class ShadowPlan(_Record):
    """By what a shadow is decided. ``margins``: what may be lost of each measure that is compared, in its own units."""

    share: float
    min_requests: int
    alpha: float
    reward_bounds: tuple[float, float]
    margins: dict[Measure, float]

    @classmethod
    def of(cls, config: ShadowConfig) -> Self:
        width = config.reward_bounds[1] - config.reward_bounds[0]
        margins: dict[Measure, float | None] = {
            "reward": config.reward * width,
            "length": config.length,
            "truncation": config.truncation,
            "errors": config.errors,
        }
        return cls(
            share=config.share,
            min_requests=config.min_requests,
            alpha=config.alpha,
            reward_bounds=config.reward_bounds,
            margins={name: margin for name, margin in margins.items() if margin is not None},
        )


class Compared(_Record):
    """One measure over ``n`` pairs: candidate less incumbent, of ``errors`` the candidate's share alone.

    ``low`` and ``high`` hold at all looks. ``harm``: more than the margin is shown to be lost; ``holds``: less is.
    """

    measure: Measure
    margin: float
    n: int
    value: float | None
    low: float
    high: float
    harm: bool
    holds: bool


class Comparison(_Record):
    """``requests`` were answered, of which ``unscored`` have no reward for the incumbent's response. ``reasons``:
    sentences."""

    decision: Decision
    reasons: tuple[str, ...]
    requests: int
    unscored: int
    compared: tuple[Compared, ...]


def compare(plan: ShadowPlan, pairs: Sequence[Pair]) -> Comparison:
    """What the pairs show, in their order. The same ones give the same, to the last bit.

    Harm is shown wrongly with probability ``alpha`` at most, over all measures and looks. Each measure is shown to hold
    at ``alpha`` by itself: all of them must. A candidate gains nothing by a response that has no reward: it counts as
    the least one. A request whose incumbent's response has none says nothing of rewards, and where these are many the
    scorer is at fault, and no candidate. Raises OutOfBounds for a reward outside the bounds.
    """
    found = tuple(_of_measure(plan, measure, pairs) for measure in MEASURES if measure in plan.margins)
    unscored = sum(pair.incumbent.reward is None for pair in pairs)
    down = scorer_is_down(unscored, len(pairs))
    harmed = [one for one in found if one.harm and not (down and one.measure == "reward")]
    if len(pairs) < plan.min_requests:
        decision: Decision = "can't tell"
        reasons = [f"{len(pairs)} requests were answered, and a result rests on {plan.min_requests} at least"]
    elif harmed:
        decision, reasons = "harm", [_say(one, "is shown to be worse") for one in harmed]
    elif unscored > JUDGED_MISSING * len(pairs):
        decision = "can't tell"
        reasons = [f"{unscored} of {len(pairs)} responses that people got have no reward, and 5% may lack one"]
    elif all(one.holds for one in found):
        decision, reasons = "no worse", [_say(one, "is shown to be no worse") for one in found]
    else:
        decision = "no harm shown"
        reasons = [_say(one, "is not shown to be within its margin") for one in found if not one.holds]
    return Comparison(decision=decision, reasons=tuple(reasons), requests=len(pairs), unscored=unscored, compared=found)


def scorer_is_down(missing: int, n: int) -> bool:
    """Whether so many of n responses of the incumbent have no reward that the scorer is at fault."""
    return missing > max(FEW_MISSING, SCORER_DOWN * n)


def path(plan: ShadowPlan, measure: Measure, pairs: Sequence[Pair]) -> tuple[Floats, Floats, Floats]:
    """A measure's mean and its bounds after each pair that has it, [n] each."""
    values = _values(plan, measure, pairs)
    metric, alpha = _metric(plan, measure), plan.alpha / len(plan.margins)
    low, high = betting.confidence_sequence(values, metric.low, metric.high, 2 * alpha)
    return np.cumsum(values) / np.arange(1, len(values) + 1), low, high


def _of_measure(plan: ShadowPlan, measure: Measure, pairs: Sequence[Pair]) -> Compared:
    metric, alpha = _metric(plan, measure), plan.alpha / len(plan.margins)
    values = _values(plan, measure, pairs)
    evidence = observe(metric, Evidence.none(), values)
    low, high = betting.interval(values, metric.low, metric.high, 2 * alpha)
    return Compared(
        measure=measure,
        margin=metric.margin,
        n=len(values),
        value=float(evidence.shown.mean) if len(values) else None,
        low=low,
        high=high,
        harm=bool(betting.rejects(evidence.refuted, alpha)),
        holds=bool(betting.rejects(evidence.shown, plan.alpha)),
    )


def _metric(plan: ShadowPlan, measure: Measure) -> Metric:
    margin = plan.margins[measure]
    if measure == "reward":
        width = plan.reward_bounds[1] - plan.reward_bounds[0]
        return Metric(measure, "guardrail", -width, width, margin)
    return Metric(measure, "guardrail", 0.0 if measure == "errors" else -1.0, 1.0, margin, "lower")


def _values(plan: ShadowPlan, measure: Measure, pairs: Sequence[Pair]) -> Floats:
    """One number a pair that has the measure. A candidate's response without a reward has the least that there is."""
    if measure == "errors":
        return np.array([float(pair.candidate.failed) for pair in pairs])
    answered = [pair for pair in pairs if not (pair.candidate.failed or pair.candidate.withheld)]
    if measure == "length":
        lengths = ([pair.candidate.tokens for pair in answered], [pair.incumbent.tokens for pair in answered])
        return relative_difference(*lengths)
    if measure == "truncation":
        return np.array([float(pair.candidate.cut) - float(pair.incumbent.cut) for pair in answered])
    low, high = plan.reward_bounds
    scored = [pair for pair in pairs if pair.incumbent.reward is not None]
    rewards = [low if pair.candidate.reward is None else pair.candidate.reward for pair in scored]
    before = [pair.incumbent.reward for pair in scored]
    draws = [pair.draw for pair in scored]
    return betting.paired_differences(np.array(rewards, np.float64), np.array(before, np.float64), low, high, draws)


def _say(one: Compared, what: str) -> str:
    value = "-" if one.value is None else f"{one.value:+.4f}"
    return (
        f"{one.measure} {what}: {value}, [{one.low:+.4f}, {one.high:+.4f}] at any time, over {one.n} requests, where "
        f"{one.margin:g} may be lost"
    )
