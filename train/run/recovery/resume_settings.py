"""Which settings a run that goes on must share with its beginning. Imports no torch, so that a cycle may ask."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from evaluation.suites.suite import Suite, SuiteError
from feedback.exchange import record_files
from train.checkpoint.folders import checkpoints
from train.config.algorithms import REWARD_MODEL
from train.config.training import TrainConfig

DECISIVE: Final = (
    "algorithm",
    "dataflow",
    "optimizer",
    "lora",
    "model.class",
    "model.config_overrides",
    "data",
    "dtype",
    "fp8",
    "seed",
    "minibatches",
    "epochs",
    "rollout.backend",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.max_tokens",
    "rollout.max_model_len",
    "rollout.staleness",
)
"""Settings (sections whole) that decide what is learned; the others may differ when a run goes on."""

_OF_REWARD_MODEL: Final = ("reward_model.weights", "reward_model.votes")
"""More of them, where a reward model is trained."""


def differing_settings(before: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """One line for each decisive setting that differs from ``before``, the dump of an earlier config."""
    names = (*DECISIVE, *_OF_REWARD_MODEL) if config.algorithm.name == REWARD_MODEL else DECISIVE
    if config.optimizer.schedule != "constant":  # the learning rate ends with them
        names = (*names, "steps")
    was, is_ = (
        dict(line for name in names for line in _flat(name, _get(dump, name)))
        for dump in (before, config.model_dump(mode="json"))
    )
    return [
        f"train.{name} is {is_.get(name)!r}, it was {was.get(name)!r}"
        for name in sorted(was.keys() | is_.keys())
        if was.get(name) != is_.get(name)
    ]


def changed_files(before: Mapping[str, str], config: TrainConfig) -> list[str]:
    """One line for each file of train.data.prompts whose sha256 is not that of ``before``, or that can't be read."""
    found = []
    for own in config.data.prompts:
        try:
            now = record_files.sha256(own.path, own.split)
        except record_files.RecordError as error:
            found.append(str(error))
        else:
            if now != before.get(own.name):
                found.append(f"{own.name} of train.data.prompts has changed")
    return found


def changed_suites(start: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """One line for each suite of which a run that started so may have learned prompts: it was another, or none."""
    found, before = [], start.get("suites", {})
    for suite in config.data.exclude_suites:
        try:
            if Suite.load(suite).sha256 != before.get(str(suite)):
                found.append(f"{suite.name} has changed, and its prompts may have been learned from")
        except SuiteError as error:
            found.append(str(error))
    return found


def started(run: Path) -> dict[str, Any]:
    """What the run of this folder was started with; empty if that is not there, or can't be read."""
    try:
        start = json.loads((run / "start.json").read_text())
    except (OSError, ValueError):
        return {}
    return start if isinstance(start, dict) and "config" in start else {}


def hindrances(run: Path, config: TrainConfig, scorer: Callable[[], str | None], *, done: bool = False) -> list[str]:
    """Why what is trained under these settings and files is not what the run of this folder trained; none if it is.

    Args:
        scorer: what identifies the reward now, as of ``train.run.recovery.resume.begin``; called if nothing else
            differs.
        done: the run has published; else it needs a checkpoint.
    """
    start = started(run)
    if not done and not (start and checkpoints(run / "checkpoints")):
        return ["it has no checkpoint"]
    if not start:
        return ["its start.json can't be read"]
    if done and start["config"]["steps"] != config.steps:
        return [f"train.steps is {config.steps}, it was {start['config']['steps']}"]
    found = differing_settings(start["config"], config)
    found = found or changed_files(start.get("prompt_files", {}), config) or changed_suites(start, config)
    if not found and None not in (before := start.get("scorer"), now := scorer()) and before != now:
        found = [f"the reward is {now}, it was {before}"]
    return found


def _get(dump: Mapping[str, Any], dotted: str) -> Any:
    for part in dotted.split("."):
        dump = dump.get(part, {})
    return dump


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [line for key, inner in value.items() for line in _flat(f"{name}.{key}", inner)]
    return [(name, value)]
