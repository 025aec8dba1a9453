"""The verdict on a candidate: pass, refuse or undecided. A pure function of evidence and levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from evaluation.statistics import betting
from evaluation.statistics.error_budget import Verdict
from evaluation.statistics.guardrails import Evidence, Metric


@dataclass(frozen=True)
class Standing:
    """Where one metric stands. ``needs``: about how many more items it wants at the present rate, None if unknown.

    ``e_value`` is the largest so far against "no better" (or "worse than the margin allows"); 1 / ``level`` shows it.
    """

    metric: str
    role: Literal["success", "guardrail", "watch"]
    state: Literal["shown", "refuted", "open"]
    n: int
    mean: float
    e_value: float
    level: float
    needs: int | None


@dataclass(frozen=True)
class Decision:
    """``reasons`` says why, a sentence each. ``e_value`` is that of the success metric that is furthest.

    ``needs``, of an undecided candidate: about how many more items; None if what was seen so far leads nowhere.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    e_value: float
    needs: int | None
    standings: tuple[Standing, ...]


def decide(
    metrics: Sequence[Metric],
    evidence: Mapping[str, Evidence],
    *,
    alpha: float,
    guardrail_alpha: float = 0.05,
    beta: float = 0.05,
    items_left: int | None = None,
    max_items: int | None = None,
) -> Decision:
    """The verdict at this look; any number of looks may be made.

    - **pass**: a success metric is shown to be better, at level ``alpha`` (the error budget's) over their number, and
      every guardrail is shown to be not worse, each at ``guardrail_alpha``. A candidate that is no better passes with
      probability ``alpha`` at most, whatever its guardrails; one that breaks a guardrail with probability
      ``guardrail_alpha`` at most, whatever it gains: all guardrails must be shown, so no level need be shared out
      (Berger 1982, "Multiparameter hypothesis testing and acceptance sampling").
    - **refuse**: the budget is spent (``alpha`` 0); or a guardrail is shown to be worse than its margin (``beta`` / 2
      over their number); or every success metric is shown to gain less than is worthwhile (``beta`` / 2 each); or
      ``max_items`` have been looked at. A worthwhile candidate that breaks nothing is refused by evidence with
      probability ``beta`` at most. A refusal passes nobody, so none of these rules costs any alpha.
      Of a metric that is only watched nothing needs to be shown; harm refuses as that of a guardrail does.
    - **undecided**: else. It goes on with the next items from its evidence so far, at the same levels.

    ``items_left`` is what the bank has; it only goes into the reasons. A metric without evidence is open. Raises
    ValueError without a success metric, or for two metrics of one name.
    """
    success = [metric for metric in metrics if metric.role == "success"]
    guardrails = [metric for metric in metrics if metric.role != "success"]
    if not success or len({metric.name for metric in metrics}) < len(metrics):
        raise ValueError(f"{len(success)} success metrics of {len(metrics)}: one at least, and no name twice")
    gained = [_standing(metric, evidence, alpha / len(success), beta / 2) for metric in success]
    guarded = [_standing(metric, evidence, guardrail_alpha, beta / 2 / len(guardrails)) for metric in guardrails]
    standings = (*gained, *guarded)
    best = max(gained, key=lambda standing: standing.e_value)

    def decision(verdict: Verdict, reasons: list[str], needs: int | None = None) -> Decision:
        return Decision(verdict, tuple(reasons), best.e_value, needs, standings)

    if alpha <= 0:
        return decision(
            "refuse", ["the error budget is spent: no candidate can pass until one with a larger alpha is declared"]
        )
    if harms := [standing for standing in guarded if standing.state == "refuted"]:
        return decision("refuse", [f"{_seen(harm)}: worse than its margin allows" for harm in harms])
    winners = [standing for standing in gained if standing.state == "shown"]
    open_guardrails = [standing for standing in guarded if standing.state == "open" and standing.role == "guardrail"]
    if winners and not open_guardrails:
        return decision("pass", [f"{_seen(winner)}: better, at level {winner.level:.2g}" for winner in winners])
    if all(standing.state == "refuted" for standing in gained):
        return decision("refuse", [f"{_seen(standing)}: no worthwhile gain" for standing in gained])
    waiting = open_guardrails if winners else [*gained, *open_guardrails]
    reasons = [f"{_seen(standing)}: not shown yet, at level {standing.level:.2g}" for standing in waiting]
    if max_items is not None and best.n >= max_items:
        return decision("refuse", [*reasons, f"{best.n} items are the most that a candidate may use ({max_items})"])
    needs = _needs([] if winners else gained, open_guardrails)
    wanted = "more items than can be foreseen" if needs is None else f"about {needs} more items"
    left = "" if items_left is None else f"; the bank has {items_left}"
    return decision("undecided", [*reasons, f"needs {wanted}{left}"], needs)


def _standing(metric: Metric, evidence: Mapping[str, Evidence], level: float, refuted_level: float) -> Standing:
    seen = evidence.get(metric.name) or Evidence.none()
    shown, refuted = betting.rejects(seen.shown, level), betting.rejects(seen.refuted, refuted_level)
    # A gain may be shown and be less than worthwhile: it is one. Harm that is shown outweighs what was shown before.
    first: Literal["shown", "refuted"] = "shown" if metric.role == "success" else "refuted"
    state: Literal["shown", "refuted", "open"] = "open"
    if shown or refuted:
        state = first if shown and refuted else "shown" if shown else "refuted"
    return Standing(
        metric.name,
        metric.role,
        state,
        seen.shown.n,
        float(seen.shown.mean),
        float(seen.shown.peak),
        level,
        betting.more_items(seen.shown, level),
    )


def _needs(gained: Sequence[Standing], guarded: Sequence[Standing]) -> int | None:
    """One success metric will do; all guardrails must."""
    first = [standing.needs for standing in gained if standing.needs is not None]
    rest = [standing.needs for standing in guarded]
    if (gained and not first) or None in rest:
        return None
    return max([*(needs for needs in rest if needs is not None), *([min(first)] if first else [])])


def _seen(standing: Standing) -> str:
    return f"{standing.metric} is {standing.mean:+.4f} on {standing.n} items (e-value {standing.e_value:.3g})"
