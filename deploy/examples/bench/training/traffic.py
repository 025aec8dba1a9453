"""What the driver of a training run reads of the lake before its first step."""

from __future__ import annotations

import resource
import time
from typing import Any

import train.job  # noqa: F401  what it imports counts in the peak
from deploy.config.root import Settings
from train.data.prompts import TrainingData


def traffic(settings: Settings) -> dict[str, Any]:
    """Read what a run from the serving policy would; a process of its own makes ``peak_mib`` the run's."""
    config, lake = settings.resolved().train, settings.lake()
    store = settings.policy_store()
    serving = store.serving()
    assert serving is not None
    config.runs.mkdir(parents=True, exist_ok=True)  # as a run's folder does
    before, started = _peak_mib(), time.perf_counter()
    data = TrainingData.of(lake, lake.versions(), config, store.get(serving.version).path, config.seed, "batch")
    read = time.perf_counter()
    drawn = sum(sum(map(len, data.traffic.at(step))) for step in range(config.steps))
    return {
        "seconds": read - started,
        "draw_s": time.perf_counter() - read,
        "imports_mib": before,
        "peak_mib": _peak_mib(),
        "groups": len(data.traffic.items),
        "drawn": drawn,
        "summary": str(data),
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
