"""Over-optimisation: how far a candidate has moved from the first policy, and what two rewards say of its answers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from pydantic import BaseModel, ConfigDict

from evaluation.decisions.observations import Look, Observation, PartialPair, per_voice
from evaluation.decisions.plan import Plan
from evaluation.results import Interval
from evaluation.statistics import intervals


class RewardMeans(BaseModel):
    """Means over a candidate's fresh items, with bootstrap intervals; None of what has no value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    proxy: Interval | None
    holdout: Interval | None


class OverOptimisation(BaseModel):
    """By ``proxy``, the reward that training saw, and ``holdout``, one that it did not see: both policies' answers.

    ``sqrt_kl_v1``: the root of KL(first policy || candidate), in nats per token; None where that was not measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    proxy: str
    holdout: str
    items: int
    sqrt_kl_v1: float | None
    candidate: RewardMeans
    incumbent: RewardMeans


def measured(
    plan: Plan, looks: Iterable[Look], *, confidence: float, resamples: int = 2000, seed: int = 0
) -> OverOptimisation | None:
    """What a candidate's looks have seen of both rewards; None where they were not compared."""
    fresh = [one for look in looks for one in look.fresh]
    if plan.proxy is None or plan.holdout is None or not fresh:
        return None

    def mean(of: str, side: int) -> Interval | None:
        def value(one: Observation) -> float | None:
            pair: PartialPair | None = getattr(one, of)
            return None if pair is None else pair[side]

        values, _ = per_voice(fresh, value)
        if not len(values):
            return None
        found = intervals.bootstrap_mean(values, confidence=confidence, resamples=resamples, seed=seed)
        return Interval.of(found)

    moved, _ = per_voice(fresh, lambda one: one.kl_v1)
    return OverOptimisation(
        proxy=plan.proxy,
        holdout=plan.holdout,
        items=len(fresh),
        sqrt_kl_v1=float(np.sqrt(max(moved.mean(), 0.0))) if len(moved) else None,
        candidate=RewardMeans(proxy=mean("proxy", 0), holdout=mean("holdout", 0)),
        incumbent=RewardMeans(proxy=mean("proxy", 1), holdout=mean("holdout", 1)),
    )
