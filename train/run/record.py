"""A run as its folder tells it, whether it is at work, was killed or has ended. Imports no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel

from feedback.files import replace_file
from train.observe.progress import seconds_by_part
from train.observe.resource_file import FILE as RESOURCES
from train.observe.resource_file import Resources
from train.run.recovery.restarts import Restart, read_restarts
from train.run.recovery.unfinished import START, holder_of
from train.run.retention import RunFolder

DATA: Final = "data.json"
METRICS: Final = "metrics.jsonl"
ERROR: Final = "error.txt"

_BEST: Final = (("held_out/reward", max), ("reward", max), ("held_out/loss", min), ("loss", min))
"""The first of these that a run has says which of its steps was the best."""


class RunRecordError(ValueError):
    """A file of a run's folder is damaged; the text names it."""


class Best(BaseModel):
    """The step, from 1, whose ``metric`` was the highest, or the lowest of a loss; ``metrics``: all of that step."""

    metric: str
    step: int
    value: float
    metrics: dict[str, float]


class RunRecord(BaseModel):
    """What there is of a run.

    ``candidate`` and ``reward_model``: what it has published. ``wrong``: why it has published nothing, where it has
    ended or nobody is at work on it. ``restarts``: when it went on by itself, and why. ``steps`` of ``steps_planned``
    are done, in ``seconds``; ``seconds_by_part``: what their parts took. ``tokens_per_s``: over all of them.
    ``peak_memory``: bytes, of the rank with the most. ``data``: what it learned from, in words; ``usable``: prompts or
    items. ``config``: the settings it was started with. ``last``: the finite metrics of its newest step.
    """

    run: str
    state: Literal["at work", "unfinished", "ended"]
    holder: str | None
    last_at_work: datetime
    algorithm: str | None
    parent: int | None
    candidate: int | None
    reward_model: int | None
    wrong: str | None
    restarts: list[Restart]
    lake_versions: dict[str, int]
    data: str | None
    usable: int | None
    steps: int
    steps_planned: int | None
    seconds: float
    seconds_by_part: dict[str, float]
    tokens_per_s: float | None
    peak_memory: int | None
    resources: Resources | None
    last: dict[str, float]
    best: Best | None
    config: dict[str, Any]

    @property
    def published(self) -> str | None:
        """What the run has published, in words."""
        if self.candidate is not None:
            return f"policy {self.candidate}"
        return None if self.reward_model is None else f"reward model {self.reward_model}"


def read_record(run: RunFolder) -> RunRecord:
    """What the folder of a run says. Raises RunRecordError."""
    try:
        return _record(run)
    except (AttributeError, TypeError, ValueError) as error:  # of another form than a run writes
        names = ", ".join(("job.json", START, DATA, RESOURCES))
        raise RunRecordError(f"one of {names} in {run.folder} is damaged: {error}") from error


def _record(run: RunFolder) -> RunRecord:
    folder, result = run.folder, run.result
    job, start, data = (read_json(folder / name) for name in ("job.json", START, DATA))
    resources = Resources.model_validate(found) if (found := read_json(folder / RESOURCES)) else None
    config: dict[str, Any] = start.get("config") or job.get("config") or {}
    steps = read_metrics(folder)
    seconds, tokens = (sum(values(steps, name)) for name in ("seconds", "tokens"))
    peaks = [] if resources is None else [rank.peak_memory for rank in resources.ranks]
    highest = max((peak for peak in peaks if peak), default=None)
    if highest is None and (seen := values(steps, "peak_memory_gib")):
        highest = round(max(seen) * 2**30)
    return RunRecord(
        run=run.name,
        state=run.state,
        holder=holder_of(folder) if run.state == "at work" else None,
        last_at_work=run.at,
        algorithm=config.get("algorithm", {}).get("name"),
        parent=start.get("parent") or (None if result is None else result.parent),
        candidate=None if result is None else result.candidate,
        reward_model=None if result is None else result.reward_model,
        wrong=_wrong(run, len(steps)),
        restarts=read_restarts(folder),
        lake_versions=start.get("lake_versions", {}),
        data=data.get("data"),
        usable=data.get("usable"),
        steps=len(steps),
        steps_planned=config.get("steps"),
        seconds=seconds,
        seconds_by_part=seconds_by_part(steps),
        tokens_per_s=tokens / seconds if seconds else None,
        peak_memory=highest,
        resources=resources,
        last=steps[-1] if steps else {},
        best=_best(steps),
        config=config,
    )


def keep_data(folder: Path, data: object, usable: int) -> None:
    """Write down what a run learns from, for ``read_record``."""
    replace_file(folder / DATA, json.dumps({"data": str(data), "usable": usable}).encode())


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The finite metrics of a run's steps, none of one whose line a crash of the machine has damaged.

    A last line without its end is being written, or was torn by a kill.
    """
    try:
        *lines, _torn = (folder / METRICS).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [_finite(_object(line)) for line in lines]


def read_json(file: Path) -> dict[str, Any]:
    """A record of a run; empty if it isn't there, or is being written."""
    try:
        return _object(file.read_bytes())
    except FileNotFoundError:
        return {}


def values(steps: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """A metric over the steps that have it."""
    return [step[name] for step in steps if name in step]


def _object(text: bytes) -> dict[str, Any]:
    """A JSON object; empty if the text is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if name != "step" and isinstance(value, int | float) and -sys.float_info.max <= value <= sys.float_info.max
    }


def _best(steps: Sequence[Mapping[str, float]]) -> Best | None:
    for metric, choose in _BEST:
        measured = {i: step[metric] for i, step in enumerate(steps) if metric in step}
        if measured:
            at = choose(measured, key=measured.__getitem__)
            return Best(metric=metric, step=at + 1, value=measured[at], metrics=dict(steps[at]))
    return None


def _wrong(run: RunFolder, steps: int) -> str | None:
    if run.state == "at work":
        return None
    if (error := run.folder / ERROR).exists():  # of the last attempt, which removes that of the one before
        return error.read_text(errors="replace").strip()
    if run.result is None:
        goes_on = f"goes on with: millrace train --run {run.name}" if run.state == "unfinished" else "can't go on"
        return f"it ended after step {steps} without a result: it was killed, and {goes_on}"
    result = run.result
    return result.reason if result.candidate is None and result.reward_model is None else None
