"""Training runs side by side: what each was trained by, what it reached, and what that cost."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from evaluation.report.rows import RunRow

_ENDS: Final = 5  # steps, at most, of which the mean reward is shown, at the beginning and at the end
_OPTIMIZERS: Final = {"adamw": "AdamW", "adamw_8bit": "8-bit AdamW", "muon": "Muon", "sgd": "SGD"}
_KL: Final = (("kl_ref", "kl_ref_at_end"), ("k2_ref",))  # the first of these that a run has measured


def runs(folder: Path, training: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[RunRow]:
    """A row for each run under ``folder``, in the order of ``training``, which has their metrics step by step."""
    found = {path.parent.name for name in ("start.json", "job.json") for path in folder.glob(f"*/{name}")}
    names = [*training, *sorted(found - set(training))]
    return [_row(folder / name, training.get(name, ())) for name in names]


def _row(run: Path, steps: Sequence[Mapping[str, Any]]) -> RunRow:
    config, result = _config(run), _read(run / "result.json")
    algorithm, optimizer = config.get("algorithm", {}), config.get("optimizer", {})
    rewards = _numbers(steps, "reward")
    ends = max(1, min(_ENDS, len(rewards) // 2))
    return RunRow(
        run=run.name,
        candidate=result.get("candidate"),
        reward_model=result.get("reward_model"),
        reason=result.get("reason") if result.get("candidate") is None else None,
        algorithm=algorithm.get("name"),
        optimizer=_OPTIMIZERS.get(name := optimizer.get("name", "adamw"), name) if optimizer else None,
        learning_rate=optimizer.get("learning_rate"),
        batch=_batch(config, steps),
        steps=len(steps),
        reward_first=_mean(rewards[:ends]),
        reward_last=_mean(rewards[-ends:]),
        max_kl=_max_kl(steps),
        seconds=result.get("seconds") or (sum(_numbers(steps, "seconds")) or None),
    )


def _config(run: Path) -> dict[str, Any]:
    """The training settings that a run was started with."""
    started = _read(run / "start.json") or _read(run / "job.json")
    config: dict[str, Any] = started.get("config", {})
    return config


def _read(file: Path) -> dict[str, Any]:
    """A record of a run; none if it isn't there, or is being written."""
    try:
        record: dict[str, Any] = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return record


def _batch(config: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> str | None:
    """What a step learns from: prompts times responses where it samples, else the judged responses of a step."""
    each = config.get("data", {}).get("prompts_per_step")
    if each is None:
        return None
    sampled = any(row.get("responses") for row in steps)
    return f"{each} × {config['algorithm'].get('group_size', 1)}" if sampled else str(each)


def _max_kl(steps: Sequence[Mapping[str, Any]]) -> float | None:
    for names in _KL:
        if measured := [value for name in names for value in _numbers(steps, name)]:
            return max(measured)
    return None


def _numbers(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values = (row.get(name) for row in steps)
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
