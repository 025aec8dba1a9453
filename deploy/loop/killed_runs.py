"""Training runs of cycles that were killed: which one the next cycle goes on with, and what the others have kept."""

from __future__ import annotations

import re
from typing import Final

from deploy.config.root import Settings
from deploy.loop import recipes
from deploy.loop.preflight import reward_of
from deploy.loop.records import CycleRecord, load_all
from feedback.config import ScoringConfig
from train.config.training import TrainConfig
from train.run.resume_settings import hindrances, started
from train.run.unfinished import kept

ATTEMPTS: Final = 3  # of cycles at one run, of which all but the last were killed
_OF_A_CYCLE: Final = re.compile(r"cycle-\d{6,}(-.+)?")


def killed_training(
    settings: Settings, number: int, incumbent: int, parent: int
) -> tuple[CycleRecord | None, dict[str, str]]:
    """The last cycle before ``number`` that trained, if its training was killed and going on with it is safe.

    Safe: what serves now did so, it started from ``parent``, has a checkpoint, has the settings and the reward of now,
    and was not tried too often (what kills it may be the run itself). Training checks all this again, and more.

    And by run of a cycle that has kept something and that no cycle goes on with, why that is so.
    """
    before = [record for record in load_all(settings) if record.run is not None and record.number < number]
    last = before[-1] if before else None
    found = _hindrances(settings, before, incumbent, parent)
    going_on = None if found else last
    runs = sorted(settings.path(settings.train.runs).glob("cycle-*"))
    left = {run.name: "no cycle goes on with it" for run in runs if _OF_A_CYCLE.fullmatch(run.name) and any(kept(run))}
    if last is not None and str(last.run) in left:
        left[str(last.run)] = "; ".join(found)
    if going_on is not None:
        left.pop(str(going_on.run), None)
    return going_on, left


def _hindrances(settings: Settings, before: list[CycleRecord], incumbent: int, parent: int) -> list[str]:
    """Why no cycle goes on with the run of the last of these cycles."""
    if not before:
        return ["no cycle has trained"]
    last = before[-1]
    stage = next((stage for stage in reversed(last.stages) if stage.name == "train"), None)
    if stage is None or not stage.killed:
        return ["it was not killed"]
    if last.incumbent != incumbent:
        return [f"policy {incumbent} serves, it was {last.incumbent}"]
    if sum(record.run == last.run for record in before) >= ATTEMPTS:
        return [f"it was killed {ATTEMPTS} times"]
    run = settings.path(settings.train.runs) / str(last.run)
    if (found := started(run)) and found["parent"] != parent:
        return [f"training starts from policy {parent}, it was {found['parent']}"]
    config = recipes.training(settings, run)
    return hindrances(run, config, lambda: _scorer(settings, config))


def _scorer(settings: Settings, config: TrainConfig) -> str | None:
    """What identifies the reward of fresh responses; None if nothing is sampled or it can't be had."""
    from train.data.rewards import Reward, RewardError

    if not config.samples:
        return None
    try:
        return Reward(reward_of(settings) or ScoringConfig(), config.step_timeout_s).scorer
    except RewardError:
        return None
