"""What the ledger says: each candidate's race, the items that have decided, and the error budget that was spent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from evaluation.decisions import bank
from evaluation.decisions.ledger import Entry, Ledger, LedgerDamaged
from evaluation.decisions.observations import Look
from evaluation.decisions.plan import Plan
from evaluation.statistics import error_budget
from evaluation.suites.suite import Suite


class Party(BaseModel):
    """A policy, by its version and by the hash of its files: a version may be another policy in another home."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    sha256: str


class Ruling(BaseModel):
    """The body of a verdict's entry: what was looked at since the candidate's last entry, and what came of it.

    ``prompts`` of fresh items are used up. ``items`` were looked at in all of the candidate's looks, ``difference`` is
    the mean gain of those that counted, None while there is none. ``needs``: about how many more items; a forecast.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    candidate: Party
    incumbent: Party
    suite: str
    suite_sha256: str
    plan: Plan
    evidence: str
    prompts: tuple[str, ...]
    verdict: Literal["pass", "refuse", "undecided"]
    reasons: tuple[str, ...]
    items: int
    missing: int
    difference: float | None
    e_value: float
    standings: tuple[dict[str, Any], ...]
    needs: int | None = None

    @property
    def hypothesis(self) -> str:
        """What is tested: that this candidate is no better than this incumbent."""
        return hypothesis(self.candidate.sha256, self.incumbent.sha256)

    @property
    def final(self) -> bool:
        return self.verdict != "undecided"


def hypothesis(candidate: str, incumbent: str) -> str:
    """The name of a hypothesis, from the sha256 of both policies: the same weights are the same candidate."""
    return hashlib.sha256(f"{candidate}\0{incumbent}".encode()).hexdigest()[:32]


def ruling(entry: Entry) -> Ruling:
    """The verdict in an entry. Raises LedgerDamaged if it is none."""
    try:
        return Ruling.model_validate(entry.body)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise LedgerDamaged(f"entry {entry.number} is no verdict: {where}: {error.errors()[0]['msg']}") from error


@dataclass
class History:
    """``races``: the verdicts on each hypothesis, with their entries. ``used``: prompts that have decided.
    ``looks``: for the error budget. ``others``: promotions, rollbacks and experiments."""

    races: dict[str, list[tuple[Entry, Ruling]]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    looks: list[error_budget.Look] = field(default_factory=list)
    others: list[Entry] = field(default_factory=list)

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> History:
        history = cls()
        for entry in entries:
            history.add(entry)
        return history

    def add(self, entry: Entry) -> None:
        """Count an entry in. Raises LedgerDamaged for a verdict that is none."""
        if entry.kind != "verdict":
            self.others.append(entry)
            return
        found = ruling(entry)
        self.races.setdefault(found.hypothesis, []).append((entry, found))
        self.used.update(found.prompts)
        self.looks.append(error_budget.Look(found.hypothesis, found.e_value, found.verdict))

    def last(self, candidate: str, incumbent: str) -> tuple[Entry, Ruling] | None:
        """The newest verdict on a candidate against an incumbent, by their sha256."""
        race = self.races.get(hypothesis(candidate, incumbent))
        return race[-1] if race else None

    def level(self, budget: error_budget.ErrorBudget, name: str) -> float:
        """The level of a hypothesis; see ``error_budget.level``."""
        return error_budget.level(budget, self.looks, name)

    def spent(self) -> float:
        """The sum of the levels of all candidates so far."""
        return sum(race[0][1].plan.level for race in self.races.values())

    @property
    def passes(self) -> int:
        return sum(race[-1][1].verdict == "pass" for race in self.races.values())


def looks_of(ledger: Ledger, found: Ruling) -> list[Look]:
    """What a verdict's entry looked at. Raises LedgerDamaged."""
    evidence = ledger.evidence(found.evidence)
    try:
        return [Look.model_validate(look) for look in evidence["looks"]]
    except (KeyError, TypeError, ValidationError) as error:
        raise LedgerDamaged(f"evidence {found.evidence[:12]}… holds no looks at a candidate") from error


def fresh_items(suite: Suite, history: History) -> int:
    """How many items of a suite have not decided yet."""
    return sum(len(voice) for voice in bank.fresh(suite.items, history.used))
