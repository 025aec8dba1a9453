"""What happened since a position in a home's records: promotions, refusals, rollbacks, failures.

Cycles, moves of the pointer and experiments each come in order, and are final when they are told. So a position is
three numbers, and reading on from it after a restart tells each once.

What an error says stays here: it may quote a prompt, or name folders. An event has where it was, and where it is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from deploy.config.root import EventKind, Settings
from deploy.loop import records
from deploy.loop.records import CycleRecord
from serve.policies.experiments import Experiment
from serve.policies.store import Pointer


@dataclass(frozen=True)
class Event:
    """``id`` is the same however often it is sent; ``policy``: the one that it is about; ``at``: ISO 8601, UTC.

    ``reason``: the gate's, the experiment's or a person's; of an error, where to read it. ``stage``: of the cycle, that
    failed. ``serving``: what serves behind it; ``override``: whether somebody moved the pointer without the gate's
    consent.
    """

    id: str
    event: EventKind
    at: str
    text: str
    reason: str
    policy: int | None
    previous: int | None = None
    serving: int | None = None
    override: bool = False
    cycle: int | None = None
    stage: str | None = None
    experiment: int | None = None
    who: str | None = None

    def body(self, home: str) -> dict[str, Any]:
        """As it is sent."""
        return {**asdict(self), "home": home}


@dataclass(frozen=True, order=True)
class Position:
    """What has been told: all cycles and experiments up to a number, all moves up to a generation."""

    cycle: int = 0
    move: int = 0
    experiment: int = 0


def end(settings: Settings) -> Position:
    """The position behind all that has happened. Raises PolicyError."""
    return max((position for position, _ in since(settings, Position())), default=Position())


def since(settings: Settings, position: Position) -> Iterator[tuple[Position, Event | None]]:
    """The events behind a position, each with the position after it; None for what is none. Raises PolicyError."""
    cycle, move, experiment = position.cycle, position.move, position.experiment
    for record in _ended(settings, cycle):
        cycle = record.number
        yield Position(cycle, move, experiment), _of_cycle(record)
    store = settings.policy_store()
    refused = {(one.generation + 1, one.by) for one in store.outcomes() if not one.served}  # by whom it was moved back
    for pointer in store.history():
        if pointer.generation > move:
            move = pointer.generation
            by_server = (pointer.generation, pointer.who) in refused
            yield Position(cycle, move, experiment), _of_move(pointer, by_server=by_server)
    experiments = store.experiments
    for number in (number for number in experiments.numbers() if number > experiment):
        found = experiments.get(number)
        if found.state != "ended":
            return
        experiment = number
        yield Position(cycle, move, experiment), _of_experiment(found)


def _ended(settings: Settings, after: int) -> Iterator[CycleRecord]:
    """The cycles behind a number, up to the first that runs: one that died is closed by the next."""
    folder = settings.path(settings.cycle.folder)
    for path in sorted(folder.glob("[0-9]*.json")):
        if int(path.stem) <= after:
            continue
        record = CycleRecord.model_validate_json(path.read_bytes())
        if record.status == "running":
            return
        yield record


def _of_cycle(record: CycleRecord) -> Event | None:
    if record.status not in ("refused", "failed"):
        return None  # a promotion is told as the move that it is
    stage = next((one for one in reversed(record.stages) if not one.ok), None)
    if record.status == "refused":
        reason, stage = record.reason or "", None
    elif stage is None:
        reason = f"it failed in none of its stages; `millrace status` and cycles/{record.number:06d}.json say why"
    else:
        how = "was stopped" if stage.killed else "failed"
        reason = f"the stage {stage.name} {how}; `millrace status` and logs/cycle-{record.number:06d}-*.log say why"
    about = "" if record.candidate is None else f", policy {record.candidate}"
    return Event(
        id=f"cycle-{record.number}",
        event=record.status,
        at=(record.finished_at or records.now()).isoformat(),
        text=f"Cycle {record.number}{about} {'was refused' if record.status == 'refused' else 'failed'}",
        reason=reason,
        policy=record.candidate,
        serving=record.incumbent,
        cycle=record.number,
        stage=None if stage is None else stage.name,
    )


def _of_move(pointer: Pointer, *, by_server: bool) -> Event | None:
    """``by_server``: what was to serve could not, so that why it was moved is an error's text."""
    if pointer.previous is None:
        return None  # the home's first policy
    verdict = pointer.verdict or {}
    back, override = verdict.get("rollback_from"), bool(verdict.get("override"))
    kind: Literal["promoted", "rolled_back"] = "promoted" if back is None else "rolled_back"
    text = f"Policy {pointer.version} was promoted" if back is None else f"Policy {back} was rolled back"
    if override:
        text += " without the gate's consent"
    return Event(
        id=f"move-{pointer.generation}",
        event=kind,
        at=pointer.at,
        text=f"{text}, by {pointer.who}: policy {pointer.version} serves (before: {back or pointer.previous})",
        reason=f"{pointer.who} could not serve it; `millrace history` says why" if by_server else pointer.why,
        policy=pointer.version if back is None else back,
        previous=pointer.previous if back is None else pointer.version,
        serving=pointer.version,
        override=override,
        who=pointer.who,
    )


def _of_experiment(found: Experiment) -> Event | None:
    """One that was committed before has moved the pointer back, which is told as such."""
    came_to = found.end or {}
    kind: EventKind
    if came_to.get("decision") == "roll back" and found.watched_from is None:
        kind = "rolled_back"
    elif came_to.get("decision") == "failed":
        kind = "failed"
    else:
        return None
    verb = "was rolled back by" if kind == "rolled_back" else "failed in"
    return Event(
        id=f"experiment-{found.number}",
        event=kind,
        at=str(came_to.get("at")),
        text=f"Policy {found.candidate} {verb} experiment {found.number}",
        reason=str(came_to.get("why", ""))
        if kind == "rolled_back"
        else f"`millrace experiment show {found.number}` says why",
        policy=found.candidate,
        previous=found.control,
        serving=found.control,
        experiment=found.number,
        who=came_to.get("who"),
    )
