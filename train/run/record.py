"""A run as its folder tells it, whether it is at work, was killed or has ended. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel

from feedback.files import replace_file
from train.observe.progress import seconds_by_part
from train.run.retention import RunFolder
from train.run.unfinished import START, holder_of

DATA: Final = "data.json"
METRICS: Final = "metrics.jsonl"
RESOURCES: Final = "resources.json"
ERROR: Final = "error.txt"

_BEST: Final = (("held_out/reward", max), ("reward", max), ("held_out/loss", min), ("loss", min))
"""The first of these that a run has says which of its steps was the best."""


class Best(BaseModel):
    """The step, from 1, whose ``metric`` was the highest, or the lowest of a loss; ``metrics``: all of that step."""

    metric: str
    step: int
    value: float
    metrics: dict[str, float]


class RunRecord(BaseModel):
    """What there is of a run.

    ``candidate`` and ``reward_model``: what it has published. ``wrong``: why it has published nothing, where it has
    ended or nobody is at work on it. ``steps`` of ``steps_planned`` are done, in ``seconds``; ``seconds_by_part``:
    what their parts took. ``tokens_per_s``: over all of them. ``peak_memory``: bytes, of the rank with the most.
    ``data``: what it learned from, in words; ``usable``: prompts or items. ``resources``: as of
    ``train.observe.resources.Resources``. ``config``: the settings it was started with. ``last``: the finite metrics
    of its newest step.
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
    lake_versions: dict[str, int]
    data: str | None
    usable: int | None
    steps: int
    steps_planned: int | None
    seconds: float
    seconds_by_part: dict[str, float]
    tokens_per_s: float | None
    peak_memory: int | None
    resources: dict[str, Any]
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
    """What the folder of a run says."""
    folder, result = run.folder, run.result
    job, start = read_json(folder / "job.json"), read_json(folder / START)
    data, resources = read_json(folder / DATA), read_json(folder / RESOURCES)
    config: dict[str, Any] = start.get("config") or job.get("config") or {}
    steps = read_metrics(folder)
    seconds, tokens = (sum(values(steps, name)) for name in ("seconds", "tokens"))
    peaks = [rank.get("peak_memory") for rank in resources.get("ranks", ())]
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
        last=dict(_finite(steps[-1])) if steps else {},
        best=_best(steps),
        config=config,
    )


def keep_data(folder: Path, data: object, usable: int) -> None:
    """Write down what a run learns from, for ``read_record``."""
    replace_file(folder / DATA, json.dumps({"data": str(data), "usable": usable}).encode())


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The metrics of a run's steps; a last line without its end is being written, or was torn by a kill."""
    try:
        *lines, _torn = (folder / METRICS).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def read_json(file: Path) -> dict[str, Any]:
    """A record of a run; empty if it isn't there, or is being written."""
    try:
        record: dict[str, Any] = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return record


def values(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """A metric over the steps that have it, where it is finite."""
    return [found[name] for step in steps if name in (found := dict(_finite(step)))]


def _finite(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    return (
        (name, float(value))
        for name, value in metrics.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    )


def _best(steps: Sequence[Mapping[str, Any]]) -> Best | None:
    for metric, choose in _BEST:
        measured = {i: found[metric] for i, step in enumerate(steps) if metric in (found := dict(_finite(step)))}
        if measured:
            at = choose(measured, key=measured.__getitem__)
            return Best(metric=metric, step=at + 1, value=measured[at], metrics=dict(_finite(steps[at])))
    return None


def _wrong(run: RunFolder, steps: int) -> str | None:
    if run.state == "at work":
        return None
    if (error := run.folder / ERROR).exists():  # of the last attempt, which removes that of the one before
        return error.read_text().strip()
    if run.result is None:
        goes_on = f"goes on with: millrace train --run {run.name}" if run.state == "unfinished" else "can't go on"
        return f"it ended after step {steps} without a result: it was killed, and {goes_on}"
    result = run.result
    return result.reason if result.candidate is None and result.reward_model is None else None
