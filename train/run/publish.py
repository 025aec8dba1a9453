"""From a trained actor to a version in the policy store, once per run."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from feedback.files import link_or_copy
from serve.policies import probe
from serve.policies.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, name_base, rank_of, stack, write_merged
from serve.policies.folder import WrittenFile
from serve.policies.store import Policy, PolicyStore
from serve.policies.whole_policies import base_of, whole
from train.config.training import TrainConfig
from train.context import JobContext, RunStart
from train.controller.worker_group import WorkerGroup
from train.data.prompts import TrainingData
from train.dataflows.base import Data
from train.export.piecewise import piecewise_model
from train.own_model.model_class import lineage as model_lineage
from train.own_model.model_class import own_class
from train.run.best_weights import Best


@dataclass(frozen=True)
class Exported:
    """A folder of weights, with all else that a policy's folder has, and its files of weights as they were written."""

    folder: Path
    written: Mapping[str, WrittenFile]


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
    best: Best | None = None,
) -> Policy:
    """Write weights aside, all else of the parent's beside them, and have the store make a version of it.

    What decides an answer besides the weights (config, code, tokenizer, chat templates, how it generates) is the
    parent's, byte by byte, but for ``train.model.config_overrides``: a running server swaps weights alone.

    ``erased``: rows by table that the run had read and that were erased meanwhile, where that is only to be marked.
    ``best``: the weights that become the policy, in place of those that the actor has.
    """
    exported = export_aside(actor, parent, context, best=best)
    folder, base = exported.folder, None
    if (folder / ADAPTER_CONFIG).exists():
        assert config.lora is not None
        base = beside(parent, folder, config.lora.publish_rank)
    lineage = lineage_of(config, context, start, data, erased)
    lineage |= {"prompts": data.usable, "reward": start.reward, "scorer": start.scorer}
    if made_by := model_lineage(config.model, folder):
        lineage["model"] = made_by
    if isinstance(data, TrainingData) and data.own:
        lineage["prompt_files"] = [of.lineage() for of in data.own]
    metrics = metrics_of(history) | ({} if best is None else {"best": {"step": best.step, "reward": best.reward}})
    policy = store.publish(
        lambda aside: shutil.copytree(folder, aside, dirs_exist_ok=True, copy_function=link_or_copy),
        parent=parent.version,
        lineage=lineage,
        metrics=metrics,
        probe=partial(measure, base, context.folder / "measured", own_class(config.model)),
        learned_prompts=getattr(data, "learned_prompts", None),  # what a dataflow of one's own reads may not say so
        written=exported.written,
        base=base,
    )
    shutil.rmtree(folder)
    return policy


def beside(parent: Policy, folder: Path, most: int) -> Policy | None:
    """Make of the adapter in ``folder``, which was trained on the parent, one of weights that a policy has.

    ``most``: the largest rank. Returns that policy; None if the rank were larger: the folder then has a merged model.
    """
    base, whole_parent = parent if parent.base is None else base_of(parent), whole(parent)
    rank = rank_of(folder) + (0 if parent.base is None else rank_of(parent.path))
    if rank > most:
        write_merged(whole_parent.weight_files, folder, folder)
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            (folder / name).unlink()
        for path in whole_parent.path.glob("*.safetensors.index.json"):
            shutil.copyfile(path, folder / path.name)
        return None
    if parent.base is not None:
        stack(folder, parent.path)
    name_base(folder, base.path.name)
    return base


def measure(base: Policy | None, aside: Path, model_class: Any, folder: Path) -> dict[str, Any]:
    """The numbers of what is in ``folder`` (``serve.policies.probe``): of an adapter those of the model that it makes,
    which is written to ``aside`` for a while."""
    if base is None:
        return probe.measure(folder, model_class=model_class, piecewise=piecewise_model)
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(folder, aside, ignore=shutil.ignore_patterns(ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    try:
        for path in base.path.glob("*.safetensors.index.json"):
            shutil.copyfile(path, aside / path.name)
        write_merged(base.weight_files, folder, aside)
        return probe.measure(aside, model_class=model_class, piecewise=piecewise_model)
    finally:
        shutil.rmtree(aside)


def export_aside(
    trained: WorkerGroup,
    parent: Policy,
    context: JobContext,
    leave_out: Collection[str] = (),
    best: Best | None = None,
) -> Exported:
    """Write a group's weights, or the ``best``, to the run's folder ``candidate``, and beside them what
    ``copy_missing_files`` copies."""
    folder = context.folder / "candidate"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if best is None:
        written: Mapping[str, WrittenFile] = trained.export(folder)
    else:
        written = best.restore(context.folder)
    copy_missing_files(parent, folder, leave_out)
    return Exported(folder, written)


def lineage_of(
    config: TrainConfig, context: JobContext, start: RunStart, data: Data, erased: Mapping[str, int]
) -> dict[str, Any]:
    """What the lineage of a policy and that of a reward model share."""
    return {
        **context.lineage,
        "run": context.run,
        "run_id": start.id,
        "lake_versions": start.lake_versions,
        "data": str(data),
        "train": config.model_dump(mode="json"),
        **({"erased_rows": dict(erased)} if erased else {}),
    }


def metrics_of(history: list[dict[str, float]]) -> dict[str, Any]:
    """What a manifest keeps of a run's metrics."""
    return {"first": history[0], "last": history[-1], "steps": len(history)}


def copy_missing_files(parent: Policy, folder: Path, leave_out: Collection[str] = ()) -> None:
    """Copy to ``folder`` the files of the parent that it does not have, but no weights and none named ``leave_out``."""
    weights = {path.name for path in parent.path.glob("*.safetensors*")} | {ADAPTER_CONFIG}
    for name in parent.files:
        if name not in weights and Path(name).name not in leave_out and not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(parent.path / name, folder / name)
