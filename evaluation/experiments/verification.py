"""An experiment's entries in the ledger recomputed: the draws, the evidence, and what followed from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from evaluation.decisions.history import History
from evaluation.decisions.ledger import Entry, Ledger, LedgerDamaged
from evaluation.experiments import looks
from evaluation.experiments.blocks import Observed
from evaluation.experiments.plan import ExperimentPlan
from serve.policies.experiments import Experiment, Phase


def verify(ledger: Ledger) -> list[str]:
    """Recompute the ledger's experiments: their draws, their evidence, and what followed. Names each that is wrong.

    A start must have a passing verdict or be an override, and one pair of policies is tried once. A commit, a rollback
    and an end without harm must follow from the blocks that were kept. For a ledger whose verdicts are in order
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
        yield from _of_start(history, before, body)
        return
    if "start" not in mine or "end" in mine:
        yield f"the {event} of experiment {number} is before its start, or after its end"
        return
    start = mine["start"]
    if (body["candidate"], body["control"]) != (start["candidate"], start["control"]):
        yield f"the {event} of experiment {number} is on other policies than its start"
    if body["evidence"] is None:
        if body["decision"] in ("commit", "roll back", "kept", "expired"):
            yield f"experiment {number} came to {body['decision']} without evidence"
        return
    yield from _of_evidence(ledger, start, body, committed="commit" in mine)


def _of_start(history: History, before: list[Entry], body: dict[str, Any]) -> Iterator[str]:
    number = body["number"]
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
    pairs = [(one.body["candidate"]["sha256"], one.body["control"]["sha256"]) for one in before]
    if (candidate, control) in pairs:
        yield f"experiment {number} tried a policy against another one for the second time"


def _of_evidence(ledger: Ledger, start: dict[str, Any], body: dict[str, Any], *, committed: bool) -> Iterator[str]:
    evidence = ledger.evidence(body["evidence"])
    try:
        observed, plan = Observed.model_validate(evidence["observed"]), ExperimentPlan.model_validate(start["plan"])
    except (KeyError, TypeError, ValidationError) as error:
        raise LedgerDamaged(f"evidence {body['evidence'][:12]}… holds no blocks of an experiment") from error
    number = body["number"]
    if evidence["experiment"] != number:
        yield f"its evidence is of experiment {evidence['experiment']}"
    watch = body["phases"][-1]["share"] == plan.watch_share and body["phases"][-1] not in start["phases"]
    planned = body["phases"][:-1] if watch else body["phases"]  # a commit cuts the phases short, and adds the watch
    if planned != start["phases"][: len(planned)]:
        yield "its phases are not those that it started with"
    drawn = Experiment(
        number=number,
        candidate=start["candidate"]["version"],
        control=start["control"]["version"],
        seed=start["seed"],
        started_at=start["started_at"],
        block_s=start["block_s"],
        phases=tuple(Phase(**phase) for phase in body["phases"]),
        generation=0,
        state="ended",
        who="",
        why="",
        plan=start["plan"],
    )
    numbers = [block.block for block in observed.blocks]
    if numbers != sorted(set(numbers)):
        yield "its blocks are not in order, or stand in it twice"
    for block in observed.blocks:
        turn = drawn.turn(block.block)
        if (block.candidate, block.propensity) != (turn.variant == "candidate", turn.propensity):
            yield f"block {block.block} was drawn for the {turn.variant} with probability {turn.propensity:g}"
            return
    decision = looks.look(plan, observed, watched_from=body["phases"][-1]["from_block"] if committed else None)
    expected = decision.decision
    claimed = body["decision"]
    if (claimed in ("commit", "roll back") and claimed != expected) or (
        claimed in ("kept", "expired") and expected == "roll back"
    ):
        yield f"experiment {number} came to {claimed}, and its evidence says {expected}"
    if claimed in ("commit", "roll back") and "; ".join(decision.reasons) not in body["why"]:
        yield f"its reason is {body['why']!r}, and its evidence gives {'; '.join(decision.reasons)!r}"
