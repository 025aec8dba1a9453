"""One training run, and several side by side, as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from deploy.display.tables import printable, table
from train.observe.progress import duration
from train.observe.resource_file import Rank
from train.run.record import RunRecord, values
from train.run.recovery.restarts import Restart

_BARS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 40
"""Of a curve, in characters: one stands for the mean of several steps of a longer run."""
_CAUSE: Final = 100
"""Characters of the cause of a restart, at most."""


def shown(record: RunRecord, steps: Sequence[Mapping[str, float]]) -> str:
    """All of a run, a line each."""
    at = f"{record.last_at_work:%Y-%m-%d %H:%M:%S} UTC"
    r = record.resources
    lines = {
        "run": record.run,
        "state": f"{record.state}, {record.holder}" if record.holder else f"{record.state}, last at work {at}",
        "algorithm": record.algorithm,
        "parent": record.parent and f"policy {record.parent}",
        "published": record.published,
        "wrong": record.wrong,
        "restarts": _restarts(record.restarts),
        "learned from": record.data,
        "lake": ", ".join(f"{name} {version}" for name, version in record.lake_versions.items()),
        "model": r and f"{r.architecture}, {r.parameters:,} parameters, {r.trained:,} trained",
        "ranks": _ranks([] if r is None else r.ranks),
        "steps": f"{record.steps} of {record.steps_planned or '?'} in {duration(record.seconds)}",
        "of a step": _parts(record),
        "tokens/s": record.tokens_per_s and f"{record.tokens_per_s:.0f}",
        "peak memory": _memory(record.peak_memory),
        "MFU": _mean(values(steps, "mfu"), "{:.1%}"),
        "best": record.best and f"step {record.best.step}, {record.best.metric} {record.best.value:.4g}",
    }
    text = [printable(f"{name + ':':<14}{line}", keep="\n") for name, line in lines.items() if line]
    if record.best is not None:
        curve = values(steps, record.best.metric)
        text.append(f"{record.best.metric + ':':<14}{_curve(curve, min(curve), max(curve))}")
        best = record.best.metrics
        rows = [[name, _number(record.last.get(name)), _number(best.get(name))] for name in _measures(record.last)]
        text += ["", table(["metric", "last step", f"step {record.best.step}, the best"], rows)]
    return "\n".join(text)


def compared(records: Sequence[RunRecord], metric: str, curves: Sequence[Sequence[float]]) -> str:
    """Runs side by side, in columns; ``metric`` step by step, all on one scale; and the settings that differ."""
    names = [record.run for record in records]
    facts: dict[str, list[str | None]] = {
        "state": [record.state for record in records],
        "algorithm": [record.algorithm for record in records],
        "parent": [str(record.parent or "-") for record in records],
        "published": [record.published for record in records],
        "wrong": [record.wrong and _short(record.wrong) for record in records],
        "steps": [f"{record.steps} of {record.steps_planned or '?'}" for record in records],
        "time": [duration(record.seconds) for record in records],
        "tokens/s": [(record.tokens_per_s and f"{record.tokens_per_s:.0f}") or None for record in records],
        "peak memory": [_memory(record.peak_memory) for record in records],
        "best step": [(record.best and f"{record.best.step}") or None for record in records],
        "best": [(record.best and f"{record.best.metric} {record.best.value:.4g}") or None for record in records],
    }
    rows = [[name, *(value or "-" for value in line)] for name, line in facts.items() if any(line)]
    last = list(dict.fromkeys(name for record in records for name in _measures(record.last)))
    numbers = [[name, *(_number(record.last.get(name)) for record in records)] for name in last]
    text = [table(["", *names], rows), "", table(["last step", *names], numbers)]
    measured = [value for curve in curves for value in curve]
    if measured:
        low, high = min(measured), max(measured)
        width = max(map(len, names))
        text += ["", f"{metric}, from {low:.4g} to {high:.4g}"]
        text += [f"{name:<{width}}  {_curve(curve, low, high)}" for name, curve in zip(names, curves, strict=True)]
    settings = [[name, *map(_setting, line)] for name, line in differing_settings(records).items()]
    text += ["", table(["setting", *names], settings) if settings else "their settings are the same"]
    return "\n".join(text)


def differing_settings(records: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """The value that each run has of the settings below ``train`` that are not the same in all."""
    flat = [dict(_leaves("train", record.config)) for record in records]
    names = dict.fromkeys(name for each in flat for name in each)
    lines = {name: [each.get(name) for each in flat] for name in names}
    return {name: line for name, line in lines.items() if any(value != line[0] for value in line)}


def sparkline(curve: Sequence[float], low: float, high: float, width: int = _WIDTH) -> str:
    """A character for each value, as high as it is between ``low`` and ``high``; of more than ``width``, for means."""
    count = min(width, len(curve))
    edges = [i * len(curve) // count for i in range(count + 1)] if count else []
    means = [sum(curve[a:b]) / (b - a) for a, b in pairwise(edges)]
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in means)


def _curve(curve: Sequence[float], low: float, high: float) -> str:
    return f"{sparkline(curve, low, high)}  {curve[0]:.4g} → {curve[-1]:.4g}" if curve else "-"


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """The settings below a section, by their dotted names; a list is one."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner)]
    return [(name, value)]


def _measures(metrics: Mapping[str, float]) -> list[str]:
    """The metrics that say how a run went: no times, which have lines of their own."""
    return [name for name in metrics if name != "time" and not name.startswith("seconds_")]


def _parts(record: RunRecord) -> str:
    """What took the time of a step, the longest first."""
    parts = sorted(record.seconds_by_part.items(), key=lambda part: -part[1])
    total = sum(record.seconds_by_part.values()) or 1.0
    return ", ".join(f"{name} {seconds / record.steps:.2f} s ({seconds / total:.0%})" for name, seconds in parts)


def _restarts(restarts: Sequence[Restart]) -> str:
    """A line for each, the causes shortened."""
    lines = []
    for one in restarts:
        went_on = f"went on after step {one.step}" if one.step else "began anew"
        on = "" if one.ranks is None else f", ranks: {one.ranks}"
        lines.append(f"{one.at:%Y-%m-%d %H:%M:%S} UTC, {one.kind}, {went_on}{on}: {_short(one.cause, _CAUSE)}")
    return ("\n" + " " * 14).join(lines)


def _ranks(ranks: Sequence[Rank]) -> str:
    """Where the ranks of each pool are, and the memory that each has held."""
    pools: dict[str, list[str]] = {}
    for rank in ranks:
        device = rank.device if rank.index is None else f"GPU {rank.index} ({rank.device})"
        peak = f", {_memory(rank.peak_memory)}" if rank.peak_memory else ""
        pools.setdefault(rank.pool, []).append(f"{rank.rank} on {device} of {rank.host}{peak}")
    return "; ".join(f"{pool}: {', '.join(each)}" for pool, each in pools.items())


def _memory(size: int | None) -> str | None:
    return None if size is None else f"{size / 2**30:.2f} GiB"


def _mean(found: Sequence[float], form: str) -> str | None:
    return form.format(sum(found) / len(found)) if found else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _setting(value: Any) -> str:
    return _short(value if isinstance(value, str) else json.dumps(value))


def _short(text: str, most: int = 48) -> str:
    """On one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
