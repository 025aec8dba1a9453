"""What a cycle's recipe says of its training run that is not known before the cycle has scored.

The recipe `auto` becomes another one here, by how much feedback of which kind there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from pydantic import ValidationError

from deploy.config import wording
from deploy.config.root import RecipeStage, Settings
from deploy.loop.records import load_all, new_rows
from evaluation.suites.suite import SuiteError
from feedback.datasets import count_given
from feedback.settings_base import IN_CLEAR
from serve.policies.store import PolicyStore
from train.config.algorithms import DISTILL
from train.config.training import TrainConfig
from train.run.recovery.resume_settings import started

if TYPE_CHECKING:
    from train.data.feedback_items import OfflineData

_LEARNT_BY: Final = {"dpo": "preference", "kto": "thumbs", "sft": "corrections"}
"""By algorithm that learns from feedback, what stands in the names of the kinds of items that it is taken for; of
algorithms with as many such items, the first."""


def stages(settings: Settings, run: Path | None = None) -> list[RecipeStage]:
    """What the cycle trains, in order; with the recipe ``offline``, by which algorithm.

    It is the one that the settings name, if that learns from feedback; else the one whose kind of feedback has most
    items. ``run``: the folder of one that is to go on, which keeps the algorithm that it began with.
    """
    if settings.cycle.recipe != "offline" or settings.train.algorithm.is_offline:
        return settings.cycle.stages
    start = {} if run is None else started(run)
    name = str(start["config"]["algorithm"]["name"]) if start else ""
    algorithm = name if name in _LEARNT_BY else _offline(settings)[0]
    return [RecipeStage(stage="train", set={"algorithm": {"name": algorithm}})]


@dataclass(frozen=True)
class Choice:
    """What `auto` is in one cycle. ``settings``: with that recipe; None where there is too little to learn from."""

    recipe: str | None
    why: str
    settings: Settings | None


def choose(settings: Settings) -> Choice:
    """The recipe that `auto` stands for now.

    That of an algorithm that says by itself what it learns from, if the settings name one. Else rlhf, if there is a
    reward model, or enough feedback to train one. Else what else rewards responses, if anything does. Else offline, if
    one kind of feedback is enough for a run.
    """
    train, scoring = settings.train, settings.feedback.scoring
    if train.algorithm.is_offline:
        return _chosen(settings, "offline", f"train.algorithm.name={train.algorithm.name} learns from feedback")
    if train.algorithm.name == DISTILL:
        return _chosen(settings, None, "train.algorithm.name=distill learns from its teacher")
    people = scoring.human.weight > 0 and train.reward is None and train.reward_weights.get("human") != 0
    if people and settings.resolved().feedback.scoring.human.model is not None:
        return _chosen(settings, "rlhf", "there is a reward model")
    found = []
    if people:
        model, stage = train.reward_model, RecipeStage(stage="reward-model")
        new = new_feedback(settings, stage.label, count_given(settings.lake()))
        data = _read(settings, settings.of_stage(stage).training(reward_model=True))
        due = new >= model.min_new_feedback or newest_is_marked(settings.stores().reward_models)
        if data.usable >= model.min_items and due:
            return _chosen(settings, "rlhf", f"there is enough for a reward model: {data}")
        least = f"{model.min_items} items of feedback, and {model.min_new_feedback} new feedbacks"
        found.append(f"a reward model needs {least}; there are {new} new ones, and {data}")
    if settings.rollout_reward() is not None:
        rules = train.reward is not None or any(rule.weight for rule in scoring.rules.values())
        judged_by = scoring.judge is not None and scoring.judge.weight * train.reward_weights.get("judge", 1.0)
        recipe = "rlvr" if rules else "rlaif" if judged_by else None
        return _chosen(settings, recipe, "what else rewards responses, as there is no reward model of people's yet")
    algorithm, usable, what = _offline(settings)
    if usable >= train.data.min_prompts:
        return _chosen(settings, "offline", f"{algorithm}, as there is no reward model yet: {what}", algorithm)
    found.append(f"{algorithm} needs {train.data.min_prompts} items; there are {what}")
    return Choice(None, f"too little feedback to learn from: {'; '.join(found)}", None)


def new_feedback(settings: Settings, label: str, count: int | None) -> int:
    """Of so many feedbacks, those since the stage of this label has last trained a reward model."""
    trained = (record for record in load_all(settings) if any(done.name == label and done.ok for done in record.stages))
    return new_rows(count, [record.feedback for record in trained])


def newest_is_marked(store: PolicyStore) -> bool:
    """Whether an erasure asks for another reward model; one that was trained for it and not kept has answered that."""
    newest = store.latest()
    return newest is not None and newest.marked


def _offline(settings: Settings) -> tuple[str, int, str]:
    """The algorithm for the kind of feedback with most items, of those that have enough of all kinds if any has.

    And how many items it could learn from, and what they are in words.
    """
    found = []
    for algorithm, kind in _LEARNT_BY.items():
        try:
            train = _offline_config(settings, algorithm)
            data = _read(settings, settings.model_copy(update={"train": train}).training())
        except SuiteError:
            raise
        except ValueError as error:  # other settings don't suit it, or what people wrote can't be learned from
            found.append((False, 0, algorithm, 0, f"none: {error}"))
        else:
            own = sum(count for name, count in data.kinds.items() if kind in name)
            found.append((data.usable >= settings.train.data.min_prompts, own, algorithm, data.usable, str(data)))
    _, _, algorithm, usable, what = max(found, key=lambda one: one[:2])
    return algorithm, usable, what


def _read(settings: Settings, config: TrainConfig) -> OfflineData:
    """What a run with this config would learn from now, by its own reading."""
    from train import dataflows

    lake, pointer = settings.lake(), settings.policy_store().serving()
    assert pointer is not None, "a cycle has a policy that serves"
    policy = settings.policy_store().get(pointer.version).path
    own = config.model_copy(update={"dataflow": None})  # what a dataflow of the user's reads is its own matter
    return cast("OfflineData", dataflows.load(own).read(lake, lake.versions(), own, policy, own.seed))


def _chosen(settings: Settings, recipe: str | None, why: str, algorithm: str | None = None) -> Choice:
    """The settings with a recipe and an algorithm."""
    try:
        train = settings.train if algorithm is None else _offline_config(settings, algorithm)
    except ValidationError as error:
        reason = wording.wrong(error.errors()[0])
        return Choice(None, f"{recipe} ({why}) does not go with the other settings: {reason}", None)
    cycle = settings.cycle.model_copy(update={"recipe": recipe})
    return Choice(recipe, why, settings.model_copy(update={"train": train, "cycle": cycle}))


def _offline_config(settings: Settings, algorithm: str) -> TrainConfig:
    """Training by an algorithm that takes what it doesn't read back to its defaults."""
    values: dict[str, Any] = settings.train.model_dump(context=IN_CLEAR)
    sampled = ("prompts", "traffic_share", "traffic_weight", "pass_rate", "curriculum")
    data = {name: value for name, value in values["data"].items() if name not in sampled}
    sizes = {name: values["rollout"][name] for name in ("max_tokens", "max_model_len")}
    values |= {"algorithm": {"name": algorithm}, "data": data, "rollout": sizes, "epochs": 1}
    values |= {"evaluate_suite": None, "keep": "last"}
    return TrainConfig.model_validate(values)
