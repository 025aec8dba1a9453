"""Which settings a run that goes on must share with its beginning. Imports no torch, so that a cycle may ask."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from feedback.exchange import record_files
from train.checkpoint.folders import checkpoints
from train.config.training import TrainConfig

DECISIVE: Final = (
    "algorithm",
    "dataflow",
    "optimizer",
    "lora",
    "data",
    "dtype",
    "seed",
    "minibatches",
    "epochs",
    "rollout.temperature",
    "rollout.max_tokens",
    "rollout.max_model_len",
    "rollout.staleness",
)
"""Settings (sections whole) that decide what is learned; the others may differ when a run goes on."""


def differing_settings(before: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """One line for each decisive setting that differs from ``before``, the dump of an earlier config."""
    was, is_ = (
        dict(line for name in DECISIVE for line in _flat(name, _get(dump, name)))
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


def started(run: Path) -> dict[str, Any]:
    """What the run of this folder was started with; empty if that is not there, or can't be read."""
    try:
        start = json.loads((run / "start.json").read_text())
    except (OSError, ValueError):
        return {}
    return start if isinstance(start, dict) and "config" in start else {}


def hindrances(run: Path, config: TrainConfig, scorer: Callable[[], str | None]) -> list[str]:
    """Why the run of this folder would not be gone on with under these settings and files; none if it would.

    ``scorer``: what identifies the reward now, as of ``train.run.resume.begin``; called if nothing else differs.
    """
    start = started(run)
    if not start or not checkpoints(run / "checkpoints"):
        return ["it has no checkpoint"]
    found = differing_settings(start["config"], config) or changed_files(start.get("prompt_files", {}), config)
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
