"""An experiment's entries in the ledger recomputed: the draws, the evidence, and what followed from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from pydantic import ValidationError

from evaluation.decisions.history import History, shadow_harm
from evaluation.decisions.ledger import Entry, Ledger, LedgerDamaged
from evaluation.experiments import looks
from evaluation.experiments.blocks import Block, Observed
from evaluation.experiments.plan import ExperimentPlan
from serve.policies.experiments import Experiment, Phase

_START_S: Final = 600.0  # between declaration and block 0, at most: clocks of two machines
_CLOCK_S: Final = 1.0  # that a clock may have been set back between a look and its entry


def verify(ledger: Ledger) -> list[str]:
    """Recompute the ledger's experiments: their draws, their evidence, and what followed. Names each that is wrong.

    A start must have a passing verdict or be an override, and one pair of policies is tried once. A commit, a rollback
    and an end without harm must follow from the blocks that were kept, and what is kept have been watched for the time
    of its plan. For a ledger whose verdicts are in order
    (``evaluation.decisions.verification``).
    """
    history, problems = History(), list[str]()
    for entry in ledger.entries():
        try:
            if entry.kind == "experiment":
                problems += [f"entry {entry.number}: {why}" for why in _of_entry(ledger, history, entry)]
            history.add(entry)
        except (LedgerDamaged, KeyError, ValueError) as error:
            problems.append(f"entry {entry.number}: {error}")
    return problems


def _of_entry(ledger: Ledger, history: History, entry: Entry) -> Iterator[str]:
    """What is wrong with an entry of an experiment, after those before it."""
    body = entry.body
    number, event = body["number"], body["event"]
    before = [one for one in history.others if one.kind == "experiment"]
    mine = {one.body["event"]: one.body for one in before if one.body["number"] == number}
    if event in mine:
        yield f"the {event} of experiment {number} stands in it twice"
        return
    if event == "start":
        yield from _of_start(history, before, entry)
        return
    if "start" not in mine or "end" in mine:
        yield f"the {event} of experiment {number} is before its start, or after its end"
        return
    start = mine["start"]
    if (body["candidate"], body["control"]) != (start["candidate"], start["control"]):
        yield f"the {event} of experiment {number} is on other policies than its start"
    if (event == "commit") != (body["decision"] == "commit"):
        yield f"the {event} of experiment {number} came to {body['decision']}"
    committed = mine.get("commit")
    if committed is None and body["phases"] != start["phases"][: len(body["phases"])]:
        yield "its phases are not those that it started with"
    if body["decision"] == "not begun" and (committed is not None or body["evidence"] is not None):
        yield f"experiment {number} ended as not begun, and it has {'a commit' if committed else 'evidence'}"
    if body["decision"] == "kept":
        yield from _of_watch(start, entry, committed)
    if body["evidence"] is None:
        if body["decision"] in ("commit", "roll back", "kept"):
            yield f"experiment {number} came to {body['decision']} without evidence"
        return
    yield from _of_evidence(ledger, start, entry, committed)


def _of_start(history: History, before: list[Entry], entry: Entry) -> Iterator[str]:
    body, number = entry.body, entry.body["number"]
    ExperimentPlan.model_validate(body["plan"])
    if abs(body["started_at"] - _seconds(entry)) > _START_S:
        yield f"experiment {number} began at another time than it was declared"
    ended = {one.body["number"] for one in before if one.body["event"] == "end"}
    if open_one := next((one for one in before if one.body["number"] not in ended), None):
        yield f"experiment {number} began before experiment {open_one.body['number']} had ended"
    if any(one.body["number"] >= number for one in before):
        yield f"experiment {number} has the number of an earlier one, or a lower one"
    if body["override"]:
        return
    candidate, control = body["candidate"]["sha256"], body["control"]["sha256"]
    found = history.last(candidate, control)
    if found is None or found[1].verdict != "pass":
        yield f"experiment {number} tried policy {body['candidate']['version']} without a passing verdict"
    for shadow in (one for one in history.others if one.kind == "shadow"):
        if shadow_harm(shadow, candidate, control):
            yield f"experiment {number} tried a policy after its shadow, entry {shadow.number}, showed harm"
    not_begun = {one.body["number"] for one in before if one.body.get("decision") == "not begun"}
    not_begun -= {one.body["number"] for one in before if one.body["event"] == "commit"}
    tried = [one.body for one in before if one.body["number"] not in not_begun]
    if (candidate, control) in [(one["candidate"]["sha256"], one["control"]["sha256"]) for one in tried]:
        yield f"experiment {number} tried a policy against another one for the second time"


def _of_watch(start: dict[str, Any], entry: Entry, committed: dict[str, Any] | None) -> Iterator[str]:
    """What is wrong with the time that a candidate was watched before it was kept."""
    body = entry.body
    if committed is None:
        yield f"experiment {body['number']} was kept without a commit"
        return
    plan = ExperimentPlan.model_validate(start["plan"])
    began = start["started_at"] + body["phases"][-1]["from_block"] * start["block_s"]
    early = began + plan.watch_s + plan.window_s - _seconds(entry)
    if early > _CLOCK_S:
        yield f"experiment {body['number']} was kept {early:.0f} s before its watch and the feedback's window were over"


def declared(start: dict[str, Any], phases: Sequence[dict[str, Any]]) -> Experiment:
    """An experiment as the ledger's entry of its start has it, with these phases; it has ended, and nobody obeys it."""
    return Experiment(
        number=start["number"],
        candidate=start["candidate"]["version"],
        control=start["control"]["version"],
        seed=start["seed"],
        started_at=start["started_at"],
        block_s=start["block_s"],
        phases=tuple(Phase(**phase) for phase in phases),
        generation=0,
        state="ended",
        who="",
        why=start["why"],
        plan=start["plan"],
        unit=start.get("unit", "block"),
    )


def _of_evidence(
    ledger: Ledger, start: dict[str, Any], entry: Entry, committed: dict[str, Any] | None
) -> Iterator[str]:
    """What is wrong with the blocks of an entry, and with what is said to follow from them."""
    body, number = entry.body, entry.body["number"]
    plan, blocks = ExperimentPlan.model_validate(start["plan"]), _blocks(ledger, body)
    drawn = declared(start, body["phases"])
    watched_from = None
    if committed is not None:
        before = _blocks(ledger, committed)
        watched_from = before[-1].block + 1
        if drawn.unit == "user":  # they are drawn anew then
            watched_from = max(watched_from, body["phases"][-1]["from_block"])
        if blocks[: len(before)] != before:
            yield "its blocks are not those of its commit, and later ones"
        watch = body["phases"][-1]
        planned = body["phases"][:-1]
        if watch["from_block"] < watched_from or watch["share"] != plan.watch_share:
            yield "its watch is not behind what it was committed by, with the share that its plan has"
        if planned != start["phases"][: len(planned)]:
            yield "its phases are not those that it started with"
    problems = list((_of_users if drawn.unit == "user" else _of_blocks)(drawn, plan, blocks, _seconds(entry)))
    yield from problems
    if any("was drawn for" in problem for problem in problems):
        return
    decision = looks.look(plan, Observed(blocks=tuple(blocks)), watched_from=watched_from)
    claimed, found = body["decision"], decision.decision
    if (claimed in ("commit", "roll back") and claimed != found) or (
        claimed not in ("roll back", "failed") and found == "roll back"
    ):
        yield f"experiment {number} came to {claimed}, and its evidence says {found}"
    if claimed in ("commit", "roll back") and "; ".join(decision.reasons) not in body["why"]:
        yield f"its reason is {body['why']!r}, and its evidence gives {'; '.join(decision.reasons)!r}"


def _of_blocks(drawn: Experiment, plan: ExperimentPlan, blocks: list[Block], at: float) -> Iterator[str]:
    """What is wrong with the blocks that were decided by ``at`` a time, in seconds of Unix time."""
    numbers = [block.block for block in blocks]
    if numbers != sorted(set(numbers)) or (numbers and numbers[0] < 0):
        yield "its blocks are not in order, or stand in it twice"
    if numbers and drawn.begins(numbers[-1] + 1) + plan.window_s > at:
        yield f"block {numbers[-1]} had not closed when it was decided"
    for block in blocks:
        turn = drawn.turn(block.block)
        if (block.candidate, block.propensity) != (turn.variant == "candidate", turn.propensity):
            yield f"block {block.block} was drawn for the {turn.variant} with probability {turn.propensity:g}"
            return


def _of_users(drawn: Experiment, plan: ExperimentPlan, users: list[Block], at: float) -> Iterator[str]:
    """The same of users. Which user a draw belongs to stands in the lake's rows, and in no ledger."""
    if any(user.draw is None or user.first_at is None for user in users):
        yield "its evidence is of blocks, and it draws for users"
        return
    order = [(float(user.first_at or 0.0), str(user.draw)) for user in users]
    if order != sorted(order) or len({draw for _, draw in order}) != len(order):
        yield "its users are not in order, or stand in it twice"
    if order and order[-1][0] + plan.window_s > at:
        yield f"user {order[-1][1]} had not closed when it was decided"
    for user, (first_at, draw) in zip(users, order, strict=True):
        variant, propensity = drawn.drawn(draw, user.block)
        if (user.candidate, user.propensity) != (variant == "candidate", propensity):
            yield f"user {draw} was drawn for the {variant} with probability {propensity:g}"
            return
        if user.block != drawn.block_at(first_at) or user.block < 0:
            yield f"user {draw} came in block {drawn.block_at(first_at)}, and not {user.block}"
            return


def _blocks(ledger: Ledger, body: dict[str, Any]) -> list[Block]:
    """The blocks that an entry rests on. Raises LedgerDamaged."""
    evidence = ledger.evidence(body["evidence"])
    try:
        if evidence["experiment"] != body["number"]:
            raise LedgerDamaged(f"its evidence is of experiment {evidence['experiment']}")
        return list(Observed.model_validate(evidence["observed"]).blocks)
    except (KeyError, TypeError, ValidationError) as error:
        raise LedgerDamaged(f"evidence {body['evidence'][:12]}… holds no blocks of an experiment") from error


def _seconds(entry: Entry) -> float:
    return datetime.fromisoformat(entry.at).timestamp()
