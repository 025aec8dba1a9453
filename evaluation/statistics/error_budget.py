"""The error budget over cycles: the level at which each candidate is tested. Pure functions of the history.

A candidate has one level, for all of its looks. ``candidate`` names a hypothesis: a policy against an incumbent. When
another policy serves, what was undecided is a new hypothesis with a new name, and has a new level.

Both rules hold for e-values that depend on each other in any way, so candidates may share items.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Verdict = Literal["pass", "refuse", "undecided"]

_ZETA = 2.2857656660680787  # the sum of t ** -1.6 over t = 1, 2, ...


class Look(NamedTuple):
    """One line of the history: what a look at a candidate gave."""

    candidate: str
    e_value: float
    verdict: Verdict


@dataclass(frozen=True)
class ErrorBudget:
    """How much error is allowed, and how it is spread over candidates.

    ``fixed_horizon``: alpha / horizon for each of the first ``horizon`` candidates, nothing for those that follow. The
    chance that any candidate that is no better ever passes is at most alpha (FWER, by the union bound).

    ``e_lond``: Xu and Ramdas 2024, "Online multiple testing with e-values" (AISTATS; arXiv 2311.06412). The t-th
    candidate has alpha * gamma_t * (passes before it + 1), gamma_t proportional to t ** -1.6 and of sum 1. Of the
    candidates that pass, the expected share that is no better is at most alpha (FDR); while none is better, that
    is the chance that any passes. It never ends, spends most on the first, and earns by passes. Passes count that were
    known when the candidate was first tested, so verdicts may come in any order.
    """

    alpha: float = 0.05
    rule: Literal["fixed_horizon", "e_lond"] = "fixed_horizon"
    horizon: int = 1000

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1 or self.horizon < 1:
            raise ValueError(f"an error budget of {self.alpha:g} over {self.horizon} candidates can't be kept")


def level(budget: ErrorBudget, history: Iterable[Look], candidate: str) -> float:
    """The level for all looks at ``candidate``, from the history so far, in order of time; 0 if the budget is spent.

    The same whether ``candidate`` is in the history already or not, and whatever follows its first look. A candidate
    whose level is 0 is refused.
    """
    tested: set[str] = set()
    passed: set[str] = set()
    for look in history:
        if look.candidate == candidate:
            break
        tested.add(look.candidate)
        if look.verdict == "pass":
            passed.add(look.candidate)
    number = len(tested) + 1
    if budget.rule == "fixed_horizon":
        return budget.alpha / budget.horizon if number <= budget.horizon else 0.0
    return min(1.0, budget.alpha * number**-1.6 / _ZETA * (len(passed) + 1))


def spent(budget: ErrorBudget, history: Iterable[Look]) -> float:
    """The sum of the levels of all candidates in ``history``, each counted once. With ``e_lond`` passes raise it."""
    looks = list(history)
    return sum(level(budget, looks, candidate) for candidate in dict.fromkeys(look.candidate for look in looks))
