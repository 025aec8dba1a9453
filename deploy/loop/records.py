"""The records of cycles: what became of each, stage by stage. One file a cycle, replaced whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from deploy.config.root import RecipeStage, Settings
from feedback.files import replace_file
from serve.policies.retention import unmarked_ancestor
from train.run.resume_settings import differing_settings, goes_on

TRAINING_ATTEMPTS = 3  # of cycles at one training run, of which all but the last were killed


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


class CycleRecord(BaseModel):
    """What became of a cycle; ``reason`` says why it was skipped, refused or failed."""

    number: int
    status: Literal["running", "promoted", "refused", "skipped", "failed"] = "running"
    reason: str | None = None
    started_at: datetime
    finished_at: datetime | None = None
    incumbent: int | None = None
    run: str | None = Field(None, description="The last training run; an earlier cycle's, if its training was killed.")
    reward_model: int | None = Field(None, description="The version that rewarded the training's responses.")
    candidate: int | None = None
    verdict: dict[str, Any] | None = None
    rewards: int | None = Field(None, description="Rows of the rewards table that the training could learn from.")
    feedback: int | None = Field(None, description="Rows of the feedback table that it could learn from.")
    stages: list[Stage] = []

    @property
    def seconds(self) -> dict[str, float]:
        return {stage.name: stage.seconds for stage in self.stages if stage.seconds is not None}


def load_all(settings: Settings) -> list[CycleRecord]:
    """The records of all cycles, oldest first."""
    folder = settings.path(settings.cycle.folder)
    return [CycleRecord.model_validate_json(path.read_bytes()) for path in sorted(folder.glob("[0-9]*.json"))]


def without_candidate(settings: Settings) -> list[CycleRecord]:
    """The last cycles in a row that trained and published nothing, oldest first; what did not train is passed over."""
    trained = [record for record in load_all(settings) if any(stage.trains_policy for stage in record.stages)]
    last = max((i for i, record in enumerate(trained) if record.candidate is not None), default=-1)
    return trained[last + 1 :]


def unfinished_training(
    settings: Settings, recipe: Iterable[RecipeStage], number: int, incumbent: int, parent: int
) -> CycleRecord | None:
    """The last cycle before ``number`` that trained, if it was killed or not judged and some of it can be gone on with.

    Of its stages it has those to keep: the finished ones, and a killed one that has a checkpoint. They are safe to
    keep: what serves now did so, no training failed by itself, each started from ``parent`` or the one before it and
    has the settings of now, and they were not tried too often (what kills a run may be the run itself). Training checks
    all this again, and more.
    """
    before = [record for record in load_all(settings) if record.run is not None and record.number < number]
    last = before[-1] if before else None
    if last is None or last.status != "failed" or last.verdict is not None or last.incumbent != incumbent:
        return None
    ran = {stage.name: stage for stage in last.stages if stage.run is not None}
    if any(not (stage.ok or stage.killed) for stage in ran.values()):
        return None
    first = next((stage.run for stage in ran.values()), None)
    if sum(any(stage.run == first for stage in record.stages) for record in before) >= TRAINING_ATTEMPTS:
        return None
    kept: list[Stage] = []
    store = settings.policy_store()
    for stage in recipe:
        there = ran.get(stage.label)
        if there is None and stage.stage == "reward-model":  # the one that there was rewarded
            continue
        if there is None or not _as_now(settings.of_stage(stage), there, parent, stage.stage == "reward-model"):
            break  # what came behind it started from something else
        kept.append(there)
        if candidate := (there.result or {}).get("candidate"):
            clean, parent = unmarked_ancestor(store, candidate), candidate
            if clean is None or clean.version != candidate:
                return None  # an erasure has reached it
    return last.model_copy(update={"stages": kept}) if kept else None


def _as_now(settings: Settings, stage: Stage, parent: int, reward_model: bool) -> bool:
    """Whether a stage that ran would be the same now, from ``parent``; of a killed one, whether it can go on."""
    folder, config = settings.path(settings.train.runs) / str(stage.run), settings.training(reward_model=reward_model)
    try:
        start = json.loads((folder / "start.json").read_bytes())
    except (OSError, ValueError):
        return False
    if start["parent"] != parent or not stage.ok:
        return start["parent"] == parent and stage.killed and goes_on(folder, config)
    return start["config"]["steps"] == config.steps and not differing_settings(start["config"], config)


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


def next_number(settings: Settings) -> int:
    return max((record.number for record in load_all(settings)), default=0) + 1


def write(settings: Settings, record: CycleRecord) -> None:
    """Replace the record on disk, whole or not at all."""
    path = settings.path(settings.cycle.folder) / f"{record.number:06d}.json"
    replace_file(path, record.model_dump_json(indent=2).encode() + b"\n")


def now() -> datetime:
    return datetime.now(UTC)
