"""Everything in the ledger recomputed: each verdict from the scores that were kept, each level from those before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from evaluation.decisions import gate
from evaluation.decisions.gate import State
from evaluation.decisions.history import (
    History,
    Intent,
    Ruling,
    declaration,
    intent,
    looks_of,
    ruling,
    shadow_harm,
    shadowed,
    tried,
)
from evaluation.decisions.judgement import standings
from evaluation.decisions.ledger import Entry, Ledger, LedgerDamaged
from evaluation.decisions.observations import Look, names_of, voices
from evaluation.decisions.plan import Plan
from evaluation.statistics.betting import OutOfBounds
from evaluation.statistics.error_budget import ErrorBudget


@dataclass(frozen=True)
class Verification:
    """``problems`` names each entry that is not what it must be; ``levels_given`` is the sum of all levels."""

    entries: int
    verdicts: int
    levels_given: float
    problems: tuple[str, ...]


def verify(ledger: Ledger) -> Verification:
    """Recompute the ledger: its chain, and of each verdict the level, the items, the evidence and the verdict itself.

    A verdict must follow from its plan and its looks bit for bit, none may follow a final one, its looks must have been
    on record as intents before, its plan must be that of the first of them and its level what the declared budgets give
    it, each item must have drawn its sampling parameters from that plan, no prompt may be looked at twice, and a
    promotion must be of the candidate that passed against what served, or an override. Experiments are
    ``evaluation.experiments.verification``'s.
    """
    try:
        entries = ledger.entries()
    except LedgerDamaged as error:
        return Verification(0, 0, 0.0, (str(error),))
    history, states, problems = History(), dict[str, State](), list[str]()
    for entry in entries:
        try:
            found = list(_of_entry(ledger, history, states, entry))
        except (LedgerDamaged, OutOfBounds, ValueError) as error:
            found = [str(error)]
        with suppress(LedgerDamaged):  # named already
            history.add(entry)
        problems += [f"entry {entry.number}: {why}" for why in found]
    verdicts = sum(entry.kind == "verdict" for entry in entries)
    return Verification(len(entries), verdicts, history.levels_given(), tuple(problems))


def _of_entry(ledger: Ledger, history: History, states: dict[str, State], entry: Entry) -> Iterator[str]:
    match entry.kind:
        case "budget":
            declaration(entry)
        case "intent":
            yield from _of_intent(history, intent(entry))
        case "verdict":
            yield from _of_verdict(ledger, history, states, ruling(entry))
        case "promotion" | "rollback":
            yield from _of_promotion(history, entry)
        case "experiment":
            tried(entry)  # what follows from its evidence is looked at elsewhere, and so it is of a shadow
        case "shadow":
            shadowed(entry)
        case "signed":
            pass  # reading it has checked all that there is


def _of_intent(history: History, meant: Intent) -> Iterator[str]:
    """What is wrong with what was about to be looked at, after all that came before."""
    yield from _of_plan(history, meant.hypothesis, meant.plan)
    if set(meant.prompts) & history.used:
        yield "it is about items that were looked at before"


def _of_plan(history: History, name: str, plan: Plan) -> Iterator[str]:
    """What is wrong with the plan by which a candidate is looked at once more."""
    race = history.races.get(name, [])
    if race and race[-1][1].final:
        yield f"entry {race[-1][0].number} is a final verdict on this candidate already"
    first = history.plan(name)
    if first is None and plan.budget != history.budget:
        yield f"its level is of {_named(plan.budget)}, and what is declared is {_named(history.budget)}"
    if first is not None and first[1] != plan:
        yield f"its plan is not that of the candidate's first look, entry {first[0].number}"
    if plan.level != (level := history.level(plan.budget, name)):
        yield f"its level is {plan.level!r}, and what the budget gives it is {level!r}"


def _of_verdict(ledger: Ledger, history: History, states: dict[str, State], found: Ruling) -> Iterator[str]:
    """What is wrong with a verdict, after all that came before."""
    name, plan = found.hypothesis, found.plan
    yield from _of_plan(history, name, plan)
    looks = looks_of(ledger, found)
    yield from _of_intents(history, found, looks)
    yield from _of_items(history, found, looks)
    yield from _of_sampling(plan, looks)
    state, decision, seen = gate.replay(plan, looks, states.get(name))
    states[name] = state
    if seen < len(looks):
        yield f"it was decided after {seen} looks, and {len(looks)} were made"
    stated = {
        "verdict": found.verdict,
        "reasons": found.reasons,
        "items": found.items,
        "missing": found.missing,
        "difference": found.difference,
        "e_value": found.e_value,
        "standings": found.standings,
    }
    recomputed = {
        "verdict": decision.verdict,
        "reasons": decision.reasons,
        "items": state.items,
        "missing": state.missing,
        "difference": float(state.gains.mean()) if len(state.gains) else None,
        "e_value": decision.e_value,
        "standings": standings(decision.standings),
    }
    for key, value in recomputed.items():
        if stated[key] != value:
            yield f"its {key} is {_short(stated[key])}, and its evidence gives {_short(value)}"


def _of_intents(history: History, found: Ruling, looks: list[Look]) -> Iterator[str]:
    """Each look must have been on record before, with the items that it has. A final verdict may come before all that
    was begun is looked at again: what scores may say something else after a kill."""
    begun = [meant for _, meant in history.begun(found.hypothesis)]
    for number, (look, meant) in enumerate(zip(looks, begun, strict=False), start=1):
        prompts = tuple(dict.fromkeys(one.prompt for one in look.fresh))
        items = tuple(one.item for one in look.fresh), tuple(one.item for one in look.regression)
        suites = {name: tuple(one.item for one in of) for name, of in look.suites.items()}
        if (prompts, *items, suites) != (meant.prompts, meant.fresh, meant.regression, meant.suites):
            yield f"look {number} is not at the items that were about to be looked at"
    if len(looks) > len(begun):
        yield f"{len(looks)} looks were made, and {len(begun)} were on record before"
    elif len(looks) < len(begun) and not found.final:
        yield f"{len(begun)} looks were about to be made, and it is undecided after {len(looks)}"


def _of_items(history: History, found: Ruling, looks: list[Look]) -> Iterator[str]:
    fresh, used = [one for look in looks for one in look.fresh], history.used_but_for(found.hypothesis)
    if tuple(dict.fromkeys(one.prompt for one in fresh)) != found.prompts:
        yield "the prompts that it used up are not those of its evidence"
    if again := next((one for one in fresh if one.prompt in used), None):
        yield f"item {again.item!r} had decided before"
    owner: dict[int, int] = {}
    numbers = iter(voices(fresh, lambda one: names_of(one.prompt, one.cluster)))
    for i, look in enumerate(looks):
        for one in look.fresh:
            if owner.setdefault(next(numbers), i) != i:
                yield f"item {one.item!r} is of a voice that an earlier look has counted"
                return
    ids = [one.item for look in looks for one in look.fresh]
    if len(set(ids)) < len(ids):
        yield f"item {next(name for name in ids if ids.count(name) > 1)!r} stands in it twice"
    yield from _of_suites(history, found, looks)
    mine = {one.prompt for one in fresh}
    for _, ruling_before in history.races.get(found.hypothesis, []):
        mine.update(ruling_before.prompts)
    for look in looks:
        for one in look.regression:
            if one.prompt not in used or one.prompt in mine:
                yield f"item {one.item!r} of its regression suite has not decided on an earlier candidate"
                return


def _of_sampling(plan: Plan, looks: list[Look]) -> Iterator[str]:
    """Each item must have been answered by the sampling parameters that it draws from the plan's."""
    for look in looks:
        for one in (*look.fresh, *look.regression, *(one for seen in look.suites.values() for one in seen)):
            if one.sampling != (drawn := plan.decoding.drawn(one.item)):
                yield f"item {one.item!r} was answered by sampling parameters {one.sampling}, and it draws {drawn}"
                return


def _of_suites(history: History, found: Ruling, looks: list[Look]) -> Iterator[str]:
    """Guardrail suites are looked at once, at a candidate's first look, and are those of its plan."""
    first = not history.races.get(found.hypothesis)
    for i, look in enumerate(looks):
        expected = set(found.plan.suites) if first and i == 0 else set()
        if set(look.suites) != expected:
            yield f"look {i + 1} is at the suites {sorted(look.suites)}, and its plan gives it {sorted(expected)}"
        for name, seen in look.suites.items():
            if len({one.item for one in seen}) < len(seen):
                yield f"an item stands in its suite {name} twice"


def _of_promotion(history: History, entry: Entry) -> Iterator[str]:
    """What is wrong with a move of the pointer: a promotion needs a passing verdict, a rollback a policy that has
    served, or either an override.

    Moves from before the first verdict are from before there was a ledger.
    """
    body = entry.body
    if not history.races or body.get("override") or body.get("previous") in (None, body.get("version")):
        return
    if entry.kind == "rollback":
        served = {other.body.get("sha256") for other in history.others}
        if body.get("sha256") is not None and body["sha256"] not in served:
            yield f"the pointer was moved back to policy {body.get('version')}, which has not served"
        return
    for one in (tried(other) for other in history.others if other.kind == "experiment"):
        pair = (one.candidate.sha256, one.control.sha256)
        harmed = one.decision in ("roll back", "failed")
        if harmed and pair == (body.get("sha256"), body.get("previous_sha256")):
            yield f"policy {body.get('version')} was promoted after experiment {one.number}: {one.decision}"
    for shadow in (other for other in history.others if other.kind == "shadow"):
        harm = shadow_harm(shadow, str(body.get("sha256")), str(body.get("previous_sha256")))
        # The pointer's move comes before its entry, and a shadow that runs beside may come to its end in between.
        if harm and datetime.fromisoformat(shadow.at) <= datetime.fromisoformat(str(body.get("at"))):
            yield f"policy {body.get('version')} was promoted after its shadow, entry {shadow.number}, showed harm"
    found = history.last(str(body.get("sha256")), str(body.get("previous_sha256")))
    if found is None or found[1].verdict != "pass":
        of, before = body.get("version"), body.get("previous")
        yield f"policy {of} was promoted without a passing verdict against policy {before}"


def _named(budget: ErrorBudget | None) -> str:
    return "no budget" if budget is None else f"{budget.rule} {budget.alpha:g} over {budget.horizon}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
