"""The records of cycles: what became of each, stage by stage. One file a cycle, replaced whole."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Literal

from pydantic import BaseModel, Field

from deploy.config.root import Settings
from feedback.files import replace_file

EVALUATION_REWARD_MODEL = "evaluation-reward-model"
"""The stage that trains the one that evaluation scores by, on the held-out slice."""

IDLE_CYCLES = 3  # in a row that trained and published nothing: from then on it is worth a warning


LOOP_OFF: Final = ".loop-off"
"""A file in home: why no cycle can work with the settings of the `up` that runs; empty if one can."""

RUNNING: Final = ".up-settings"
"""A file in home: the path of the settings of the `up` that runs, or ran last."""


class Stage(BaseModel):
    """One stage of a cycle; ``result`` is what it handed on."""

    name: str
    started_at: datetime
    seconds: float | None = None
    ok: bool | None = None
    result: dict[str, Any] | None = None
    error: str | None = None
    killed: bool = Field(False, description="It was stopped or killed, rather than failing by itself.")
    run: str | None = Field(None, description="The run of a stage that trains; an earlier cycle's, if that was killed.")

    @property
    def trains_policy(self) -> bool:
        return self.name.partition("-")[0] == "train"

    @property
    def work(self) -> dict[str, float]:
        """What it did in how many seconds, by part, as its process has recorded it, without starts and waits."""
        result = self.result or {}
        of: dict[str, float] = result.get("work") or ({} if self.name != "evaluate" else result.get("seconds", {}))
        return {part: seconds for part, seconds in of.items() if part not in ("start", "wait")}

    @property
    def of_evaluation(self) -> bool:
        return self.name == EVALUATION_REWARD_MODEL


class CycleRecord(BaseModel):
    """What became of a cycle; ``reason`` says why it was skipped, refused or failed, or is undecided.

    An undecided candidate stays in the race: the next cycle goes on with it. ``experiment``: it passed the gate, and is
    tried on live traffic; what comes of that is in the ledger.
    """

    number: int
    status: Literal["running", "promoted", "experiment", "refused", "undecided", "skipped", "stopped", "failed"] = (
        "running"
    )
    reason: str | None = None
    started_at: datetime
    finished_at: datetime | None = None
    incumbent: int | None = None
    recipe: str | None = Field(
        None,
        description="What the training learned from; where it was `auto`, what that was; stages: a list of one's own.",
    )
    recipe_reason: str | None = Field(None, description="Why the recipe `auto` took that one, or none.")
    run: str | None = Field(None, description="The last training run; an earlier cycle's, if its training was killed.")
    reward_model: int | None = Field(None, description="The version that rewarded the training's responses.")
    candidate: int | None = None
    verdict: dict[str, Any] | None = None
    rewards: int | None = Field(None, description="Rows of the rewards table that the training could learn from.")
    feedback: int | None = Field(None, description="Feedbacks that it could learn from; one on a session counts once.")
    stages: list[Stage] = []

    @property
    def seconds(self) -> dict[str, float]:
        return {stage.name: stage.seconds for stage in self.stages if stage.seconds is not None}

    @property
    def unjudged(self) -> bool:
        """Whether it ended before the gate had said something of what it trained."""
        return self.unfinished and self.verdict is None

    @property
    def unfinished(self) -> bool:
        """Whether it ended before it had come to anything: it failed, or was stopped."""
        return self.status in ("failed", "stopped")


def load_all(settings: Settings) -> list[CycleRecord]:
    """The records of all cycles, oldest first."""
    folder = settings.path(settings.cycle.folder)
    return [CycleRecord.model_validate_json(path.read_bytes()) for path in sorted(folder.glob("[0-9]*.json"))]


def without_candidate(settings: Settings) -> list[CycleRecord]:
    """The last cycles in a row that trained and published nothing, oldest first; what did not train is passed over."""
    trained = [record for record in load_all(settings) if any(stage.trains_policy for stage in record.stages)]
    last = max((i for i, record in enumerate(trained) if record.candidate is not None), default=-1)
    return trained[last + 1 :]


def idle_cycles(settings: Settings) -> list[CycleRecord]:
    """Those of ``without_candidate`` that have ended, if they are so many that it is worth a warning."""
    ended = [record for record in without_candidate(settings) if record.status != "running"]
    return ended if len(ended) >= IDLE_CYCLES else []


def close_dead(settings: Settings, say: Callable[[str], None]) -> None:
    """Cycles that are still 'running' while we hold the lock have died."""
    for record in load_all(settings):
        if record.status == "running":
            during = f" in {record.stages[-1].name}" if record.stages else ""
            record.status, record.reason, record.finished_at = "failed", f"its process died{during}", now()
            if record.stages:
                record.stages[-1].killed = record.stages[-1].ok is None
            write(settings, record)
            say(f"cycle {record.number}: {record.reason}")


def new_rows(count: int | None, before: list[int | None]) -> int:
    """How many rows are new since the last count before; all, if there are fewer than then: old ones were removed."""
    last = next((known for known in reversed(before) if known is not None), 0)
    count = count or 0
    return count - last if count >= last else count


def next_number(settings: Settings) -> int:
    return max((record.number for record in load_all(settings)), default=0) + 1


def write(settings: Settings, record: CycleRecord) -> None:
    """Replace the record on disk, whole or not at all."""
    path = settings.path(settings.cycle.folder) / f"{record.number:06d}.json"
    replace_file(path, record.model_dump_json(indent=2).encode() + b"\n")


def now() -> datetime:
    return datetime.now(UTC)
