"""Everything in the ledger recomputed: each verdict from the scores that were kept, each level from those before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from evaluation.decisions import gate
from evaluation.decisions.gate import State
from evaluation.decisions.history import History, Ruling, looks_of, ruling
from evaluation.decisions.judgement import standings
from evaluation.decisions.ledger import Entry, Ledger, LedgerDamaged
from evaluation.decisions.observations import Look, names_of, voices
from evaluation.statistics.betting import OutOfBounds


@dataclass(frozen=True)
class Verification:
    """``problems`` names each entry that is not what it must be; ``spent`` is the sum of all levels."""

    entries: int
    verdicts: int
    spent: float
    problems: tuple[str, ...]


def verify(ledger: Ledger) -> Verification:
    """Recompute the ledger: its chain, and of each verdict the level, the items, the evidence and the verdict itself.

    Experiments are ``evaluation.experiments.verification``'s.

    A verdict must follow from its plan and its looks bit for bit, none may follow a final one, its plan must be that of
    its first look and its level the budget's, no prompt may decide twice, and a promotion must be of the candidate that
    passed against what served, or an override.
    """
    try:
        entries = ledger.entries()
    except LedgerDamaged as error:
        return Verification(0, 0, 0.0, (str(error),))
    history, states, problems = History(), dict[str, State](), list[str]()
    for entry in entries:
        where = f"entry {entry.number}"
        try:
            if entry.kind == "verdict":
                found = ruling(entry)
                problems += [f"{where}: {why}" for why in _of_verdict(ledger, history, states, found)]
            elif entry.kind != "experiment":
                problems += [f"{where}: {why}" for why in _of_promotion(history, entry)]
            history.add(entry)
        except (LedgerDamaged, OutOfBounds, KeyError, ValueError) as error:
            problems.append(f"{where}: {error}")
    verdicts = sum(entry.kind == "verdict" for entry in entries)
    return Verification(len(entries), verdicts, history.spent(), tuple(problems))


def _of_verdict(ledger: Ledger, history: History, states: dict[str, State], found: Ruling) -> Iterator[str]:
    """What is wrong with a verdict, after those before it."""
    name, plan = found.hypothesis, found.plan
    earlier = history.races.get(name, [])
    if earlier and earlier[-1][1].final:
        yield f"entry {earlier[-1][0].number} is a final verdict on this candidate already"
    if earlier and earlier[0][1].plan != plan:
        yield f"its plan is not that of the candidate's first look, entry {earlier[0][0].number}"
    if plan.level != (level := history.level(plan.budget, name)):
        yield f"its level is {plan.level!r}, and what the budget gives it is {level!r}"
    looks = looks_of(ledger, found)
    yield from _of_items(history, found, looks)
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


def _of_items(history: History, found: Ruling, looks: list[Look]) -> Iterator[str]:
    fresh = [one for look in looks for one in look.fresh]
    if tuple(dict.fromkeys(one.prompt for one in fresh)) != found.prompts:
        yield "the prompts that it used up are not those of its evidence"
    if again := next((one for one in fresh if one.prompt in history.used), None):
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
    mine = {one.prompt for one in fresh}
    for _, ruling_before in history.races.get(found.hypothesis, []):
        mine.update(ruling_before.prompts)
    for look in looks:
        for one in look.regression:
            if one.prompt not in history.used or one.prompt in mine:
                yield f"item {one.item!r} of its regression suite has not decided on an earlier candidate"
                return


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
    found = history.last(str(body.get("sha256")), str(body.get("previous_sha256")))
    if found is None or found[1].verdict != "pass":
        of, before = body.get("version"), body.get("previous")
        yield f"policy {of} was promoted without a passing verdict against policy {before}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
