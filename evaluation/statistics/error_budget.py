"""The error budget over cycles: the level at which each candidate is tested. Pure functions of the history.

A candidate has one level, for all of its looks. ``candidate`` names a hypothesis: a policy against an incumbent. When
another policy serves, what was undecided is a new hypothesis with a new name, and has a new level.

**Why the levels add up.** Let E_t be the e-value of the t-th candidate, w_t its weight, R the passes that were known
when it was first looked at, L_t its level: w_t with ``fixed_horizon``, w_t (R + 1) with ``e_lond``. It passes when
E_t >= 1 / L_t. If it is no better, the mean of E_t is 1 at most, so 1{it passes} <= L_t E_t gives

- the chance that any candidate that is no better ever passes (FWER) <= the sum of all L_t, by the union bound;
- the expected share of those among all passes (FDR) <= the sum of all w_t, since there are R + 1 passes at least once
  it has passed, so that it counts as L_t E_t / (R + 1) = w_t E_t at most (Xu and Ramdas 2024, theorem 1).

**Declared anew.** A budget with another rule, alpha or horizon forgives nothing that was given before. What is left of
it is alpha less the sum that its rule bounds, over all candidates since the first: of all L_t with ``fixed_horizon``,
of all w_t with ``e_lond``. From then on ``fixed_horizon`` gives alpha / horizon while that is left; ``e_lond`` spreads
what is left over the candidates to come, t = s, s + 1, ..., in proportion to t ** -1.6. So neither sum ever exceeds the
alpha that is in force where a level is given, whatever is declared how often, and who declares the same once more
changes nothing. What is promised over the whole history is the largest alpha under which a level was given.

Under one declaration of ``e_lond``, or of ``fixed_horizon`` from the start, this holds for e-values that depend on each
other in any way. Who declares anew may have seen all that came before; then L_t and w_t depend on the past, and the
mean of E_t must be 1 at most given that past. It is: a candidate is tested on items that have decided on no other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Verdict = Literal["pass", "refuse", "undecided"]

_ZETA = 2.2857656660680787  # the sum of t ** -1.6 over t = 1, 2, ...
_ROUNDING = 1e-9  # a share of a level that is no more than rounding


class Look(NamedTuple):
    """One line of the history: what a look at a candidate gave. One that is begun and has given nothing is undecided,
    and has its level."""

    candidate: str
    e_value: float
    verdict: Verdict


@dataclass(frozen=True)
class ErrorBudget:
    """How much error is allowed, and how it is spread over candidates. In a history: that it is declared from there on.

    ``fixed_horizon``: alpha / horizon for each of the first ``horizon`` candidates, nothing for those that follow. The
    chance that any candidate that is no better ever passes is at most alpha (FWER, by the union bound).

    ``e_lond``: Xu and Ramdas 2024, "Online multiple testing with e-values" (AISTATS; arXiv 2311.06412). The t-th
    candidate has alpha * gamma_t * (passes before it + 1), gamma_t proportional to t ** -1.6 and of sum 1. Of the
    candidates that pass, the expected share that is no better is at most alpha (FDR); while none is better, that
    is the chance that any passes. It never ends, spends most on the first, and earns by passes: the levels may add up
    to more than alpha. Passes count that were known when the candidate was first tested, so verdicts may come in any
    order. ``horizon`` says nothing.
    """

    alpha: float = 0.05
    rule: Literal["fixed_horizon", "e_lond"] = "fixed_horizon"
    horizon: int = 1000

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1 or self.horizon < 1:
            raise ValueError(f"an error budget of {self.alpha:g} over {self.horizon} candidates can't be kept")


Event = Look | ErrorBudget


def level(budget: ErrorBudget, history: Iterable[Event], candidate: str) -> float:
    """The level for all looks at ``candidate``, from the history so far, in order of time; 0 if the budget is spent.

    The same whether ``candidate`` is in the history already or not, and whatever follows its first look. One that is
    not in it is tested under ``budget``, which is declared for that if another one is in force. A candidate whose level
    is 0 is refused.
    """
    account = _Account(budget)
    for event in history:
        account.add(event)
        if candidate in account.levels:
            return account.levels[candidate]
    account.add(budget)
    account.add(Look(candidate, 1.0, "undecided"))
    return account.levels[candidate]


def levels(budget: ErrorBudget, history: Iterable[Event]) -> dict[str, float]:
    """The level of each candidate in ``history``, in order. Their sum may exceed alpha with ``e_lond``: passes earn."""
    account = _Account(budget)
    for event in history:
        account.add(event)
    return account.levels


@dataclass(frozen=True)
class Given:
    """The ``level`` that a candidate was given, and the ``budget`` in force then.

    ``spent``: the sum over all candidates up to this one that ``budget``'s rule keeps at alpha or below, of all L_t
    with ``fixed_horizon`` and of all w_t with ``e_lond``.
    """

    candidate: str
    level: float
    spent: float
    budget: ErrorBudget


def given(history: Iterable[Event]) -> list[Given]:
    """What each candidate of a history was given, in order. Raises ValueError if one comes before any budget."""
    account: _Account | None = None
    found: list[Given] = []
    for event in history:
        if isinstance(event, ErrorBudget):
            account = account or _Account(event)
        elif account is None:
            raise ValueError(f"candidate {event.candidate!r} has a level, and no budget was declared before it")
        account.add(event)
        if not isinstance(event, ErrorBudget) and len(account.levels) > len(found):
            found.append(Given(event.candidate, account.levels[event.candidate], account.spent, account.budget))
    return found


def promise(budgets: Iterable[ErrorBudget]) -> str:
    """What a history promises in which these were in force, in words. Raises ValueError if there was none."""
    declared = list(budgets)
    alpha, rules = max(budget.alpha for budget in declared), sorted({budget.rule for budget in declared})
    bounded = "false discovery rate" if "e_lond" in rules else "chance that any candidate passes that is no better"
    return f"{bounded} at most {alpha:g} ({', '.join(rules)})"


@dataclass
class _Account:
    """What was given so far. ``budget`` is in force until a history declares one."""

    budget: ErrorBudget
    levels: dict[str, float] = field(default_factory=dict)  # L_t by candidate, in order
    weights: list[float] = field(default_factory=list)  # w_t
    passed: set[str] = field(default_factory=set)
    share: float = 0.0  # of e_lond, what t ** -1.6 is multiplied by

    def __post_init__(self) -> None:
        self._declare(self.budget)

    @property
    def spent(self) -> float:
        """The sum that the rule in force bounds."""
        return math.fsum(self.weights if self.budget.rule == "e_lond" else self.levels.values())

    def add(self, event: Event) -> None:
        if isinstance(event, ErrorBudget):
            self._declare(event)
            return
        if event.candidate not in self.levels:
            weight = self._weight()
            self.weights.append(weight)
            earned = len(self.passed) + 1 if self.budget.rule == "e_lond" else 1
            self.levels[event.candidate] = min(1.0, weight * earned)
        if event.verdict == "pass":
            self.passed.add(event.candidate)

    def _declare(self, budget: ErrorBudget) -> None:
        if budget == self.budget and self.levels:
            return
        self.budget = budget
        to_come = _ZETA - math.fsum(t**-1.6 for t in range(1, len(self.weights) + 1))
        self.share = max(0.0, budget.alpha - math.fsum(self.weights)) / to_come

    def _weight(self) -> float:
        if self.budget.rule == "e_lond":
            return self.share * (len(self.weights) + 1) ** -1.6
        each = self.budget.alpha / self.budget.horizon
        left = self.budget.alpha - math.fsum(self.levels.values())
        if left >= each * (1 - _ROUNDING):
            return each
        return left if left > each * _ROUNDING else 0.0
