"""The folder of a trained reward model: ``reward_model`` in the run's, whole or not there.

It is transformers' sequence-classification model with one label, the tokenizer beside it, and ``training.json``: what
run it came of. ``feedback.scoring.model.name`` takes it as it is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from feedback.files import fsync_path, fsync_tree
from serve.policies.store import Policy
from train.config.training import TrainConfig
from train.context import JobContext, RunStart
from train.controller.worker_group import WorkerGroup
from train.dataflows.base import Data
from train.run.publish import copy_missing_files
from train.run.unfinished import MANIFEST, REWARD_MODEL

_OF_A_POLICY: Final = ("config.json", "generation_config.json", "policy.json")


def publish_reward_model(
    parent: Policy,
    scorer: WorkerGroup,
    config: TrainConfig,
    context: JobContext,
    start: RunStart,
    history: list[dict[str, float]],
    data: Data,
    erased: Mapping[str, int],
) -> Path:
    """Write weights, config and tokenizer aside, then give the folder its name, in place of an older one; the folder.

    ``erased``: as of ``train.run.publish.publish``.

    Raises:
        OSError: the disk refuses.
    """
    final = context.folder / REWARD_MODEL
    aside, old = final.with_name(".reward_model.new"), final.with_name(".reward_model.old")
    for left in (aside, old):
        shutil.rmtree(left, ignore_errors=True)
    aside.mkdir(parents=True)
    scorer.export(aside)
    copy_missing_files(parent, aside, _OF_A_POLICY)
    read_as_trained(aside)
    manifest: dict[str, Any] = {
        "run": context.run,
        "run_id": start.id,
        "parent": parent.version,
        "lineage": {**context.lineage, "lake_versions": start.lake_versions, "pairs": data.usable},
        "train": config.model_dump(mode="json"),
        "metrics": {"first": history[0], "last": history[-1], "steps": len(history)},
    }
    if erased:
        manifest["lineage"]["erased_rows"] = dict(erased)
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
    fsync_tree(aside)
    if final.exists():
        final.rename(old)
    aside.rename(final)
    fsync_path(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return final


def read_as_trained(folder: Path) -> None:
    """Have transformers read a response from this folder as it was read in training.

    Its padding token is the tokenizer's, and token types, which some architectures add to their embeddings and no
    policy was trained with, are not made.
    """
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is not None:
        config = AutoConfig.from_pretrained(folder)
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
        config.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    kept = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps({**kept, "model_input_names": ["input_ids", "attention_mask"]}, indent=2))
