"""The training job: sample, score, learn, reshard; then publish the candidate.

``run`` is the driver: the dataflow, step by step, over worker groups (train/groups.py). train/launch.py starts it where
the config says. ``python -m train.job SPEC.json`` is what a cluster, or torchrun, runs.
"""

from __future__ import annotations

import shutil
import time

from feedback.lake import Lake, LakeError
from serve.policies import Policy, PolicyStore
from train import dataflows
from train.checkpoint_files import CheckpointError
from train.config import TrainConfig
from train.context import JobContext, JobResult, TrainingStopped
from train.dataflows.base import Data, Dataflow, Run
from train.groups import start_groups
from train.health import check_health
from train.hooks import RunInfo
from train.progress import Clock, progress_bar, say, say_step
from train.publishing import publish
from train.random_state import random_state, seed_all, set_random_state
from train.resume import Begun, Checkpoints, Progress, begin, checkpoints_of, keep_start, only_run
from train.trackers import Watchers

__all__ = ["JobContext", "JobResult", "TrainingStopped", "run"]


def run(config: TrainConfig, context: JobContext) -> JobResult:
    """Train a candidate from the serving policy on what traffic brought. Needs an initialised Ray, or torchrun's ranks.

    A run of the same name that was killed goes on from its last checkpoint; one that has published gives that again.

    Raises:
        TrainingStopped: KL passed its bound, or a number was not finite; nothing is published.
        train.controller.WorkerError: a worker failed; nothing is published.
        train.checkpoint_files.CheckpointError: the run can't go on from what there is of it, or can't save.
        train.hooks.HookError: a hook or tracker of the config failed.
    """
    with only_run(context):
        store, lake = PolicyStore(context.policies), Lake(context.lake_uri, context.lake)
        begun = begin(config, context, store, lake)
        if begun.published is not None:
            return published_before(context, begun.published)
        seed = config.seed * 1_000_003 + begun.parent.version
        dataflow = dataflows.load(config)
        data = read_data(dataflow, config, context, lake, begun, seed)
        if data.usable < config.data.min_prompts:
            return too_few(config, context, begun.parent, data.usable)
        keep_start(context, begun.start)
        return train(dataflow, config, context, store, begun, data, seed)


def train(
    dataflow: type[Dataflow],
    config: TrainConfig,
    context: JobContext,
    store: PolicyStore,
    begun: Begun,
    data: Data,
    seed: int,
) -> JobResult:
    """From the first step, or from the checkpoint, to the published candidate."""
    started = time.monotonic()
    say(f"{context.run}: starting the workers")
    parent, progress = begun.parent, begun.progress
    first = progress.step if progress else 0
    history = list(progress.history) if progress else []
    info = RunInfo(context.run, context.folder, parent.version, first, config.steps, config)

    with (
        Watchers(info, history) as watchers,
        start_groups(config, parent.path, seed=seed, reward=context.reward) as groups,
        progress_bar() as bar,
    ):
        actor, clock = groups.actor, Clock()
        checkpoints = Checkpoints(config.checkpoint, context, actor, watchers.checkpoint)
        flow = dataflow(Run(config, context, groups, data, seed, clock))
        if begun.checkpoint is not None and progress is not None:
            actor.load_checkpoint(begun.checkpoint)
            flow.resume(progress.dataflow)
            set_random_state(progress.random)
        else:
            seed_all(seed)
        say(f"{context.run}: workers up after {time.monotonic() - started:.0f} s")
        watchers.start()
        task = bar.add_task(context.run, total=config.steps, completed=first)
        for step in range(first, config.steps):
            clock.start()
            metrics = flow.step(step)
            metrics |= clock.laps(metrics["tokens"])
            history.append(metrics)
            watchers.step(step, metrics)
            bar.advance(task)
            say_step(context.run, step, config.steps, metrics)
            check_health(config, step, metrics)
            checkpoints.hear()
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
        checkpoints.hear(wait=True)
        candidate = publish(store, parent, actor, config, context, begun.start, history, data.usable)
        shutil.rmtree(checkpoints_of(context))  # the run is finished: its name gives this policy from here on
        say(f"{context.run}: published policy {candidate.version} in {time.monotonic() - started:.0f} s")
        result = JobResult(
            run=context.run,
            candidate=candidate.version,
            parent=parent.version,
            steps=config.steps,
            reason=None,
            metrics=history[-1],
            seconds=time.monotonic() - started,
        )
        watchers.end(result)
    return result


# ---------------------------------------------------------------------------------------------- before the first step


def read_data(
    dataflow: type[Dataflow], config: TrainConfig, context: JobContext, lake: Lake, begun: Begun, seed: int
) -> Data:
    """What the run learns from; the same as before, if it goes on."""
    versions, progress = begun.start.lake_versions, begun.progress
    try:
        data = dataflow.read(lake, versions, config, begun.parent.path, seed)
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
            "same prompts and responses. Give the run another name (--run)"
        )
    say(
        f"{context.run}: {config.algorithm.name} from policy {begun.parent.version}, {data}, {config.ranks} ranks"
        + (f"; goes on after step {progress.step}" if progress is not None else "")
    )
    return data


def too_few(config: TrainConfig, context: JobContext, parent: Policy, usable: int) -> JobResult:
    reason = f"{usable} usable prompts in the lake, fewer than train.data.min_prompts={config.data.min_prompts}"
    return JobResult(
        run=context.run, candidate=None, parent=parent.version, steps=0, reason=reason, metrics={}, seconds=0.0
    )


def published_before(context: JobContext, policy: Policy) -> JobResult:
    say(f"{context.run}: was finished before, it published policy {policy.version}")
    shutil.rmtree(checkpoints_of(context))
    assert policy.parent is not None
    return JobResult(
        run=context.run,
        candidate=policy.version,
        parent=policy.parent,
        steps=policy.metrics["steps"],
        reason=None,
        metrics=policy.metrics["last"],
        seconds=0.0,
    )


if __name__ == "__main__":
    from train.launch import main

    main()
