"""What is looked at before a cycle or a schedule starts anything: settings that would fail an hour later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from deploy import memory_check
from deploy.config.root import ConfigError, RecipeStage, Settings
from deploy.low_precision_check import fp8_problem, torchao_problem
from evaluation.config import JUDGING
from feedback.exchange.record_files import RecordError, files_of
from feedback.scoring.sources.reward_model import RewardModelError
from feedback.scoring.sources.rules import RuleError, configured, load_rule
from serve.policies.folder import compute_dtype
from serve.policies.store import Policy, PolicyError
from train import algorithms, dataflows, environments
from train.config.context_length import longest_prompt, with_context
from train.config.training import TrainConfig
from train.observe.hooks import HookError, load_function
from train.own_model.trial import as_trained

NO_REWARD = (
    "train.reward is null, and feedback.scoring has no rule, model or judge with a weight: training needs something "
    "that rewards its responses (a module:function, a rule, a reward model, or a judge)"
)
NO_REWARD_MODEL = (
    "a reward model of people's feedback is to reward its responses, and {there}: put a stage reward-model before it, "
    "as cycle.recipe=rlhf does, or run `millrace train --reward-model` first"
)
NO_SHADOW_SCORER = (
    "evaluation.experiment.shadow.enabled: feedback.scoring has no rule, model or judge with a weight, and nobody "
    "votes on what nobody sees: set one, or switch the shadow off"
)
NEED_ANSWERS = ("exact_match", "numeric_equality")
NO_POLICY = (
    "train.algorithm.name=reward_model trains no policy that a cycle could judge and promote: set cycle.recipe to "
    "rlhf, which trains a reward model too, and train.algorithm.name to an algorithm of policies"
)


def check(settings: Settings) -> None:
    """Raise ConfigError, before anything is started, for what would fail a cycle an hour later."""
    from evaluation.evaluate import load_scorer
    from evaluation.judging import Judging

    problems = []
    suite = settings.path(settings.evaluation.suite)
    if not suite.is_file() and not settings.evaluation.holdout:
        problems.append(
            f"evaluation.suite: there is no file {suite}; the gate needs held-out items to judge by: write it, or set "
            "evaluation.holdout, and the cycle draws one from traffic"
        )
    elif not suite.is_file() and settings.evaluation.scorer in NEED_ANSWERS:
        problems.append(
            f"evaluation.scorer={settings.evaluation.scorer} needs each item's answer, there is no suite {suite}, and "
            "one that a cycle draws from traffic has none: write it, or set evaluation.scorer to reward_model, judge, "
            "pairwise or your own function"
        )
    if not settings.train.algorithm.trains_policy:
        problems.append(NO_POLICY)
    if settings.evaluation.experiment.shadow.enabled and not any(settings.feedback.scoring.for_rollouts.values()):
        problems.append(NO_SHADOW_SCORER)
    store = settings.policy_store()
    if pointer := store.serving():
        problems += judging_problems(settings, store.get(pointer.version))
        problems += memory_check.refused_evaluation(settings)
    rewarded = settings.cycle.recipe in ("auto", "offline")  # the cycle takes an algorithm, or what rewards
    trained = False
    for stage in settings.cycle.stages:
        own = settings.of_stage(stage)
        if stage.stage == "reward-model":
            trained = True
            continue
        found = training_problems(own)
        if not rewarded and (why := no_reward(own, trained_before=trained)):
            found.insert(0, f"stage {stage.label}: {why}" if isinstance(settings.cycle.recipe, list) else why)
        problems += [one for one in found if one not in problems]
    if settings.trains_reward_model_to_evaluate:
        settings.of_stage(RecipeStage(stage="reward-model"))
    elif settings.evaluation.scorer == "reward_model":
        judging = partial(Judging, settings.evaluation, settings.evaluation_sources())
        problems += _unloadable({"evaluation.scorer=reward_model": judging})
    elif settings.evaluation.scorer not in JUDGING:
        problems += _unloadable({"evaluation.scorer": partial(load_scorer, settings.evaluation)})
    if problems:
        raise ConfigError("\n".join(problems))


def judging_problems(settings: Settings, policy: Policy) -> list[str]:
    """Why the gate would judge other answers than the server gives, or why that can't be known."""
    try:
        judged = compute_dtype(policy.path, settings.resolved().evaluation.engine.dtype)
        served = compute_dtype(policy.path, settings.serve.engine.dtype)
    except PolicyError as error:
        return [str(error)]
    if judged == served:
        return []
    return [
        f"evaluation.engine.dtype={judged}, and the server computes policy {policy.version} in {served}: the gate "
        "would judge other answers than users get; leave evaluation.engine.dtype at auto"
    ]


def no_reward(settings: Settings, *, trained_before: bool = False) -> str | None:
    """What is missing that would reward the responses which training samples; None if nothing is.

    ``trained_before``: a reward model will be trained by then.
    """
    train = settings.train
    if not train.rewards_responses or train.algorithm.teacher is not None or settings.rollout_reward() is not None:
        return None
    if not any(settings.feedback.scoring.weighed(settings.train.reward_weights).for_rollouts.values()):
        return NO_REWARD
    if trained_before:
        return None
    pointer = settings.stores().reward_models.serving()
    there = "there is none yet" if pointer is None else f"an erasure has marked version {pointer.version} of it"
    return NO_REWARD_MODEL.format(there=there)


def training_problems(settings: Settings) -> list[str]:
    """What of the settings of training names what isn't there, or can't be used; one text each."""
    train, rules = settings.train, settings.feedback.scoring.rules
    sources = settings.feedback.scoring.for_rollouts
    problems = []
    problems += [
        f"train.reward_weights.{name}: feedback.scoring has no such source for fresh responses; there are: "
        f"{', '.join(sources) or 'none'}"
        for name in sorted(train.reward_weights.keys() - sources.keys())
    ]
    loads: dict[str, Callable[[], object]] = {
        f"feedback.scoring.rules.{name}": partial(configured, name, rule) for name, rule in rules.items()
    }
    if train.reward:
        loads["train.reward"] = partial(load_rule, train.reward)
    loads |= {f"train.hooks {name!r}": partial(load_function, "train.hooks", name) for name in train.hooks}
    loads |= {f"train.trackers {name!r}": partial(load_function, "train.trackers", name) for name in train.trackers}
    if ":" in train.algorithm.name:
        loads["train.algorithm.name"] = partial(algorithms.load, train.algorithm)
    if train.environment is not None:
        loads["train.environment"] = partial(environments.check, train.environment)
    if train.dataflow:
        loads["train.dataflow"] = partial(dataflows.load, train)
    for own in settings.resolved().train.data.prompts:
        loads[f"train.data.prompts {own.path.name}"] = partial(files_of, own.path, own.split)
    problems += [why for why in (fp8_problem(train), torchao_problem(train)) if why]
    store = settings.policy_store()
    if policy := store.serving():
        loads["train.model"] = partial(_read_as_trained, train, store.get(policy.version).path)
    return problems + _unloadable(loads)


def _read_as_trained(train: TrainConfig, policy: Path) -> None:
    with as_trained(train.model, policy) as model:
        if train.samples:
            longest_prompt(with_context(train, model).rollout, model)


def _unloadable(loads: dict[str, Callable[[], object]]) -> list[str]:
    """What failed to load, by setting."""
    problems = []
    for key, load in loads.items():
        try:
            load()
        except (RuleError, RecordError, RewardModelError) as error:
            problems.append(f"{key}: {error}")
        except (HookError, ValueError) as error:  # names its setting itself
            problems.append(str(error))
    return problems
