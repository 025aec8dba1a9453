"""Whether a run begins, goes on from its last checkpoint, or was finished already.

A run is its name: its folder holds ``start.json`` (what it was started with) and ``checkpoints/``. The same name again,
after a kill, goes on from the last whole checkpoint, reading the lake at the versions that the run read at its start.
Once the run has published, its name returns that policy and trains nothing. ``checkpoints/`` goes last: while it is
there, erasures that came while the run published are still to be looked for.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from evaluation.suites.suite import Suite
from feedback.files import LockTimeoutError, locked, replace_file
from feedback.lake.tables import Lake
from serve.policies.store import Policy, PolicyError, PolicyStore
from serve.policies.whole_policies import whole
from train.checkpoint.folders import CheckpointError, checkpoints, remove_unfinished, torn
from train.config.algorithms import REWARD_MODEL
from train.config.context_length import with_context
from train.config.training import TrainConfig
from train.context import JobContext, JobResult, RowsErased, RunStart
from train.data.own_prompts import hashes
from train.observe.progress import say
from train.own_model.model_class import class_sha256
from train.own_model.overrides import model_folder
from train.run.recovery.erasures import Erasures
from train.run.recovery.resume_settings import changed_files, differing_settings
from train.run.recovery.unfinished import LOCK, START, SUPERVISOR, Stores, forget, published_by, was_erased

_MOMENT_S: Final = 2.0  # that a process has a lock which only looks whether another one does
_ENDING_S: Final = 30.0  # that a driver may take to end, whose supervisor was killed


class Progress(BaseModel):
    """What the driver has to know to go on after ``step`` steps. ``dataflow``: its own state."""

    start: RunStart
    step: int
    data: str
    history: list[dict[str, float]]
    random: dict[str, Any]
    dataflow: Any


@dataclass(frozen=True)
class Begun:
    """How a run begins. ``finished``: its result, if it has published before; there is nothing left to do."""

    start: RunStart
    parent: Policy
    checkpoint: Path | None = None
    progress: Progress | None = None
    finished: JobResult | None = None


def begin(
    config: TrainConfig,
    context: JobContext,
    stores: Stores,
    lake: Lake,
    scorer: str | None = None,
    decide: Callable[[TrainConfig, Path], TrainConfig] = lambda config, _: config,
) -> Begun:
    """Look into the run's folder, tidy it, and decide. Needs the folder's lock (``only_run``).

    ``scorer``: what identifies the reward, if responses are sampled. ``decide``: of a new run, from a policy's folder,
    what its settings leave open.

    Raises:
        CheckpointError: it was begun with something else, or all its checkpoints are torn.
        feedback.exchange.record_files.RecordError: a file of train.data.prompts can't be read.
        evaluation.suites.suite.SuiteError: a suite whose prompts are to be left out can't be read.
        serve.policies.store.PolicyError: what it published must be withdrawn, and serves.
    """
    store = stores.policies
    if left := remove_unfinished(checkpoints_of(context)):
        say(f"{context.run}: removed what was half-written: {', '.join(left)}")
    checkpoint = last_whole(context)
    progress = None if checkpoint is None else _progress(checkpoint)
    start = progress.start if progress is not None else _read_start(context)
    target = stores.of(config.algorithm.name if start is None else start.config["algorithm"]["name"])
    published = None if start is None else published_by(target, start.id)
    if start is not None and published is not None and checkpoints_of(context).exists():
        try:
            Erasures(lake, start.lake_versions, config).settle(target, published)
        except RowsErased as erased:
            say(f"{context.run}: what it had published is withdrawn, and it begins anew: {erased}")
            forget(context.folder)
            start = checkpoint = progress = published = None
    if start is not None and published is None and was_erased(lake, start.lake_versions, unknown=False):
        say(f"{context.run}: rows that it had read were erased since: it begins anew, without them")
        forget(context.folder)
        start = checkpoint = progress = None
    if start is not None and (published is not None or checkpoint is not None):
        differences = _differences(start, config, context, store, scorer)
        if published is None and not differences:
            differences = changed_files(start.prompt_files, config)
        finished = None if published is None else _finished(target, context, start, published)
        if finished is not None and config.steps != start.config["steps"]:
            differences.append(f"train.steps is {config.steps}, it was {start.config['steps']}")
        if progress is not None and config.steps < progress.step:
            differences.append(f"train.steps is {config.steps}, and {progress.step} are done")
        if differences:
            state = f"has {checkpoint}" if finished is None else f"published {finished.published}"
            raise CheckpointError(
                f"run {context.run} {state} and can't go on with other settings or files: {'; '.join(differences)}. "
                "Set back what differs, or give the run another name (--run)"
            )
        return Begun(start, store.get(start.parent), checkpoint, progress, finished)
    parent = _parent(store, context)
    model = model_folder(config.model, whole(parent).path, context.folder)
    config = decide(config, model)
    sized = with_context(config, model)
    fresh = RunStart(
        id=uuid.uuid4().hex,
        parent=parent.version,
        parent_sha256=parent.sha256,
        lake_versions=lake.versions(),
        reward=context.model_dump(mode="json", exclude_none=True).get("reward"),
        scorer=scorer,
        config=config.model_dump(mode="json"),
        max_model_len=sized.rollout.max_model_len,
        prompt_files=hashes(config.data.prompts),
        suites={str(suite): Suite.load(suite).sha256 for suite in config.data.exclude_suites},
        class_sha256=class_sha256(config.model),
    )
    return Begun(fresh, parent)


def keep_start(context: JobContext, start: RunStart) -> None:
    """Write down what the run is started with; from here on it is unfinished."""
    checkpoints_of(context).mkdir(exist_ok=True)
    replace_file(context.folder / START, start.model_dump_json(indent=1).encode(), private=True)


@contextmanager
def only_run(context: JobContext, lock: str = LOCK, wait_s: float = _ENDING_S) -> Iterator[None]:
    """Hold the run's folder, as its driver, or as ``only_supervisor``.

    The lock goes with the process. Raises CheckpointError if another process holds it for ``wait_s`` seconds.
    """
    context.folder.mkdir(parents=True, exist_ok=True)
    path = context.folder / lock
    with ExitStack() as held:
        try:
            held.enter_context(locked(path, wait_s))
        except LockTimeoutError:
            raise CheckpointError(
                f"another process ({path.read_text().strip() or 'unknown'}) is in the middle of run {context.run} "
                f"({context.folder}); wait for it, end it, or give this run another name (--run)"
            ) from None
        path.write_text(f"pid {os.getpid()} on {socket.gethostname()}\n")
        yield


def only_supervisor(context: JobContext) -> AbstractContextManager[None]:
    """Hold the run's folder as the process that starts its drivers, one after the other. Raises as ``only_run``."""
    return only_run(context, SUPERVISOR, _MOMENT_S)


def checkpoints_of(context: JobContext) -> Path:
    return context.folder / "checkpoints"


def last_whole(context: JobContext) -> Path | None:
    """The newest checkpoint whose files are all there; a torn one is reported and passed over.

    Raises:
        CheckpointError: there are some, and all are torn.
    """
    problems = []
    for checkpoint in checkpoints(checkpoints_of(context)):
        problem = torn(checkpoint)
        if problem is None:
            return checkpoint
        say(f"{context.run}: {checkpoint} is torn ({problem}); looking for an older one")
        problems.append(f"{checkpoint.name}: {problem}")
    if problems:
        raise CheckpointError(
            f"run {context.run}: every checkpoint in {checkpoints_of(context)} is torn ({'; '.join(problems)}). Remove "
            "the folder to begin anew, or give the run another name (--run)"
        )
    return None


# ------------------------------------------------------------------------------------------------------ the parts


def _progress(checkpoint: Path) -> Progress:
    try:
        return Progress.model_validate_json((checkpoint / "driver.json").read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}/driver.json can't be read: {error}") from error


def _read_start(context: JobContext) -> RunStart | None:
    path = context.folder / START
    return RunStart.model_validate_json(path.read_bytes()) if path.exists() else None


def _parent(store: PolicyStore, context: JobContext) -> Policy:
    if context.parent is not None:
        return store.get(context.parent)
    pointer = store.serving()
    if pointer is None:
        raise ValueError(f"no policy is serving in {context.policies}; make one with: millrace init --model FOLDER")
    return store.get(pointer.version)


def _finished(store: PolicyStore, context: JobContext, start: RunStart, published: int) -> JobResult:
    """The result of a run that has published this."""
    version = store.get(published)
    metrics = version.metrics
    last = {"steps": metrics["steps"], "metrics": metrics["last"], "seconds": 0.0}
    trains_policy = start.config["algorithm"]["name"] != REWARD_MODEL
    return JobResult.of_published(version, trains_policy, run=context.run, parent=start.parent, **last)


def _differences(
    start: RunStart, config: TrainConfig, context: JobContext, store: PolicyStore, scorer: str | None
) -> list[str]:
    """What a run was started with and would not go on with; one line each, by setting."""
    found = []
    if context.parent is not None and context.parent != start.parent:
        found.append(f"the parent policy is {context.parent}, it was {start.parent}")
    try:
        if store.get(start.parent).sha256 != start.parent_sha256:
            found.append(f"policy {start.parent} has another content than when the run began")
    except PolicyError as error:
        found.append(f"the parent policy can't be had: {error}")
    if None not in (start.scorer, scorer) and start.scorer != scorer:
        found.append(
            f"the reward (train.reward, or feedback.scoring: its sources, their weights, code and models) is {scorer}, "
            f"it was {start.scorer}"
        )
    if None not in (start.class_sha256, now := class_sha256(config.model)) and start.class_sha256 != now:
        found.append(f"the file of train.model.class={config.model.class_name} has changed")
    return found + differing_settings(start.config, config)
