"""Training runs of cycles that were killed: which ones the next cycle goes on with, and what the others have kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from deploy.config.root import RecipeStage, Settings
from deploy.loop import recipes
from deploy.loop.preflight import reward_of
from deploy.loop.records import CycleRecord, Stage, load_all
from feedback.config import ScoringConfig
from serve.policies.retention import in_marked_line
from serve.policies.store import PolicyError
from train.config.training import TrainConfig
from train.run.resume_settings import differing_settings, hindrances, started
from train.run.unfinished import kept

ATTEMPTS: Final = 3  # of cycles at one training run, of which all but the last were killed
_OF_A_CYCLE: Final = re.compile(r"cycle-\d{6,}(-.+)?")


@dataclass(frozen=True)
class Unfinished:
    """A cycle that can be gone on with: its record, its recipe, and its stages to keep.

    These are the finished ones, and a killed one that has a checkpoint.
    """

    record: CycleRecord
    recipe: list[RecipeStage]
    stages: list[Stage]


def unfinished_training(
    settings: Settings, number: int, incumbent: int, parent: int
) -> tuple[Unfinished | None, dict[str, str]]:
    """The last cycle before ``number`` that trained, if it was killed or not judged and going on with it is safe.

    Safe: what serves now did so, no training failed by itself, each stage started from ``parent`` or the one before it
    and has the settings and the reward of now, and they were not tried too often (what kills a run may be the run
    itself). Training checks all this again, and more.

    And by run of a cycle that has kept something and that no cycle goes on with, why that is so.
    """
    before = [record for record in load_all(settings) if record.run is not None and record.number < number]
    runs = settings.path(settings.train.runs)
    last = before[-1] if before else None
    recipe = recipes.stages(settings, None if last is None else runs / str(last.run))
    stages, why = _to_keep(settings, recipe, before, incumbent, parent)
    if gone := _weights_gone(settings, stages):
        stages, why = [], gone
    going_on = {stage.run for stage in stages}
    left = {
        run.name: "no cycle goes on with it"
        for run in sorted(runs.glob("cycle-*"))
        if _OF_A_CYCLE.fullmatch(run.name) and any(kept(run)) and run.name not in going_on
    }
    for stage in last.stages if last is not None and why else []:
        if stage.run in left:
            left[stage.run] = why
    return (Unfinished(last, recipe, stages) if last is not None and stages else None), left


def _to_keep(
    settings: Settings, recipe: Sequence[RecipeStage], before: Sequence[CycleRecord], incumbent: int, parent: int
) -> tuple[list[Stage], str]:
    """Of the last of these cycles the stages to keep, and why not more of them."""
    if not before:
        return [], "no cycle has trained"
    last = before[-1]
    labels = {stage.label for stage in recipe}
    ran = {stage.name: stage for stage in last.stages if stage.run is not None and stage.name in labels}
    if (
        last.status != "failed"
        or last.verdict is not None
        or not all(stage.ok or stage.killed for stage in ran.values())
    ):
        return [], "it was not killed"
    if last.incumbent != incumbent:
        return [], f"policy {incumbent} serves, it was {last.incumbent}"
    first = next((stage.run for stage in ran.values()), None)
    if sum(any(stage.run == first for stage in record.stages) for record in before) >= ATTEMPTS:
        return [], f"it was killed {ATTEMPTS} times"
    store, found = settings.policy_store(), list[Stage]()
    for stage in recipe:
        there = ran.get(stage.label)
        if there is None and stage.stage == "reward-model":  # the one that there was rewarded
            continue
        if there is None:
            break
        if why := _hindrances(settings.of_stage(stage), there, parent, stage.stage == "reward-model"):
            return found, "; ".join(why)  # what came behind it started from something else
        found.append(there)
        if candidate := (there.result or {}).get("candidate"):
            try:
                reached, parent = in_marked_line(store, candidate), candidate
            except PolicyError as error:  # removed by hand, or damaged
                return [], str(error)
            if reached:
                return [], f"an erasure has reached policy {candidate}"
    return found, ""


def _weights_gone(settings: Settings, stages: Sequence[Stage]) -> str:
    """Why what comes after these stages can't have the weights that it begins with; those before may be pruned."""
    made = [candidate for stage in stages if (candidate := (stage.result or {}).get("candidate"))]
    try:
        for candidate in made[-1:]:
            settings.policy_store().require_servable(candidate)
    except PolicyError as error:
        return str(error)
    return ""


def _hindrances(settings: Settings, stage: Stage, parent: int, reward_model: bool) -> list[str]:
    """Why a stage that ran would be another one now, from ``parent``; of a killed one, why it can't go on."""
    run, config = settings.path(settings.train.runs) / str(stage.run), settings.training(reward_model=reward_model)
    start = started(run)
    if start and start["parent"] != parent:
        return [f"training starts from policy {parent}, it was {start['parent']}"]
    if not stage.ok:
        return hindrances(run, config, lambda: _scorer(settings, config))
    if not start:
        return ["its start.json can't be read"]
    if start["config"]["steps"] != config.steps:
        return [f"train.steps is {config.steps}, it was {start['config']['steps']}"]
    return differing_settings(start["config"], config)


def _scorer(settings: Settings, config: TrainConfig) -> str | None:
    """What identifies the reward of fresh responses; None if nothing is sampled or it can't be had."""
    from train.data.rewards import Reward, RewardError

    if not config.samples:
        return None
    try:
        return Reward(reward_of(settings) or ScoringConfig(), config.step_timeout_s).scorer
    except RewardError:
        return None
