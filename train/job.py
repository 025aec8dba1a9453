"""The training job: sample, score, learn, reshard; then publish the candidate.

``run`` is the driver: the dataflow, step by step, over worker groups (train/workers/role_groups.py). train/launch.py
starts it where the config says.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path

from feedback.files import replace_file
from feedback.lake.tables import Lake, LakeError
from serve.policies.open_store import open_store
from serve.policies.store import Policy, PolicyStore
from serve.policies.whole_policies import whole
from serve.vllm import compat
from train import algorithms, dataflows, environments
from train.checkpoint.folders import CheckpointError
from train.checkpoint.random_state import numbered_seed, random_state, seed_all, set_random_state
from train.config.context_length import rollout_cache, with_context
from train.config.training import TrainConfig
from train.context import RESULT, JobContext, JobResult, NothingToLearn, RowsErased, TrainingStopped
from train.controller.heartbeat import note_step
from train.controller.ray_pool import gpus_of_cluster
from train.controller.worker_group import Pool, WorkerError
from train.data.feedback_items import OfflineData
from train.data.rewards import Reward, RewardFunction, logged_responses, rewarded_by, try_reward
from train.dataflows.base import Data, Dataflow, Run
from train.observe.health import check_health
from train.observe.hooks import RunInfo
from train.observe.progress import StepProgress, StepTimer, say, seconds_by_part
from train.observe.resources import ResourceMonitor
from train.observe.trackers import Watchers
from train.own_model.model_class import prepare
from train.own_model.overrides import model_folder
from train.planner.defaults import as_begun, decide
from train.run.best_weights import BestWeights, best_of, folder_of
from train.run.checkpoints import Checkpoints
from train.run.devices import machine_of_run, without_room
from train.run.publish import publish
from train.run.record import keep_data
from train.run.recovery.erasures import Erasures
from train.run.recovery.restarts import note_ranks, read_restarts
from train.run.recovery.resume import Begun, Progress, begin, checkpoints_of, keep_start, only_run
from train.run.recovery.unfinished import Stores, forget
from train.run.reward_model import keep, publish_reward_model
from train.run.shared_run import SharedRun, shared_run
from train.workers.resident_pools import ResidentPools
from train.workers.role_groups import gpus_by_pool, start_groups

__all__ = ["JobContext", "JobResult", "TrainingStopped", "run"]


def run(config: TrainConfig, context: JobContext, resident: ResidentPools | None = None) -> JobResult:
    """Train a candidate from the serving policy on what traffic brought. Needs an initialised Ray, or torchrun's ranks.

    ``resident``: the pools that it runs on, and that stay.

    A run of the same name that was killed goes on from its last checkpoint; one that has published returns that policy.

    A run that is not well (train/observe/health.py), has nothing to learn from, or has learned from rows that were
    erased meanwhile (train/run/recovery/erasures.py), ends early: the result has no candidate, and the reason.

    Raises:
        serve.vllm.compat.IncompatibleVersion: an installed package is not the one whose internals are used.
        train.controller.worker_group.WorkerError: a worker failed; nothing is published.
        train.checkpoint.folders.CheckpointError: the run can't go on from what there is of it, or can't save.
        train.observe.hooks.HookError: a hook or tracker of the config failed.
        train.data.rewards.RewardError: a source of the reward can't be used at all, or took too long.
        serve.policies.store.PolicyPruned: the parent's weights were removed.
        feedback.trusted_code.UntrustedCode: the parent comes with code that may not run.
        ValueError: train.model names no class, or its overrides are not of the parent's config and weights.
    """
    compat.require()
    prepare(config.model)
    with only_run(context), shared_run(config.run_store, context) as shared:
        result = _run(config, context, shared, resident)
        result = result.model_copy(update={"restarts": len(read_restarts(context.folder))})
        replace_file(context.folder / RESULT, result.model_dump_json(indent=2).encode())
    return result


def _run(
    config: TrainConfig, context: JobContext, shared: SharedRun | None, resident: ResidentPools | None
) -> JobResult:
    with ExitStack() as held:
        stores = Stores(open_store(context.policies, context.policy_store), PolicyStore(context.reward_models))
        lake = Lake(context.lake_uri, context.lake)
        reward, scorer = None, None
        if config.environment is not None:
            scorer = environments.check(config.environment)
        elif config.samples:
            reward = Reward(rewarded_by(config, context.reward), config.step_timeout_s)
            scorer = reward.scorer
        begun = begin(config, context, stores, lake, scorer, partial(by_plan, context))
        if begun.finished is not None:
            say(f"{context.run}: was finished before, it published {begun.finished.published}")
            if begun.finished.reward_model is not None:
                keep(stores.reward_models, begun.finished.reward_model)
            for left in (folder_of(context.folder), checkpoints_of(context)):  # as in ``train``
                shutil.rmtree(left, ignore_errors=True)
            return begun.finished
        held.enter_context(stores.policies.hold(begun.parent.version))
        model = model_folder(config.model, whole(begun.parent).path, context.folder)
        config = as_begun(config, begun.start.config)
        if config.samples and (cut := rollout_cache(config, model).cut("train.rollout")):
            say(f"{context.run}: {cut}")
        config = with_context(config, model, begun.start.max_model_len)
        seed = numbered_seed(config.seed, begun.parent.version)
        dataflow = dataflows.load(config)
        keep_start(context, begun.start)  # before it reads: by this an erasure knows that it may have
        if shared is not None:
            shared.upload_soon()  # what the store has of an earlier run of this name, whose rows were erased, goes
        history = list(begun.progress.history) if begun.progress else []
        erasures = Erasures(lake, begun.start.lake_versions, config)
        try:
            data = read_data(dataflow, config, context, lake, begun, model, seed)
            keep_data(context.folder, data, data.usable)
            config = dataflow.settled(config, data)
            trial = partial(on_logged_responses, config, context, lake, begun)
            if reward is not None and config.placement.reward is None:  # a pool may have a device that is not here
                trial(reward)
            pools = None if resident is None else resident.of(config, whole(begun.parent), model)
            what = (
                dataflow,
                config,
                context,
                stores,
                begun,
                model,
                data,
                seed,
                history,
                erasures,
                reward,
                trial,
                pools,
            )
            return train(*what, shared)
        except TrainingStopped as stopped:
            if isinstance(stopped, RowsErased):
                forget(context.folder)
            return ended_early(context, begun.parent, history, stopped)


def train(
    dataflow: type[Dataflow],
    config: TrainConfig,
    context: JobContext,
    stores: Stores,
    begun: Begun,
    model: Path,
    data: Data,
    seed: int,
    history: list[dict[str, float]],
    erasures: Erasures,
    reward: Reward | None,
    trial: Callable[[RewardFunction], object] = lambda _: None,
    pools: AbstractContextManager[dict[str, Pool]] | None = None,
    shared: SharedRun | None = None,
) -> JobResult:
    """From the first step, or from the checkpoint, to the published candidate.

    Args:
        model: the parent's folder as it is trained from (``train.own_model.overrides``).
        history: the metrics of the steps that are done; those of each further step are added.
        reward: of what is sampled; None if nothing is.
        trial: of the reward, where it is on a pool.
        pools: those of resident workers; by default new ones.
        shared: the run in an object store; None if there is none.
    """
    started = time.monotonic()
    say(f"{context.run}: starting the workers")
    parent, progress = begun.parent, begun.progress
    first = progress.step if progress else 0
    restarts = len(read_restarts(context.folder))
    info = RunInfo(context.run, context.folder, parent.version, first, config.steps, config, tuple(history))

    with (
        Watchers(info) as watchers,
        start_groups(
            config, model, seed=seed, reward=reward, trial=trial, pools=pools, folder=context.folder
        ) as groups,
        StepProgress(context.run, first, config.steps) as shown,
        ExitStack() as beside,
    ):
        timer = StepTimer()
        best = BestWeights(config, context.folder, groups.actor)
        best.prune(history)

        def on_saved(steps: int, folder: Path) -> None:
            best.prune(history)
            watchers.checkpoint(steps, folder)
            if shared is not None:
                shared.upload_soon()

        checkpoints = Checkpoints(config.checkpoint, context, groups.trained, on_saved)
        flow = dataflow(Run(config, context, groups, data, seed, timer, watchers.evaluation))
        beside.callback(flow.close)
        if begun.checkpoint is not None and progress is not None:
            for part, group in groups.trained.items():
                group.load_checkpoint(begun.checkpoint, part=part)
            flow.resume(progress.dataflow)
            set_random_state(progress.random)
        else:
            seed_all(seed)
        say(f"{context.run}: workers up after {time.monotonic() - started:.0f} s")
        resources = ResourceMonitor(config, context.folder, model, groups.by_pool(config.placement), groups.actor)
        say(f"{context.run}: {resources.begin()}")
        watchers.start()
        note_step(first)
        note_ranks(context.folder, sum(config.ranks_of(name) for name in config.placement.pools))
        for step in range(first, config.steps):
            timer.start()
            metrics = flow.step(step)
            metrics |= timer.metrics(metrics["tokens"]) | resources.step()
            if restarts:
                metrics["restarts"] = float(restarts)
            history.append(metrics)
            watchers.step(step, metrics)
            note_step(step + 1)
            shown.step(step, metrics)
            check_health(config, history)
            best.look(history)
            erasures.check_between_steps(context.run)
            if shared is not None:
                shared.check()
            checkpoints.collect()
            if checkpoints.due(step + 1):
                checkpoints.save(
                    Progress(
                        start=begun.start,
                        step=step + 1,
                        data=data.digest,
                        history=history,
                        random=random_state(),
                        dataflow=flow.state(),
                    )
                )
        checkpoints.collect(wait=True)
        say(f"{context.run}: {resources.end()}")
        if shared is not None:
            shared.renew()  # two machines must not publish it
        trains_policy, target = config.algorithm.trains_policy, stores.of(config.algorithm.name)
        publishing = time.monotonic()
        trained = (target, parent, groups.actor, config, context, begun.start, history)
        if trains_policy:
            chosen = best_of(context.folder, history) if config.keep == "best" else None
            if chosen is not None:
                say(f"{context.run}: step {chosen.step} was the best, held out: reward {chosen.reward:.3f}")
            published = publish(*trained, data, erasures.check(), chosen)
        else:
            assert isinstance(data, OfflineData)
            published = publish_reward_model(*trained, data, erasures.check())
        erasures.settle(target, published.version)
        if not trains_policy:
            keep(target, published.version)
        shutil.rmtree(folder_of(context.folder), ignore_errors=True)
        shutil.rmtree(checkpoints_of(context))  # last: the run is finished, its name returns this result from here on
        work = seconds_by_part(history) | {"publish": time.monotonic() - publishing}
        seconds = time.monotonic() - started
        last = {"parent": parent.version, "steps": config.steps, "metrics": history[-1], "seconds": seconds}
        result = JobResult.of_published(published, trains_policy, run=context.run, work=work, **last)
        say(f"{context.run}: published {result.published} in {seconds:.0f} s")
        watchers.end(result)
    return result


# ---------------------------------------------------------------------------------------------- before the first step


def by_plan(context: JobContext, config: TrainConfig, model: Path) -> TrainConfig:
    """What a new run of this model's folder does about memory where its settings leave that open, and say so."""
    gpus, on, reward = 0, config.placement, context.reward
    if config.launcher == "ray":
        with suppress(WorkerError):  # raised again when the pools are started
            by_pool = gpus_by_pool(config, gpus_of_cluster())
            gpus = by_pool[on.actor]
            if gpus and on.reward is not None and not by_pool[on.reward]:
                reward = None  # it computes beside the devices
    machine = machine_of_run(config, gpus)
    found = decide(config, model, machine, reward=reward)
    if found.saves:
        say(f"{context.run}: {found.line}")
    if machine is not None and (warning := without_room(config, model, machine, reward)):
        say(f"{context.run}: warning: {warning}")
    return found.config


def read_data(
    dataflow: type[Dataflow],
    config: TrainConfig,
    context: JobContext,
    lake: Lake,
    begun: Begun,
    model: Path,
    seed: int,
) -> Data:
    """What the run learns from; the same as before, if it goes on. Raises NothingToLearn if there is too little."""
    versions, progress = begun.start.lake_versions, begun.progress
    try:
        data = dataflow.read(lake, versions, config, model, seed)
    except LakeError as error:
        if progress is None:
            raise
        raise CheckpointError(
            f"run {context.run} can't go on from {begun.checkpoint}: it reads the lake as of {versions}, and that is "
            f"gone ({error}). Give the run another name (--run)"
        ) from error
    if progress is not None and data.digest != progress.data:
        raise CheckpointError(
            f"run {context.run} can't go on from {begun.checkpoint}: the lake as of {versions} no longer holds the "
            "same prompts and responses, or earlier runs have other pass rates. Give the run another name (--run)"
        )
    say(
        f"{context.run}: {config.algorithm.name} from policy {begun.parent.version}, {data}, {config.ranks} ranks"
        + (f"; goes on after step {progress.step}" if progress is not None else "")
    )
    if data.usable < config.data.min_prompts:
        unit = "items of feedback" if config.algorithm.is_offline else "prompts"
        setting = "train.data.min_prompts" if config.algorithm.trains_policy else "train.reward_model.min_items"
        least = f"fewer than {setting}={config.data.min_prompts}"
        raise NothingToLearn(f"{data.usable} usable {unit}, {least} ({data})")
    return data


def on_logged_responses(
    config: TrainConfig, context: JobContext, lake: Lake, begun: Begun, reward: RewardFunction
) -> None:
    """Try the reward on a few logged responses, and say what came out by component. Raises as ``try_reward``."""
    if config.data.prompts and config.data.traffic_weight == 0:  # traffic may lack what the reward reads
        return
    rows = logged_responses(lake, begun.start.lake_versions)
    if not rows.num_rows:  # all prompts are one's own
        return
    say(f"{context.run}: trying the reward on {len(rows)} logged responses")
    per_token = algorithms.load(config.algorithm).takes_token_rewards
    found = try_reward(reward, rewarded_by(config, context.reward), rows, per_token=per_token)
    say(f"{context.run}: {found}")


def ended_early(
    context: JobContext, parent: Policy, history: list[dict[str, float]], why: TrainingStopped
) -> JobResult:
    say(f"{context.run}: stopped: {why}")
    last = history[-1] if history else {}
    return JobResult(
        run=context.run,
        candidate=None,
        parent=parent.version,
        steps=len(history),
        reason=str(why),
        stopped=not isinstance(why, NothingToLearn | RowsErased),
        metrics={name: value for name, value in last.items() if math.isfinite(value)},
        seconds=sum(metrics["seconds"] for metrics in history),
    )
