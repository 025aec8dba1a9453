"""From a trained actor to a version in the policy store, once per run."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from serve.policies import probe
from serve.policies.store import Policy, PolicyStore
from train.config.training import TrainConfig
from train.context import JobContext, RunStart
from train.controller.worker_group import WorkerGroup
from train.data.prompts import TrainingData
from train.dataflows.base import Data


def publish(
    store: PolicyStore,
    parent: Policy,
    actor: WorkerGroup,
    config: TrainConfig,
    context: JobContext,
    start: RunStart,
    history: list[dict[str, float]],
    data: Data,
    erased: Mapping[str, int],
) -> Policy:
    """Write weights aside, all else of the parent's beside them, and have the store make a version of it.

    What decides an answer besides the weights (config, tokenizer, chat templates, how it generates) is the parent's,
    byte by byte: a running server swaps weights alone.

    ``erased``: rows by table that the run had read and that were erased meanwhile, where that is only to be marked.
    """
    folder = context.folder / "candidate"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    actor.export(folder)
    copy_missing_files(parent, folder)
    lineage: dict[str, Any] = {
        **context.lineage,
        "run": context.run,
        "run_id": start.id,
        "lake_versions": start.lake_versions,
        "prompts": data.usable,
        "data": str(data),
        "reward": start.reward,
        "scorer": start.scorer,
        "train": config.model_dump(mode="json"),
    }
    if isinstance(data, TrainingData) and data.own:
        lineage["prompt_files"] = [of.lineage() for of in data.own]
    if erased:
        lineage["erased_rows"] = dict(erased)
    metrics = {"first": history[0], "last": history[-1], "steps": len(history)}
    policy = store.publish(
        lambda aside: shutil.copytree(folder, aside, dirs_exist_ok=True),
        parent=parent.version,
        lineage=lineage,
        metrics=metrics,
        probe=probe.measure,
    )
    shutil.rmtree(folder)
    return policy


def copy_missing_files(parent: Policy, folder: Path, leave_out: Collection[str] = ()) -> None:
    """Copy to ``folder`` the files of the parent that it does not have, but no weights and none named ``leave_out``."""
    weights = {path.name for path in parent.path.glob("*.safetensors*")}
    for name in parent.files:
        if name not in weights and Path(name).name not in leave_out and not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(parent.path / name, folder / name)
