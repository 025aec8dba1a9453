"""Experiments on live traffic, as servers obey them: two policies share it, by a draw.

experiments/000001.json   one experiment each; at most one has not ended

An experiment here is a record and a rule. With one replica the two policies take turns, and what is drawn for is a
block of time. In a fleet each has replicas of its own, and what is drawn for is the user, else the session, else the
request. Whoever decides on an experiment writes the record, servers read it, and stop it where they can't go on (or
where somebody asks them to). Who is served by which policy follows from the record alone, so that all who read it
agree, after any restart.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass as checked

from serve.policies.folder import PolicyError
from serve.policies.records import exclusive, now, write_json

log = logging.getLogger(__name__)

_FOLDER: Final = "experiments"
FALLBACK: Final = "fallback"
"""What a row says as ``variant`` that was answered outside of the draw."""

Variant = Literal["candidate", "control"]
Unit = Literal["block", "user"]
State = Literal["running", "committed", "stopping", "ended"]


class ExperimentRunning(PolicyError):
    """Another experiment has not ended."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class NoSuchExperiment(PolicyError):
    """There is no experiment of that number."""


@checked(frozen=True)
class Phase:
    """From block ``from_block`` on, the candidate has what is drawn for with probability ``share``."""

    from_block: int = Field(ge=0)
    share: float = Field(gt=0, le=1)


@dataclass(frozen=True)
class Turn:
    """Who serves in a block: ``variant`` was drawn with probability ``propensity``.

    ``drawn`` False: a replica's part in an experiment that draws for users, for as long as it lasts.
    """

    experiment: int
    block: int
    variant: Variant
    version: int
    propensity: float
    drawn: bool = True


@dataclass(frozen=True)
class Assignment:
    """Who serves a request: ``variant`` was drawn with probability ``propensity`` for the unit that ``draw`` names.

    ``draw``: 32 hexadecimal digits, even over all units; another experiment has others for the same units.
    ``counts``: whether it was made to be kept to; of a request outside of the draw it only says what would have been.
    """

    experiment: int
    draw: str
    variant: Variant
    version: int
    propensity: float
    counts: bool = True


def unit_of(tenant: str, *, user: str | None, session: str | None, request: str) -> str:
    """The unit that a request belongs to: its user's, else its session's, else its own. 32 hexadecimal digits."""
    kind, name = ("user", user) if user else ("session", session) if session else ("request", request)
    return hashlib.sha256(json.dumps([tenant, kind, name]).encode()).hexdigest()[:32]


@checked(frozen=True)
class Experiment:
    """One experiment.

    ``started_at``: seconds of Unix time, when block 0 begins; ``block_s``: a block's length. ``unit``: what is drawn
    for, a block or a user; of the latter, blocks only say when phases begin. ``generation``: the move
    of the serving pointer under which it holds; with any other, servers follow the pointer. ``state``: ``running``
    (the pointer names the control), ``committed`` (it names the candidate, which is watched beside the control),
    ``stopping`` (nobody obeys it any more, and what it came to is not on record yet), ``ended``. ``plan``: how it is
    decided; ``expires_at``: when servers take it for over, even if nobody decides; ``watched_from``: the first block
    that counts for a committed candidate, from which on users are drawn anew; ``latest``: the last look at it;
    ``end``: what it came to, and why.
    """

    number: int
    candidate: int
    control: int
    seed: str
    started_at: Annotated[float, Field(allow_inf_nan=False)]
    block_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    phases: Annotated[tuple[Phase, ...], Field(min_length=1)]
    generation: int
    state: State
    who: str
    why: str
    plan: dict[str, Any]
    expires_at: float | None = None
    watched_from: int | None = None
    latest: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    unit: Unit = "block"

    @model_validator(mode="after")
    def _phases_in_order(self) -> Experiment:
        begins = [phase.from_block for phase in self.phases]
        if begins[0] != 0 or begins != sorted(set(begins)):
            raise ValueError(f"phases begin at block 0 and in order, not at {begins}")
        return self

    @property
    def holds(self) -> bool:
        """Whether servers obey it, if the pointer is where it was left."""
        return self.state in ("running", "committed")

    def block_at(self, at: float) -> int:
        """The block at a time, in seconds of Unix time; below 0 before the experiment."""
        return math.floor((at - self.started_at) / self.block_s)

    def begins(self, block: int) -> float:
        """When a block begins, in seconds of Unix time."""
        return self.started_at + block * self.block_s

    def share(self, block: int) -> float:
        """The probability that the candidate has the block."""
        return next(phase.share for phase in reversed(self.phases) if phase.from_block <= max(0, block))

    def turn(self, block: int) -> Turn:
        """Who has the block: by a hash of the seed and the block."""
        draw = hashlib.sha256(f"{self.seed}:{block}".encode()).hexdigest()[:32]
        variant, propensity = self.drawn(draw, block)
        return Turn(self.number, block, variant, self.version_of(variant), propensity)

    def assign(self, unit: str, at: float) -> Assignment:
        """Who serves a unit (``unit_of``) at a time, in seconds of Unix time: by a hash of the seed and the unit.

        The candidate keeps its units when its share grows. The watch behind a commit draws anew: what was shown of
        units before says nothing of who serves them then.
        """
        block = self.block_at(at)
        watch = ":watch" if self.watched_from is not None and block >= self.watched_from else ""
        draw = hashlib.sha256(f"{self.seed}{watch}:{unit}".encode()).hexdigest()[:32]
        variant, propensity = self.drawn(draw, block)
        return Assignment(self.number, draw, variant, self.version_of(variant), propensity)

    def drawn(self, draw: str, block: int) -> tuple[Variant, float]:
        """The variant of a draw in a block, and the probability that it had."""
        share = self.share(block)
        return ("candidate", share) if int(draw[:16], 16) / 2**64 < share else ("control", 1 - share)

    def version_of(self, variant: Variant) -> int:
        """The policy of a variant."""
        return self.candidate if variant == "candidate" else self.control

    def for_routers(self) -> dict[str, Any]:
        """As ``of_replicas`` reads it: what assignment needs, and none of what people wrote."""
        return asdict(replace(self, who="", why="", plan={}, latest=None, end=None))


_RECORD: Final = TypeAdapter(Experiment)


def of_replicas(routing: dict[str, Any]) -> Experiment:
    """The experiment that a replica reports to its router."""
    return _RECORD.validate_python(routing)


class Experiments:
    """The experiments in a policy store's folder. Safe between threads and processes on one machine."""

    def __init__(self, store: Path) -> None:
        self.root = store
        self.folder = store / _FOLDER

    def numbers(self) -> list[int]:
        """Of all experiments, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(path.stem) for path in self.folder.glob("*.json") if path.stem.isdigit())

    def get(self, number: int) -> Experiment:
        """Raises NoSuchExperiment, PolicyError if the record can't be read."""
        path = self._path(number)
        try:
            return _RECORD.validate_json(path.read_bytes())
        except FileNotFoundError:
            have = ", ".join(map(str, self.numbers())) or "none"
            raise NoSuchExperiment(f"there is no experiment {number} (there: {have})") from None
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
            raise PolicyError(
                f"{path} is no experiment ({what}): servers follow the serving pointer. Move the file away; the ledger "
                "says what it was, and `millrace experiment look` then ends it as void"
            ) from error

    def last(self) -> Experiment | None:
        """The newest one. Raises PolicyError."""
        numbers = self.numbers()
        return self.get(numbers[-1]) if numbers else None

    def current(self) -> Experiment | None:
        """The one that has not ended. Raises PolicyError."""
        last = self.last()
        return None if last is None or last.state == "ended" else last

    def under(self, generation: int, at: float) -> Experiment | None:
        """The one that servers obey while the pointer is at ``generation``, at a time in seconds of Unix time.

        Raises PolicyError.
        """
        found = self.current()
        if found is None or not found.holds or found.generation != generation or at < found.started_at:
            return None
        return None if found.expires_at is not None and at >= found.expires_at else found

    def begin(self, experiment: Experiment) -> None:
        """Have servers obey it. Harmless to repeat. Raises ExperimentRunning."""
        self.root.mkdir(parents=True, exist_ok=True)
        with exclusive(self.root / ".lock"):
            last = self.last()
            if last is not None and last.number == experiment.number:
                return
            if last is not None and last.state != "ended":
                raise ExperimentRunning(
                    f"experiment {last.number} on policy {last.candidate} has not ended: one at a time "
                    "(millrace experiment show, millrace experiment stop)"
                )
            self.folder.mkdir(exist_ok=True)
            self._write(experiment)

    def change(self, number: int, to: Callable[[Experiment], Experiment]) -> Experiment:
        """Replace the record by what ``to`` makes of it, while nobody else does. What has ended stays as it is.

        Raises NoSuchExperiment, PolicyError.
        """
        with exclusive(self.root / ".lock"):
            before = self.get(number)
            if before.state == "ended":
                return before
            after = to(before)
            if after != before:
                self._write(after)
            return after

    def stop(self, number: int, *, who: str, why: str, decision: str = "stopped", **details: Any) -> Experiment:
        """Have servers follow the pointer again, from their next look at the record on. Repeating changes nothing.

        decision, details: what it came to. Raises NoSuchExperiment, PolicyError.
        """
        end = {"decision": decision, "at": now(), "who": who, "why": why, **details}

        def stopping(experiment: Experiment) -> Experiment:
            return replace(experiment, state="stopping", end=end) if experiment.holds else experiment

        return self.change(number, stopping)

    def _write(self, experiment: Experiment) -> None:
        write_json(self._path(experiment.number), asdict(experiment))

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"


class ExperimentReader:
    """Reads which experiment holds. One that can't be read is none: the pointer counts, and the log says why, once."""

    def __init__(self, experiments: Experiments) -> None:
        self._experiments = experiments
        self._logged: str | None = None

    def under(self, generation: int) -> Experiment | None:
        """The experiment that is to be obeyed now, while the pointer is at ``generation``."""
        try:
            found, wrong = self._experiments.under(generation, time.time()), None
        except (PolicyError, OSError) as error:
            found, wrong = None, str(error)
        if wrong is not None and wrong != self._logged:
            log.error("no experiment is taken part in: %s", wrong)
        self._logged = wrong
        return found
