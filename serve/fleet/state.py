"""A fleet's desired state: one durable record, written by the controller alone and read by all replicas.

Between deployments all replicas serve ``serving``. A deployment takes them to the policy that the store's pointer
names. In the record and in ``GET /policy`` it is called rollout::

    preparing   each replica verifies the policy and prepares its weights, while it serves
    canary      one replica serves it, to its share of the traffic
    committing  the others follow, one at a time
    undoing     something failed: all go back to ``serving``, the pointer too

Between deployments, while an experiment runs that draws for users (``serve.policies.experiments``), some replicas serve
its candidate and the others its control: ``split``.

What a replica has to do follows from the record and the replica's name alone, so that one that joins at any moment, or
reads the record late, ends where the others end.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter

from feedback.files import replace_file
from serve.policies.experiments import Experiment, Turn, Variant
from serve.policies.records import append_json
from serve.policies.store import Pointer, PolicyError

Phase = Literal["preparing", "canary", "committing", "undoing"]
CANARY: Final = "canary"
_FILE: Final = "fleet.json"
_HISTORY: Final = "rollouts.jsonl"


class FleetError(RuntimeError):
    """The fleet can't be run as configured; the text says why and what to do."""


@dataclass(frozen=True)
class Instant:
    """A moment. ``seconds``: of a monotonic clock; ``clock`` names it, and seconds of two clocks don't compare.

    ``wall``: seconds since 1970, for people.
    """

    seconds: float
    clock: str
    wall: float


def _boot() -> str:
    """Names this machine's monotonic clock, which all its processes share until it is started again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux: as if each process had its own
        return uuid.uuid4().hex


_CLOCK: Final = _boot()


def instant() -> Instant:
    return Instant(time.monotonic(), _CLOCK, time.time())


@dataclass(frozen=True)
class Deployment:
    """A policy on its way into the fleet. Times are an Instant's seconds by ``clock``, ``started`` its wall time.

    ``since``: when the step that is waited for began. ``lives``: which life of each canary was chosen.
    ``judged_from``: when the canary served the policy; from then on ``baseline`` counts, by replica: (life, requests,
    failures). ``held``: it serves alone for longer, having answered too few; ``unproven``: it never answered enough.
    ``done``: the replicas that should serve the policy, of which the last may not do so yet.
    """

    to: Pointer
    phase: Phase
    started: float
    since: float
    clock: str = ""
    canaries: tuple[str, ...] = ()
    lives: dict[str, str] = field(default_factory=dict)
    share: float = 0.0
    judged_from: float | None = None
    baseline: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    held: bool = False
    unproven: str | None = None
    done: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Split:
    """The replicas that serve an experiment's candidate; all others serve its control."""

    experiment: int
    candidates: tuple[str, ...]


@dataclass(frozen=True)
class FleetState:
    """The record. ``failed``: the last deployment, if it was undone; ``stopping``: the fleet is to stop."""

    serving: Pointer
    deployment: Annotated[Deployment | None, Field(alias="rollout")] = None
    failed: dict[str, Any] | None = None
    stopping: bool = False
    split: Split | None = None

    @property
    def phase(self) -> str:
        """The deployment's phase, or ``settled``."""
        return self.deployment.phase if self.deployment else "settled"


_JSON: Final = TypeAdapter(FleetState)


def by_content(state: FleetState) -> bool:
    """Whether it matters which replica answers a request: a policy is on trial, or an experiment has replicas."""
    deployment = state.deployment
    return state.split is not None or (deployment is not None and deployment.phase in ("canary", "undoing"))


@dataclass(frozen=True)
class Task:
    """What one replica has to do: serve a policy, and have another one ready.

    ``trial``: the policy may fail; the replica then reports it and stays where it was. Otherwise the whole fleet is
    there, and a replica that can't follow is replaced.
    """

    serve: Pointer
    prepare: Pointer | None = None
    trial: bool = False
    variant: str | None = None


def task_of(state: FleetState, name: str) -> Task:
    """What the replica called ``name`` has to do."""
    deployment = state.deployment
    if deployment is None or deployment.phase == "undoing":
        return Task(state.serving)
    if name in deployment.done or (deployment.phase == "canary" and name in deployment.canaries):
        return Task(deployment.to, trial=True, variant=CANARY if deployment.phase == "canary" else None)
    return Task(state.serving, prepare=deployment.to)


def part_of(state: FleetState, experiment: Experiment | None, name: str) -> Turn | None:
    """The part of the replica called ``name`` in the experiment that holds, if it draws for users and has replicas."""
    split = state.split
    if experiment is None or split is None or state.deployment is not None or split.experiment != experiment.number:
        return None
    variant: Variant = "candidate" if name in split.candidates else "control"
    return Turn(experiment.number, 0, variant, experiment.version_of(variant), 1.0, drawn=False)


class FleetRecord:
    """The record on disk, in the policy store's folder. One process writes it, any number read it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._path = root / _FILE

    def read(self) -> FleetState | None:
        """The record, None if there is none. Raises PolicyError if it is unreadable."""
        try:
            return _JSON.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise PolicyError(f"{self._path} is no record of a fleet: {error}") from error

    def write(self, state: FleetState) -> None:
        """Replace the record, whole or not at all; durable when this returns."""
        replace_file(self._path, _JSON.dump_json(state, by_alias=True, indent=2) + b"\n")

    def append_history(self, entry: dict[str, Any]) -> None:
        """Add a deployment that ended."""
        append_json(self.root / _HISTORY, entry)
