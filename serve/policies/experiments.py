"""Experiments on live traffic, as servers obey them: two policies take turns, block of time by block of time.

experiments/000001.json   one experiment each; at most one has not ended

An experiment here is a record and a rule: who serves in which block. Whoever decides on it writes the record, servers
read it, and stop it where they can't go on (or where somebody asks them to). Which policy a block has follows from the
record alone, so that all who read it agree, after any restart.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass as checked

from serve.policies.folder import PolicyError
from serve.policies.records import exclusive, now, write_json

_FOLDER: Final = "experiments"

Variant = Literal["candidate", "control"]
State = Literal["running", "committed", "stopping", "ended"]


class ExperimentRunning(PolicyError):
    """Another experiment has not ended."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class NoSuchExperiment(PolicyError):
    """There is no experiment of that number."""


@checked(frozen=True)
class Phase:
    """From block ``from_block`` on, the candidate has a block with probability ``share``."""

    from_block: int = Field(ge=0)
    share: float = Field(gt=0, le=1)


@dataclass(frozen=True)
class Turn:
    """Who serves in a block: ``variant`` was drawn with probability ``propensity``."""

    experiment: int
    block: int
    variant: Variant
    version: int
    propensity: float


@checked(frozen=True)
class Experiment:
    """One experiment.

    ``started_at``: seconds of Unix time, when block 0 begins; ``block_s``: a block's length. ``generation``: the move
    of the serving pointer under which it holds; with any other, servers follow the pointer. ``state``: ``running``
    (the pointer names the control), ``committed`` (it names the candidate, which is watched beside the control),
    ``stopping`` (nobody obeys it any more, and what it came to is not on record yet), ``ended``. ``plan``: how it is
    decided; ``expires_at``: when servers take it for over, even if nobody decides; ``watched_from``: the first block
    that counts for a committed candidate; ``latest``: the last look at it; ``end``: what it came to, and why.
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
        draw = int.from_bytes(hashlib.sha256(f"{self.seed}:{block}".encode()).digest()[:8]) / 2**64
        share = self.share(block)
        if draw < share:
            return Turn(self.number, block, "candidate", self.candidate, share)
        return Turn(self.number, block, "control", self.control, 1 - share)


_RECORD: Final = TypeAdapter(Experiment)


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
                "says what it was"
            ) from error

    def last(self) -> Experiment | None:
        """The newest one. Raises PolicyError."""
        numbers = self.numbers()
        return self.get(numbers[-1]) if numbers else None

    def current(self) -> Experiment | None:
        """The one that has not ended. Raises PolicyError."""
        last = self.last()
        return None if last is None or last.state == "ended" else last

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
