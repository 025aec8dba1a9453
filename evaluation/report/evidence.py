"""What the ledger shows of each candidate, for the report: bounds at any look, segments, style; the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from evaluation.decisions.history import History, Intent, Ruling, looks_of
from evaluation.decisions.ledger import Entry, Ledger
from evaluation.decisions.observations import Observation, Pair, per_voice
from evaluation.decisions.over_optimisation import OverOptimisation, measured
from evaluation.decisions.plan import Plan
from evaluation.statistics import betting, error_budget
from evaluation.statistics.error_budget import ErrorBudget
from evaluation.statistics.intervals import Floats

SHOWN: Final = 30
"""So many candidates' evidence is gone through, a tenth of a second each."""


@dataclass(frozen=True)
class Segment:
    """The gain of one segment over ``n`` voices, with an interval that holds at every look. ``role`` is that of its
    guardrail, None without one; ``state`` whether that was shown, refuted or is open."""

    name: str
    n: int
    gain: float
    low: float
    high: float
    role: str | None
    state: str | None


@dataclass(frozen=True)
class Style:
    """A figure of the answers beside their reward: means of both policies over the fresh items. ``margin`` and
    ``state`` are those of its guardrail, None without one."""

    name: str
    incumbent: float | None
    candidate: float
    margin: float | None
    state: str | None


@dataclass(frozen=True)
class Race:
    """A candidate against an incumbent, over all of its looks so far.

    ``gains`` [n] of the success metric, a voice each, in the order in which they were looked at. ``lower`` [n] lies
    above ``least`` from the look on at which the gain was shown, at the candidate's level, and ``upper`` [n] below
    ``worthwhile`` from that on at which it was shown to be less: confidence sequences by betting.
    """

    candidate: int
    incumbent: int
    metric: str
    verdict: str
    reasons: tuple[str, ...]
    entry: int
    at: str
    suite: str
    items: int
    level: float
    e_value: float
    least: float
    worthwhile: float
    gains: Floats
    lower: Floats
    upper: Floats
    segments: tuple[Segment, ...]
    segment_margin: float | None
    style: tuple[Style, ...]
    over_optimisation: OverOptimisation | None = None

    @property
    def running_mean(self) -> Floats:
        """The mean gain [n] after each voice."""
        return np.cumsum(self.gains) / np.arange(1, len(self.gains) + 1)


@dataclass(frozen=True)
class Spent:
    """A candidate's share of the error budget; ``so_far`` is the sum that the rule in force keeps at ``alpha``."""

    candidate: int
    incumbent: int
    level: float
    so_far: float
    rule: str
    alpha: float


@dataclass(frozen=True)
class Declared:
    """An error budget that is, or was, in force: how many candidates it gave levels to, what these add up to, and
    how much of its ``alpha`` was spent when the last of them had its level (that of earlier budgets included)."""

    rule: str
    alpha: float
    horizon: int
    candidates: int
    levels: float
    spent: float


@dataclass(frozen=True)
class Spending:
    """The error budget: what was given to each candidate, in order, under which budgets, and what that promises."""

    candidates: tuple[Spent, ...]
    budgets: tuple[Declared, ...]
    promise: str


def spending(history: History) -> Spending | None:
    """What was spent of the error budget; None before one was declared. Raises ValueError as ``error_budget.given``."""
    if history.budget is None:
        return None
    given = error_budget.given(history.events)
    found = [
        Spent(*_parties(history, one.candidate), one.level, one.spent, one.budget.rule, one.budget.alpha)
        for one in given
    ]
    budgets: list[tuple[ErrorBudget, list[error_budget.Given]]] = []
    names = {one.candidate: one for one in given}
    spent = 0.0
    for event in history.events:
        if isinstance(event, ErrorBudget):
            budgets.append((event, []))
        elif (first := names.pop(event.candidate, None)) is not None:
            budgets[-1][1].append(first)
    declared = []
    for budget, under in budgets:
        spent = under[-1].spent if under else spent
        levels = sum(one.level for one in under)
        declared.append(Declared(budget.rule, budget.alpha, budget.horizon, len(under), levels, spent))
    return Spending(tuple(found), tuple(declared), history.promise())


def races(ledger: Ledger, history: History, *, confidence: float, last: int = SHOWN) -> list[Race]:
    """The last candidates that verdicts were given on, by their first entries. Raises LedgerDamaged.

    confidence: of the segments' intervals.
    """
    ordered = sorted(history.races.values(), key=lambda race: race[0][0].number)
    return [_race(ledger, race, confidence) for race in ordered[-last:]]


def _race(ledger: Ledger, race: Sequence[tuple[Entry, Ruling]], confidence: float) -> Race:
    (entry, found), plan = race[-1], race[-1][1].plan
    looks = [look for _, ruling in race for look in looks_of(ledger, ruling)]
    gains = np.concatenate([np.empty(0), *(per_voice(look.fresh, plan.gain)[0] for look in looks)])
    fresh = [one for look in looks for one in look.fresh]
    standings = {str(row["metric"]): row for row in found.standings}
    lower, upper = _bounds(plan, gains)
    return Race(
        candidate=found.candidate.version,
        incumbent=found.incumbent.version,
        metric=plan.metric,
        verdict=found.verdict,
        reasons=found.reasons,
        entry=entry.number,
        at=entry.at,
        suite=found.suite,
        items=found.items,
        level=plan.level,
        e_value=found.e_value,
        least=plan.min_difference,
        worthwhile=plan.success.margin if plan.success.worthwhile is None else plan.success.worthwhile,
        gains=gains,
        lower=lower,
        upper=upper,
        segments=tuple(_segments(plan, fresh, standings, confidence)),
        segment_margin=plan.margins.get("segments"),
        style=tuple(_style(plan, fresh, standings)),
        over_optimisation=measured(plan, looks, confidence=confidence),
    )


def _bounds(plan: Plan, gains: Floats) -> tuple[Floats, Floats]:
    """The confidence sequences [n], [n] that the gate's two tests of the gain amount to."""
    width = plan.high - plan.low
    low, high = np.full(len(gains), -width), np.full(len(gains), width)
    if len(gains) and 0 < plan.level < 1:
        low = betting.lower_bounds(gains, -width, width, plan.level)
    if len(gains):
        high = betting.upper_bounds(gains, -width, width, plan.beta / 2)
    return low, high


def _segments(
    plan: Plan, fresh: Sequence[Observation], standings: dict[str, dict[str, Any]], confidence: float
) -> Iterable[Segment]:
    """By name; a segment whose items have no score has no gain, and is left out."""
    width = plan.high - plan.low
    for name in sorted({one.segment for one in fresh if one.segment is not None}):
        values, _ = per_voice([one for one in fresh if one.segment == name], plan.gain)
        if not len(values):
            continue
        low, high = betting.interval(values, -width, width, 1 - confidence)
        row = standings.get(f"{plan.metric}[{name}]", {})
        yield Segment(name, len(values), float(values.mean()), low, high, row.get("role"), row.get("state"))


_STYLE: Final[dict[str, Callable[[Observation], Pair | None]]] = {
    "length": lambda one: one.length,
    "truncation": lambda one: one.truncated,
    "distinct_n": lambda one: one.distinct,
    "repetition": lambda one: one.repeated,
    "latency": lambda one: one.latency,
}


def _style(plan: Plan, fresh: Sequence[Observation], standings: dict[str, dict[str, Any]]) -> Iterable[Style]:
    """Length, truncation, diversity and time of the answers, and KL, of the candidate alone, as far as measured."""
    for name, pair in _STYLE.items():
        if pairs := [of for one in fresh if (of := pair(one)) is not None]:
            candidate, incumbent = (float(of) for of in np.mean(pairs, axis=0))
            yield Style(name, incumbent, candidate, plan.margins.get(name), standings.get(name, {}).get("state"))
    for name in ("kl", "kl_v1"):
        if known := [value for one in fresh if (value := getattr(one, name)) is not None]:
            yield Style(name, None, float(np.mean(known)), plan.margins.get(name), standings.get(name, {}).get("state"))


def _parties(history: History, name: str) -> tuple[int, int]:
    """The versions of a hypothesis: (candidate, incumbent)."""
    looked: Intent | Ruling = (*history.intents.get(name, ()), *history.races.get(name, ()))[0][1]
    return looked.candidate.version, looked.incumbent.version
