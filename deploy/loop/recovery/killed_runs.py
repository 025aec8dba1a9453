"""What the next cycle goes on with: what one that was killed has trained, or its candidate that has passed the gate, or
one that is undecided.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from deploy.config.root import RecipeStage, Settings
from deploy.loop import recipes
from deploy.loop.records import CycleRecord, Stage, load_all
from evaluation.decisions.history import History, Ruling, hypothesis
from feedback.scoring.sources.judge_cache import JudgeCacheError
from feedback.scoring.sources.reward_model import RewardModelError
from feedback.scoring.sources.rules import RuleError
from serve.policies.retention import in_marked_line
from serve.policies.store import PolicyError, PolicyStore
from train.config.training import TrainConfig
from train.run.recovery.resume_settings import changed_suites, hindrances, started
from train.run.recovery.unfinished import kept

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

    And by run that has kept something, or is of a cycle that was not judged, and that no cycle goes on with, why.
    """
    before = [record for record in load_all(settings) if record.run is not None and record.number < number]
    runs = settings.path(settings.train.runs)
    last = before[-1] if before else None
    recipe = recipes.stages(settings, None if last is None else runs / str(last.run))
    stages, why = _to_keep(settings, recipe, before, incumbent, parent)
    made = [candidate for stage in stages if (candidate := (stage.result or {}).get("candidate"))]
    if gone := _weights_gone(settings.policy_store(), made[-1] if made else None):  # those before it may be pruned
        stages, why = [], gone
    going_on = {stage.run for stage in stages}
    left = {
        run.name: "no cycle goes on with it"
        for run in sorted(runs.glob("cycle-*"))
        if _OF_A_CYCLE.fullmatch(run.name) and any(kept(run)) and run.name not in going_on
    }
    for stage in last.stages if last is not None and why else []:
        if stage.run in left or (stage.run and stage.ok and last and last.unjudged and stage.run not in going_on):
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
    if not last.unjudged or not all(stage.ok or stage.killed for stage in ran.values()):
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
        result = there.result or {}
        model = result.get("reward_model")
        if model is not None and (why_not := _lost(settings.stores().reward_models, model, rewards=True)):
            return found, why_not
        found.append(there)
        if candidate := result.get("candidate"):
            if why_not := _lost(store, candidate):
                return [], why_not
            parent = candidate
    return found, ""


def passed_before(settings: Settings, history: History, number: int, incumbent: int) -> tuple[CycleRecord | None, str]:
    """The last cycle before ``number`` that trained, if its candidate passed the gate and was never promoted.

    And why it can't be promoted now; empty if it can: what serves is what it passed against, no erasure has reached
    it, it has learned nothing of what is the suite now, and it was not tried too often.
    """
    before = [record for record in load_all(settings) if record.run is not None and record.number < number]
    store, last = settings.policy_store(), before[-1] if before else None
    if last is None or not last.unfinished or last.candidate is None:
        return None, ""
    found = _verdicts(store, history, last.candidate)
    passed = [ruling for ruling in found if ruling.verdict == "pass"]
    if not passed or any(pointer.version == last.candidate for pointer in store.history()):
        return None, ""
    if not any(ruling.incumbent.sha256 == _sha256(store, incumbent) for ruling in passed):
        return last, f"it passed against policy {passed[-1].incumbent.version}, and policy {incumbent} serves"
    if sum(record.candidate == last.candidate for record in before) >= ATTEMPTS:
        return last, f"{ATTEMPTS} cycles have ended before it was"
    runs, config = settings.path(settings.train.runs), settings.training()
    learned = [started(runs / str(stage.run)) for stage in last.stages if stage.run and not stage.of_evaluation]
    changed = [why for start in learned for why in changed_suites(start, config)]
    why_not = _lost(store, last.candidate) or _weights_gone(store, last.candidate)
    return last, why_not or "; ".join(changed[:1])


def judged_before(settings: Settings, history: History, number: int, incumbent: int) -> tuple[CycleRecord | None, str]:
    """The last cycle before ``number`` that trained, if its candidate is still in the race, or the gate has refused it
    and the cycle was killed before it could say so. One that was about to be looked at when its evaluation was killed
    or failed is in the race.

    And why the candidate is let go; empty if it is to be judged on: the same policy serves, no erasure has reached it,
    it has its weights, the scorer is that of its first look, and cycles have not failed at it too often.
    """
    before = [record for record in load_all(settings) if record.run is not None and record.number < number]
    store, last = settings.policy_store(), before[-1] if before else None
    if last is None or last.candidate is None or not (last.unfinished or last.status == "undecided"):
        return None, ""
    found, serving = _verdicts(store, history, last.candidate), str(_sha256(store, incumbent))
    name = hypothesis(str(_sha256(store, last.candidate)), serving)
    first = history.plan(name)
    if last.unfinished and not found and first is None:  # the gate has not begun with it
        return None, ""
    of_now = [ruling for ruling in found if ruling.hypothesis == name]
    if of_now and of_now[-1].verdict == "pass":  # it could not be promoted
        return None, ""
    if last.incumbent != incumbent or (found and first is None):
        return last, f"it was compared with policy {last.incumbent}, and policy {incumbent} serves"
    if of_now and of_now[-1].final:
        return last, ""
    failed = itertools.takewhile(lambda record: record.unfinished, reversed(before))
    if sum(record.candidate == last.candidate for record in failed) >= ATTEMPTS:
        return last, f"{ATTEMPTS} cycles in a row have failed at it"
    if first is not None and (scorer := _gates_scorer(settings)) not in (None, first[1].scorer):
        return last, f"it was scored by {first[1].scorer}, and evaluation.scorer is {scorer} now"
    return last, _lost(store, last.candidate) or _weights_gone(store, last.candidate)


def _verdicts(store: PolicyStore, history: History, candidate: int) -> list[Ruling]:
    """The newest verdict on a candidate against each policy that it was compared with."""
    sha256 = _sha256(store, candidate)
    return [race[-1][1] for race in history.races.values() if race[-1][1].candidate.sha256 == sha256]


def _sha256(store: PolicyStore, version: int) -> str | None:
    try:
        return store.get(version).sha256
    except PolicyError:  # removed by hand, or damaged
        return None


def _gates_scorer(settings: Settings) -> str | None:
    """What identifies the scorer of evaluation; None if it can't be loaded, of which the evaluation says why."""
    from evaluation.evaluate import Scoring
    from evaluation.judging import JudgingError

    try:
        return Scoring(settings.resolved().evaluation, settings.evaluation_sources()).name
    except (JudgingError, RuleError, RewardModelError, JudgeCacheError, PolicyError, ValueError):
        return None


def _lost(store: PolicyStore, version: int, *, rewards: bool = False) -> str:
    """Why a policy, or a reward model (none is trained from another), is not to be gone on with; empty if it may be."""
    try:
        reached = store.get(version).marked if rewards else in_marked_line(store, version)
    except PolicyError as error:  # removed by hand, or damaged
        return str(error)
    what = "training's reward model" if rewards else "policy"
    return f"an erasure has reached {what} {version}" if reached else ""


def _weights_gone(store: PolicyStore, version: int | None) -> str:
    """Why a policy's weights can't be had: pruned, removed by hand, or damaged; empty if they can, and for None."""
    try:
        if version is not None:
            store.require_servable(version)
    except PolicyError as error:
        return str(error)
    return ""


def _hindrances(settings: Settings, stage: Stage, parent: int, reward_model: bool) -> list[str]:
    """Why a stage that ran would be another one now, from ``parent``; of a killed one, why it can't go on."""
    run, config = settings.path(settings.train.runs) / str(stage.run), settings.training(reward_model=reward_model)
    start = started(run)
    if start and start["parent"] != parent:
        return [f"training starts from policy {parent}, it was {start['parent']}"]
    return hindrances(run, config, lambda: _scorer(settings, config), done=bool(stage.ok))


def _scorer(settings: Settings, config: TrainConfig) -> str | None:
    """What identifies the reward of fresh responses; None if nothing is sampled or it can't be had."""
    from train import environments
    from train.data.rewards import Reward, RewardError, rewarded_by

    if config.environment is not None:
        try:
            return environments.identity(config.environment)
        except ValueError:
            return None
    if not config.samples:
        return None
    try:
        return Reward(rewarded_by(config, settings.rollout_reward()), config.step_timeout_s).scorer
    except RewardError:
        return None
