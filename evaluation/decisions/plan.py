"""By what a candidate is judged: settled before its first look, and the same for all of its looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from evaluation.config import JUDGING, EvaluationConfig, GateConfig
from evaluation.decisions.observations import Look, Observation, difference, per_voice, relative
from evaluation.statistics import betting, power
from evaluation.statistics.error_budget import ErrorBudget
from evaluation.statistics.guardrails import GUARDRAILS, Metric, segment_guardrails
from evaluation.statistics.intervals import Floats
from evaluation.suites.decoding import GREEDY, Decoding

GUARDRAIL_ALPHA: Final = 0.01
BETA: Final = 0.05
"""The levels at which guardrails are shown, and at which harm and hopelessness are (``statistics.verdict.decide``)."""

_DIFFERING: Final = 0.2  # share of a segment's items that are taken to differ, to know how many show that none is lost
HOLDOUT: Final = "holdout_reward"
"""The guardrail on the reward that training did not see."""

_ORDINARY: Final = ("length", "truncation", "distinct_n", "repetition")
LATENCY: Final = "latency"
"""The guardrail on how long a token takes, of policies of different shapes or types."""


@dataclass(frozen=True)
class Compared:
    """By which two rewards a candidate is compared beside the gate's own; ``missing``: why it is not by the second.

    ``proxy`` and ``holdout`` identify the reward that training saw and the one that it did not see, which lies between
    ``bounds``.
    """

    proxy: str | None
    holdout: str | None
    bounds: tuple[float, float] = (0.0, 1.0)
    missing: str | None = None


class GuardedSuite(BaseModel):
    """A guardrail suite: the sha256 of its file, what scores it, and how much mean reward may be lost, absolute."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    sha256: str
    scorer: str
    low: float
    high: float
    margin: float

    def metric(self, name: str) -> Metric:
        """The guardrail ``suite[name]``."""
        width = self.high - self.low
        return Metric(f"suite[{name}]", "guardrail", -width, width, self.margin)

    def gain(self, one: Observation) -> float:
        """Candidate less incumbent; a missing score counts against the candidate. Raises OutOfBounds with the item."""
        known = [value for value in (one.candidate, one.incumbent) if value is not None]
        betting.check_bounds(np.array(known), self.low, self.high, [one.item] * len(known))
        candidate = self.low if one.candidate is None else one.candidate
        return candidate - (self.high if one.incumbent is None else one.incumbent)


class Plan(BaseModel):
    """Settings of one candidate's race, as its first look found them.

    ``low`` and ``high`` bound a policy's figure of ``metric``; ``margins`` are those of guardrails, by name, and those
    of ``segments``, ``watched`` (segments too rare to show anything of but harm) and ``regression`` are absolute.
    ``level`` is the candidate's share of ``budget``; ``scorer`` identifies all that decides a score, ``judged`` says
    that of its scores none is left out, and ``compared`` that it compares two answers. ``proxy`` and ``holdout``
    identify the reward that training saw, if it can be had, and the one that it did not see; ``holdout_bounds`` are the
    latter's. ``not_compared``: why the guardrail ``holdout_reward`` does not decide. ``suites``: guardrail suites by
    name. ``decoding``: how items are answered, those of suites too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    metric: Literal["reward", "accuracy"]
    low: float
    high: float
    min_difference: float
    worthwhile: float | None
    level: float
    guardrail_alpha: float
    beta: float
    min_items: int
    max_items: int
    max_missing: float
    judged: bool
    compared: bool = False
    scorer: str
    margins: dict[str, float]
    segments: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    regression: Literal["guardrail", "watch"] | None = None
    proxy: str | None = None
    holdout: str | None = None
    holdout_bounds: tuple[float, float] = (0.0, 1.0)
    not_compared: str | None = None
    suites: dict[str, GuardedSuite] = {}
    decoding: Decoding = GREEDY
    rule: Literal["e_lond", "fixed_horizon"]
    alpha: float
    horizon: int

    @property
    def budget(self) -> ErrorBudget:
        return ErrorBudget(self.alpha, self.rule, self.horizon)

    @property
    def success(self) -> Metric:
        """What must be shown to be better."""
        width = self.high - self.low
        worthwhile = None if self.worthwhile is None else max(self.worthwhile, self.min_difference)
        return Metric(self.metric, "success", -width, width, self.min_difference, worthwhile=worthwhile)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The success metric and all guardrails. Raises ValueError for margins that leave nothing to test."""
        found = [self.success]
        found += [
            replace(GUARDRAILS[name], margin=self.margins[name])
            for name in (*_ORDINARY, LATENCY)
            if name in self.margins
        ]
        for name, guardrail in (("kl", GUARDRAILS["kl_incumbent"]), ("kl_v1", GUARDRAILS["kl_v1"])):
            if name in self.margins:
                margin = self.margins[name]
                found.append(replace(guardrail, name=name, high=max(1.0, 2 * margin), margin=margin))
        if HOLDOUT in self.margins:
            width, margin = self.holdout_bounds[1] - self.holdout_bounds[0], self.margins[HOLDOUT]
            found.append(replace(GUARDRAILS[HOLDOUT], low=-width, high=width, margin=margin))
        if self.segments or self.watched:
            of = segment_guardrails(self.success, (*self.segments, *self.watched), self.margins["segments"])
            found += [
                metric if segment in self.segments else replace(metric, role="watch") for segment, metric in of.items()
            ]
        if self.regression is not None:
            margin = self.margins["regression"]
            regression = replace(self.success, name="regression", margin=margin, worthwhile=None, role=self.regression)
            found.append(regression)
        return (*found, *(suite.metric(name) for name, suite in self.suites.items()))

    def gain(self, one: Observation) -> float | None:
        """What the success metric makes of an item: candidate less incumbent; None if it is left out.

        Raises OutOfBounds, naming the item, for a reward outside the declared bounds.
        """
        pair = one.candidate, one.incumbent
        if self.metric == "reward":
            known = [value for value in pair if value is not None]
            try:
                betting.check_bounds(np.array(known), self.low, self.high, [one.item] * len(known))
            except betting.OutOfBounds as error:
                why = f"{error} of evaluation.gate.reward_bounds, which the candidate keeps from its first look on"
                raise betting.OutOfBounds(f"{why}: with others train another candidate") from None
        else:
            pair = tuple(None if value is None else float(value == 1) for value in pair)  # type: ignore[assignment]
        candidate, incumbent = pair
        if self.judged:
            candidate = self.low if candidate is None else candidate
            incumbent = self.high if incumbent is None else incumbent
        return None if candidate is None or incumbent is None else candidate - incumbent

    def holdout_gain(self, one: Observation) -> float | None:
        """Candidate less incumbent by the held-out reward; None if it has none for the incumbent.

        An answer of the candidate's that it can't score counts as its worst.
        """
        candidate, incumbent = one.holdout or (None, None)
        if incumbent is None:
            return None
        return (self.holdout_bounds[0] if candidate is None else candidate) - incumbent

    def values(self, look: Look) -> dict[str, tuple[Floats, list[str]]]:
        """What each metric observes at a look: values [k], a voice each, and the items that name them."""
        fresh, found = look.fresh, dict[str, tuple[Floats, list[str]]]()
        for metric in self.metrics:
            if metric.name.startswith("suite["):
                continue
            match metric.name:
                case self.metric:
                    found[metric.name] = per_voice(fresh, self.gain)
                case "length":
                    found[metric.name] = per_voice(fresh, lambda one: relative(one.length))
                case "latency":
                    found[metric.name] = per_voice(
                        fresh, lambda one: None if one.latency is None else relative(one.latency)
                    )
                case "truncation":
                    found[metric.name] = per_voice(fresh, lambda one: difference(one.truncated))
                case "distinct_n":
                    found[metric.name] = per_voice(fresh, lambda one: difference(one.distinct))
                case "repetition":
                    found[metric.name] = per_voice(fresh, lambda one: difference(one.repeated))
                case "kl":
                    found[metric.name] = per_voice(fresh, partial(_at_most, metric.high, lambda one: one.kl))
                case "kl_v1":
                    found[metric.name] = per_voice(fresh, partial(_at_most, metric.high, lambda one: one.kl_v1))
                case "holdout_reward":
                    found[metric.name] = per_voice(fresh, self.holdout_gain)
                case "regression":
                    found[metric.name] = per_voice(look.regression, self.gain)
                case _:
                    segment = metric.name.removeprefix(f"{self.metric}[").removesuffix("]")
                    found[metric.name] = per_voice([one for one in fresh if one.segment == segment], self.gain)
        for name, suite in self.suites.items():
            try:
                found[f"suite[{name}]"] = per_voice(look.suites.get(name, ()), suite.gain)
            except betting.OutOfBounds as error:
                raise betting.OutOfBounds(f"{error} of evaluation.suites.{name}.reward_bounds") from None
        return found


def plan(
    config: EvaluationConfig,
    *,
    scorer: str,
    level: float,
    fresh_segments: Mapping[str, int],
    fresh: int,
    decided: int,
    rewards: Compared | None = None,
    suites: Mapping[str, GuardedSuite] | None = None,
    decoding: Decoding = GREEDY,
    timed: bool = False,
) -> Plan:
    """The plan of a candidate that is about to be looked at for the first time.

    Args:
        scorer: identifies what scores.
        level: its share of the error budget.
        fresh_segments: how many fresh voices each segment of the suite has.
        fresh: how many there are in all.
        decided: how many voices have decided on earlier candidates.
        rewards: what training saw and what it did not; None: they were not asked for.
        suites: guardrail suites, by name.
        decoding: how items are answered.
        timed: a token may take longer of one policy than of the other, and is timed.
    """
    gate, judged = config.gate, config.scorer in JUDGING
    low, high = (0.0, 1.0) if gate.metric == "accuracy" else gate.reward_bounds
    width = high - low
    guardrails = gate.guardrails
    margins = {name: margin for name in _ORDINARY if (margin := getattr(guardrails, name)) is not None}
    if timed and guardrails.latency is not None:
        margins[LATENCY] = guardrails.latency
    if gate.max_kl is not None:
        margins["kl"] = gate.max_kl
    if guardrails.kl_v1 is not None:
        margins["kl_v1"] = guardrails.kl_v1
    compared: dict[str, Any] = {}
    if guardrails.holdout_reward is not None and rewards is not None:
        compared = {"not_compared": rewards.missing}
        if rewards.missing is None:
            bounds = rewards.bounds
            margins[HOLDOUT] = guardrails.holdout_reward * (bounds[1] - bounds[0])
            compared = {"proxy": rewards.proxy, "holdout": rewards.holdout, "holdout_bounds": bounds}
    segments: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    if guardrails.segments is not None and fresh_segments:
        margins["segments"] = guardrails.segments * width
        needed = _needed(gate, margins["segments"], width)
        enough = {name: gate.max_items * count / max(fresh, 1) >= needed for name, count in fresh_segments.items()}
        segments = tuple(sorted(name for name, can in enough.items() if can))
        watched = tuple(sorted(name for name, can in enough.items() if not can))
    regression: Literal["guardrail", "watch"] | None = None
    if guardrails.regression is not None and decided:
        margins["regression"] = guardrails.regression * width
        regression = "guardrail" if decided >= _needed(gate, margins["regression"], width) else "watch"
    return Plan(
        metric=gate.metric,
        low=low,
        high=high,
        min_difference=gate.min_difference,
        worthwhile=gate.worthwhile,
        level=level,
        guardrail_alpha=GUARDRAIL_ALPHA,
        beta=BETA,
        min_items=gate.min_items,
        max_items=gate.max_items,
        max_missing=gate.missing_allowed(config.scorer),
        judged=judged,
        compared=config.scorer == "pairwise",
        scorer=scorer,
        margins=margins,
        segments=segments,
        watched=watched,
        regression=regression,
        **compared,
        suites=dict(suites or {}),
        decoding=decoding,
        rule=gate.budget.rule,
        alpha=gate.budget.alpha,
        horizon=gate.budget.horizon,
    )


def declared(gate: GateConfig) -> ErrorBudget:
    """The error budget that the settings declare."""
    return ErrorBudget(gate.budget.alpha, gate.budget.rule, gate.budget.horizon)


def _at_most(most: float, of: Callable[[Observation], float | None], one: Observation) -> float | None:
    return None if (value := of(one)) is None else min(value, most)


def items_to_show(margin: float, width: float, most: int) -> int | None:
    """How many items show that nothing is lost, of which a fifth differs; None if not even ``most`` do."""
    hypothesis = betting.Hypothesis(-margin, -width, width)
    outcomes = power.three_points(0.0, _DIFFERING, width)
    return power.items_needed(outcomes, hypothesis, GUARDRAIL_ALPHA, max_items=most).items


def _needed(gate: GateConfig, margin: float, width: float) -> float:
    """The same of items of the suite; infinity if not even max_items do."""
    need = items_to_show(margin, width, gate.max_items)
    return float("inf") if need is None else need
