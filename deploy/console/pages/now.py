"""Now: what serves, what the loop does, what is wrong and what to do about it."""

from __future__ import annotations

import json
import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from deploy import status
from deploy.config.root import Settings
from deploy.console.pages.visit import Answer, Visit
from deploy.console.pages.visit import page as shown
from deploy.console.rendering import render
from deploy.loop import records
from deploy.loop.records import EVALUATION_REWARD_MODEL
from feedback.files import newest_first

_CURVES: Final = (
    ("reward", "Reward"),
    ("kl_ref", "KL to the reference, nats"),
    ("entropy", "Entropy, nats"),
    ("response_length", "Response length, tokens"),
    ("loss", "Loss"),
    ("accuracy", "Accuracy"),
)
_MOST_CURVES: Final = 4
_STAGE_TITLES: Final = {"reward-model": "training’s reward model", EVALUATION_REWARD_MODEL: "gate’s reward model"}
_COUNTS_S: Final = 20.0
_COUNTING_SHARE: Final = 0.002
_LONGEST_S: Final = 300.0

_counted: tuple[float, dict[str, Any] | None] = (-math.inf, None)
"""Until when the counts of the lake's rows hold, and these."""


def page(settings: Settings, visit: Visit) -> Answer:
    """The page as it is when it is opened; ``live`` keeps it so."""
    return shown("now", visit, here="now", **_content(settings))


def live(settings: Settings, visit: Visit) -> Answer:
    """Its parts by the id of their element, and its charts' data, as JSON."""
    content = _content(settings)
    parts = {name: render(f"now/{name}", **content) for name in ("serving", "problems", "loop", "experiment", "data")}
    charts = {"training": content["training"], "experiment": content["paths"]}
    return Answer(json.dumps({"parts": parts, "charts": charts, "run": content["run"] or ""}), type="application/json")


def _content(settings: Settings) -> dict[str, Any]:
    found = _look(settings)
    run, curves = _training(settings, found)
    return {
        "status": found,
        "stages": _stages(settings),
        "run": run,
        "training": curves,
        "paths": _paths(settings, found),
        "replicas": _replicas(settings, found),
    }


def _look(settings: Settings) -> status.Status:
    """The home's status.

    Its counts of the lake are up to ``_COUNTS_S`` old, or as much older as it takes for the counting to be
    ``_COUNTING_SHARE`` of the time, but at most ``_LONGEST_S``.
    """
    global _counted
    until, data = _counted
    stale = (began := time.monotonic()) > until
    found = status.look(settings, data=stale)
    if stale:
        ended = time.monotonic()
        seconds = (ended - began) / _COUNTING_SHARE
        _counted = ended + min(max(_COUNTS_S, seconds), _LONGEST_S), found.data
    else:
        found.data = data
    return found


def _stages(settings: Settings) -> list[dict[str, Any]]:
    """The stages of the last cycle that did more than look for something new, with what is yet to come."""
    cycles = [record for record in records.load_all(settings) if record.status != "skipped"]
    if not cycles:
        return []
    record = cycles[-1]
    now = datetime.now(UTC)
    stages: list[dict[str, Any]] = [
        {
            "name": stage.name,
            "title": _STAGE_TITLES.get(stage.name, stage.name),
            "state": "running" if stage.ok is None and record.status == "running" else "done" if stage.ok else "failed",
            "seconds": stage.seconds if stage.seconds is not None else (now - stage.started_at).total_seconds(),
        }
        for stage in record.stages
    ]
    if record.status == "running":
        done = {stage["name"] for stage in stages}
        ahead = [name for name in ("score", "train", "evaluate", "promote") if name not in done]
        stages += [{"name": name, "title": name, "state": "ahead", "seconds": None} for name in ahead]
    return stages


def _training(settings: Settings, found: status.Status) -> tuple[str | None, list[dict[str, Any]]]:
    """The newest training run and its curves: a title, the steps, the values."""
    runs = settings.path(settings.train.runs)
    newest = next(iter(newest_first(runs.glob("*/metrics.jsonl"))), None)
    if newest is None:
        return None, []
    rows = _lines(newest)
    curves = []
    for name, title in _CURVES:
        points = [(row.get("step", i), row.get(name)) for i, row in enumerate(rows)]
        finite = [(x, y) for x, y in points if isinstance(y, int | float) and math.isfinite(y)]
        if finite:
            curves.append({"title": title, "x": [x for x, _ in finite], "y": [round(y, 6) for _, y in finite]})
    return newest.parent.name, curves[:_MOST_CURVES]


def _lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a file that is being written: a last line without its end is left out."""
    *lines, _torn = file.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]


def _paths(settings: Settings, found: status.Status) -> list[dict[str, Any]]:
    """The confidence sequences of the experiment that runs, outcome by outcome."""
    if found.experiment is None:
        return []
    from deploy.display.live import experiments

    number = found.experiment["number"]
    (row,) = (one for one in experiments(settings.policy_store().experiments) if one.number == number)
    return [
        {
            "title": path.outcome
            + (" since the commit" if path.watched else "")
            + (", no difference seen yet" if path.low[-1] <= 0 <= path.high[-1] else ""),
            "x": list(path.blocks),
            "y": _finite(path.value),
            "low": _finite(path.low),
            "high": _finite(path.high),
            "bar": path.bar,
        }
        for path in row.paths
    ]


def _finite(values: tuple[float, ...]) -> list[float | None]:
    return [round(value, 5) if math.isfinite(value) else None for value in values]


def _replicas(settings: Settings, found: status.Status) -> list[dict[str, Any]]:
    """What each replica does: the fleet's own account, or that of the one server."""
    server = found.server
    if server is None:
        return []
    fleet = server.get("replicas")
    if isinstance(fleet, dict):
        return [{"name": name, **report} for name, report in sorted(fleet.items()) if isinstance(report, dict)]
    state = "ready" if server["ready"] else "not ready"
    return [{"name": server["replica"], "state": state, "version": server["version"], "since": server["since"]}]
