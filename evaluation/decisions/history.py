"""What the ledger says: each candidate's race, the items that were looked at, and the error budget with its levels."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from evaluation.decisions import bank
from evaluation.decisions.ledger import Entry, Ledger, LedgerDamaged
from evaluation.decisions.observations import Look
from evaluation.decisions.plan import Plan
from evaluation.statistics import error_budget
from evaluation.statistics.error_budget import ErrorBudget
from evaluation.suites.suite import Suite

Body = TypeVar("Body", bound=BaseModel)


class Party(BaseModel):
    """A policy, by its version and by the hash of its files: a version may be another policy in another home."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    sha256: str


class Intent(BaseModel):
    """The body of an intent's entry: what is about to be looked at, on record before any of it is scored.

    ``fresh`` and ``regression`` are the ids of a look's items, in order, ``suites`` those of guardrail suites by name,
    and ``content`` the sha256 of the items. ``prompts`` of the fresh ones count as looked at from here on. ``answers``:
    the settings that decide what is looked at. The plan is that of the candidate's first intent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    candidate: Party
    incumbent: Party
    suite: str
    suite_sha256: str
    plan: Plan
    answers: dict[str, Any]
    fresh: tuple[str, ...]
    regression: tuple[str, ...]
    suites: dict[str, tuple[str, ...]] = {}
    prompts: tuple[str, ...]
    content: str

    @property
    def hypothesis(self) -> str:
        return hypothesis(self.candidate.sha256, self.incumbent.sha256)


class Declaration(BaseModel):
    """The body of a budget's entry: the error budget that is in force from there on."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rule: Literal["e_lond", "fixed_horizon"]
    alpha: float
    horizon: int

    @property
    def budget(self) -> ErrorBudget:
        return ErrorBudget(self.alpha, self.rule, self.horizon)


class Ruling(BaseModel):
    """The body of a verdict's entry: what was looked at since the candidate's last entry, and what came of it.

    ``prompts`` of fresh items are used up. ``items`` were looked at in all of the candidate's looks, ``difference`` is
    the mean gain of those that counted, None while there is none. ``needs``: about how many more items; a forecast.
    ``learned``: ids of fresh items that were refused, since the candidate or a policy that it descends from has learned
    from their prompts.
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
    learned: tuple[str, ...] = ()

    @property
    def hypothesis(self) -> str:
        """What is tested: that this candidate is no better than this incumbent."""
        return hypothesis(self.candidate.sha256, self.incumbent.sha256)

    @property
    def final(self) -> bool:
        return self.verdict != "undecided"


class Shadowed(BaseModel):
    """Of a shadow's body what other entries are judged by."""

    class Comparison(BaseModel):
        decision: str
        reasons: tuple[str, ...]

    candidate: Party
    incumbent: Party
    comparison: Comparison


class Tried(BaseModel):
    """Of an experiment's body what other entries are judged by."""

    number: int
    event: Literal["start", "commit", "end"]
    candidate: Party
    control: Party
    decision: str | None = None


def hypothesis(candidate: str, incumbent: str) -> str:
    """The name of a hypothesis, from the sha256 of both policies: the same weights are the same candidate."""
    return hashlib.sha256(f"{candidate}\0{incumbent}".encode()).hexdigest()[:32]


def ruling(entry: Entry) -> Ruling:
    """The verdict in an entry. Raises LedgerDamaged if it is none."""
    return _body(entry, Ruling, "verdict")


def intent(entry: Entry) -> Intent:
    """The intent in an entry. Raises LedgerDamaged if it is none."""
    return _body(entry, Intent, "intent")


def declaration(entry: Entry) -> ErrorBudget:
    """The error budget that an entry declares. Raises LedgerDamaged if it is none."""
    try:
        return _body(entry, Declaration, "error budget").budget
    except ValueError as error:
        raise LedgerDamaged(f"entry {entry.number} is no error budget: {error}") from error


def shadowed(entry: Entry) -> Shadowed:
    """What an entry says of a shadow. Raises LedgerDamaged if it is none."""
    return _body(entry, Shadowed, "shadow")


def tried(entry: Entry) -> Tried:
    """What an entry says of an experiment. Raises LedgerDamaged if it is none."""
    return _body(entry, Tried, "experiment")


def _body(entry: Entry, model: type[Body], name: str) -> Body:
    try:
        return model.model_validate(entry.body)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise LedgerDamaged(f"entry {entry.number} is no {name}: {where}: {error.errors()[0]['msg']}") from error


@dataclass
class History:
    """``races``: the verdicts on each hypothesis, with their entries. ``intents``: what was to be looked at, likewise.
    ``used``: prompts that were looked at, or were about to be. ``events``: for the error budget, of which ``budget`` is
    in force. ``others``: promotions, rollbacks, experiments and shadows."""

    races: dict[str, list[tuple[Entry, Ruling]]] = field(default_factory=dict)
    intents: dict[str, list[tuple[Entry, Intent]]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    events: list[error_budget.Event] = field(default_factory=list)
    budget: ErrorBudget | None = None
    others: list[Entry] = field(default_factory=list)

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> History:
        history = cls()
        for entry in entries:
            history.add(entry)
        return history

    def add(self, entry: Entry) -> None:
        """Count an entry in. Raises LedgerDamaged for one that is not what its kind says."""
        match entry.kind:
            case "budget":
                self.budget = declaration(entry)
                self.events.append(self.budget)
            case "intent":
                meant = intent(entry)
                self.intents.setdefault(meant.hypothesis, []).append((entry, meant))
                self.used.update(meant.prompts)
                self.events.append(error_budget.Look(meant.hypothesis, 1.0, "undecided"))
            case "verdict":
                found = ruling(entry)
                self.races.setdefault(found.hypothesis, []).append((entry, found))
                self.used.update(found.prompts)
                self.events.append(error_budget.Look(found.hypothesis, found.e_value, found.verdict))
            case "promotion" | "rollback":
                self.others.append(entry)
            case "experiment":
                tried(entry)
                self.others.append(entry)
            case "shadow":
                shadowed(entry)
                self.others.append(entry)
            case "signed":
                pass

    def last(self, candidate: str, incumbent: str) -> tuple[Entry, Ruling] | None:
        """The newest verdict on a candidate against an incumbent, by their sha256."""
        race = self.races.get(hypothesis(candidate, incumbent))
        return race[-1] if race else None

    def begun(self, name: str) -> list[tuple[Entry, Intent]]:
        """What was about to be looked at for a hypothesis, and has no verdict: the evaluation was killed, or failed."""
        race = self.races.get(name)
        return [one for one in self.intents.get(name, ()) if not race or one[0].number > race[-1][0].number]

    def used_but_for(self, name: str) -> set[str]:
        """The prompts that a hypothesis can't be looked at with: all that were used, but for what it has begun."""
        return self.used.difference(*(meant.prompts for _, meant in self.begun(name)))

    def plan(self, name: str) -> tuple[Entry, Plan] | None:
        """The plan of a hypothesis, and the entry of its first look; None if it was not looked at."""
        looks = (*self.intents.get(name, ())[:1], *self.races.get(name, ())[:1])
        return min(((entry, look.plan) for entry, look in looks), key=lambda one: one[0].number, default=None)

    def level(self, budget: ErrorBudget, name: str) -> float:
        """The level of a hypothesis, if this budget is declared for it; see ``error_budget.level``."""
        return error_budget.level(budget, self.events, name)

    @property
    def candidates(self) -> list[str]:
        """The hypotheses that have a level, each once."""
        return list(dict.fromkeys((*self.intents, *self.races)))

    def levels_given(self) -> float:
        """The sum of the levels of all candidates so far; with e_lond it may exceed alpha, as passes earn."""
        plans = [found for name in self.candidates if (found := self.plan(name))]
        return sum(plan.level for _, plan in plans)

    def promise(self) -> str:
        """What the budgets that were in force promise, in words; empty before there was one."""
        declared = [event for event in self.events if isinstance(event, ErrorBudget)]
        return error_budget.promise(declared) if declared else ""

    @property
    def passes(self) -> int:
        return sum(race[-1][1].verdict == "pass" for race in self.races.values())


def shadow_harm(entry: Entry, candidate: str, incumbent: str) -> str | None:
    """What harm a shadow's entry has shown of a candidate beside an incumbent, by their sha256; None if it has not."""
    found = shadowed(entry)
    if (found.candidate.sha256, found.incumbent.sha256) != (candidate, incumbent):
        return None
    return "; ".join(found.comparison.reasons) if found.comparison.decision == "harm" else None


def looks_of(ledger: Ledger, found: Ruling) -> list[Look]:
    """What a verdict's entry looked at. Raises LedgerDamaged."""
    evidence = ledger.evidence(found.evidence)
    try:
        return [Look.model_validate(look) for look in evidence["looks"]]
    except (KeyError, TypeError, ValidationError) as error:
        raise LedgerDamaged(f"evidence {found.evidence[:12]}… holds no looks at a candidate") from error


def fresh_items(suite: Suite, history: History, name: str | None = None, learned: Collection[str] = ()) -> int:
    """How many items of a suite a new candidate could be looked at with, or the hypothesis ``name``.

    ``learned``: of the candidate, as of ``judgement.judge``.
    """
    used = history.used if name is None else history.used_but_for(name)
    fresh, _ = bank.unlearned(bank.fresh(suite.items, used), learned)
    return sum(map(len, fresh))
