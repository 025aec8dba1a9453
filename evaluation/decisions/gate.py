"""The gate: what a candidate must prove before it may serve. Pass, refuse or undecided, look by look.

Pure functions of a plan and of looks: the same ones give the same verdict, bit for bit. A candidate that is no better
passes with the probability of its level at most, however often it is looked at; over candidates the error budget says
how levels add up (``statistics.error_budget``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from evaluation.decisions.observations import Look, Observation, names_of, per_voice, voices
from evaluation.decisions.plan import HOLDOUT, Plan
from evaluation.statistics import betting, power
from evaluation.statistics.guardrails import Evidence, observe
from evaluation.statistics.intervals import Floats
from evaluation.statistics.pairwise import win_rate_in_both_orders
from evaluation.statistics.verdict import Decision
from evaluation.statistics.verdict import decide as decide_by_evidence

MOST_FORESEEN = 20_000
"""Items that are counted up to, where it is said how many more a candidate needs."""

WINS_CONFIDENCE = 0.95
"""Of the interval of a win rate without the effects of length and place, all of which must lie above one half."""

SPENT = "the error budget is spent: no candidate can pass until evaluation.gate.budget has a larger alpha"


@dataclass(frozen=True)
class State:
    """A race so far. ``items`` were looked at, of which ``missing`` have no score for one of the policies; ``gains``
    [k] is what the success metric observed, a voice each, and ``proxies`` [m] what the reward that training saw gained.
    ``compared``: the items, where a judge compares answers."""

    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    items: int = 0
    missing: int = 0
    gains: Floats = field(default_factory=lambda: np.empty(0))
    proxies: Floats = field(default_factory=lambda: np.empty(0))
    compared: tuple[Observation, ...] = ()


def advance(plan: Plan, state: State, look: Look) -> State:
    """The state with another look. Raises OutOfBounds naming the item of a reward outside the declared bounds."""
    evidence = dict(state.evidence)
    values = plan.values(look)
    for metric in plan.metrics:
        before = evidence.get(metric.name) or Evidence.none()
        evidence[metric.name] = observe(metric, before, *values[metric.name])
    missing = sum(one.candidate is None or one.incumbent is None for one in look.fresh)
    return State(
        evidence,
        state.items + len(look.fresh),
        state.missing + missing,
        np.concatenate([state.gains, values[plan.metric][0]]),
        np.concatenate([state.proxies, per_voice(look.fresh, _proxy_gain)[0]]),
        (*state.compared, *look.fresh) if plan.compared else (),
    )


def decide(plan: Plan, state: State) -> Decision:
    """The verdict on what was looked at so far."""
    decision = decide_by_evidence(
        plan.metrics, state.evidence, alpha=plan.level, guardrail_alpha=plan.guardrail_alpha, beta=plan.beta
    )
    if plan.level <= 0:
        return replace(decision, reasons=(SPENT,))
    for name, setting in (("kl", "max_kl"), ("kl_v1", "guardrails.kl_v1")):
        if name in plan.margins and state.items and state.evidence[name].shown.n == 0:
            return replace(
                decision, verdict="refuse", reasons=(f"gate.{setting} is set, and KL could not be measured",)
            )
    if any(one.metric == HOLDOUT and one.state == "refuted" for one in decision.standings):
        decision = replace(decision, reasons=(*decision.reasons, _over_optimised(plan, state)))
    if decision.verdict == "pass" and (wanting := _wanting(plan, state)):
        decision = replace(decision, verdict="undecided", reasons=wanting)
    elif decision.verdict == "pass" and plan.compared:
        shown, what = _wins(state)
        reasons = (*decision.reasons, what) if shown else (what,)
        decision = replace(decision, verdict="pass" if shown else "undecided", reasons=reasons)
    elif decision.verdict == "undecided":
        decision = replace(decision, reasons=decision.reasons[:-1])  # without the forecast, for which see ``needs``
    if decision.verdict == "undecided" and state.items >= plan.max_items:
        most = f"{state.items} items were looked at, gate.max_items is {plan.max_items}"
        return replace(decision, verdict="refuse", reasons=(*decision.reasons, most), needs=None)
    return decision


def replay(plan: Plan, looks: Iterable[Look], state: State | None = None) -> tuple[State, Decision, int]:
    """All looks in order, up to the one that decides: (state, decision, how many looks that took)."""
    state, seen = state or State(), 0
    decision = decide(plan, state)
    for look in looks:
        state, seen = advance(plan, state, look), seen + 1
        decision = decide(plan, state)
        if decision.verdict != "undecided":
            break
    return state, decision, seen


def needs(plan: Plan, state: State, decision: Decision) -> int | None:
    """About how many more items an undecided candidate needs; None if no number up to MOST_FORESEEN is enough.

    The test itself is played on draws of what it was seen to do (``statistics.power``), for the gain that was seen, or
    for the smallest one that is worthwhile if less was seen. Guardrails may need more, and are counted at their rate.
    """
    n = len(state.gains)
    mean = float(state.gains.mean()) if n else 0.0
    least = max(plan.min_difference, plan.worthwhile or 0.0) or (plan.high - plan.low) / 50
    gain, width = max(mean, least), plan.high - plan.low
    try:
        outcomes = power.tilted(state.gains, gain)
    except ValueError:  # nothing was seen, or nothing that differs
        outcomes = power.three_points(gain, max(0.1, min(1.0, gain / width)), width)
    need = power.items_needed(outcomes, plan.success.shown, plan.level, max_items=MOST_FORESEEN)
    if need.items is None:
        return None
    guarded = [one.needs or 0 for one in decision.standings if one.role == "guardrail" and one.state == "open"]
    return max([need.items - n, plan.min_items - n, 1, *guarded])


def wealth(plan: Plan, state: State) -> betting.Wealth:
    """The success metric's test."""
    return (state.evidence.get(plan.metric) or Evidence.none()).shown


def _wanting(plan: Plan, state: State) -> tuple[str, ...]:
    """What a candidate that is shown to be better still lacks."""
    found = []
    if len(state.gains) < plan.min_items:
        found.append(f"{len(state.gains)} items have decided, gate.min_items is {plan.min_items}")
    if (share := state.missing / state.items) > plan.max_missing:
        found.append(
            f"{state.missing} of {state.items} items ({share:.1%}) have no score, gate.max_missing allows "
            f"{plan.max_missing:.1%}"
        )
    return tuple(found)


def _over_optimised(plan: Plan, state: State) -> str:
    """What the reward that training saw does while the one that it did not see falls.

    A candidate that loses by the latter could not pass whatever the former does: so that alone decides, and this says
    whether it was the price of what training optimised.
    """
    fall = -float(state.evidence[HOLDOUT].shown.mean)
    held = f"the reward that it did not see ({plan.holdout}) falls by {fall:.4f}"
    if plan.proxy is None:
        return f"the reward that training saw can't be had; {held}"
    if not len(state.proxies):
        return f"whether the reward that training saw ({plan.proxy}) rises is not known; {held}"
    rise = float(state.proxies.mean())
    if rise > 0:
        return f"over-optimised: the reward that training saw ({plan.proxy}) rises by {rise:.4f}, {held}"
    return f"the reward that training saw ({plan.proxy}) does not rise ({rise:+.4f}), and {held}"


def _proxy_gain(one: Observation) -> float | None:
    candidate, incumbent = one.proxy or (None, None)
    return None if candidate is None or incumbent is None else candidate - incumbent


def _wins(state: State) -> tuple[bool, str]:
    """Whether the candidate wins more than half of its comparisons without the judge's liking for length and place, and
    by how much, in words.

    The bettor is fed by preferences as they are, which length moves too; this can only keep a candidate from passing.
    """
    seen, absent = state.compared, (np.nan, np.nan)
    try:
        found = win_rate_in_both_orders(
            [0.0 if one.candidate is None else one.candidate for one in seen],
            [absent if one.verdicts is None else one.verdicts for one in seen],
            [one.length for one in seen],
            items=voices(seen, lambda one: names_of(one.prompt, one.cluster)),
            confidence=WINS_CONFIDENCE,
        )
    except ValueError as error:
        return False, f"whether the judge prefers its answers for their length can't be told: {error}"
    rate = f"of answers of one length it wins {found.value:.1%} [{found.low:.1%}, {found.high:.1%}]"
    habits = f"the judge takes the longer of two equal ones {found.longer:.1%} of the time, the first {found.first:.1%}"
    return found.low > 0.5, f"{rate}; {habits}"


def blocks(looks: Sequence[int], size: int) -> list[slice]:
    """Slices of voices that have so many items each [k], of ``size`` items or a little more; the last may be less."""
    found, start, items = [], 0, 0
    for i, count in enumerate(looks):
        items += count
        if items >= size:
            found.append(slice(start, i + 1))
            start, items = i + 1, 0
    return [*found, slice(start, len(looks))] if start < len(looks) else found
