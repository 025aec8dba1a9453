"""Records of experiments for tests."""

from __future__ import annotations

import time
from typing import Any

from serve.policies.experiments import Experiment, Phase


def experiment_record(**changed: Any) -> Experiment:
    """One that began now and tries policy 2 against policy 1 on half the traffic, but for what is changed."""
    values: dict[str, Any] = {
        "number": 1,
        "candidate": 2,
        "control": 1,
        "seed": "seed",
        "started_at": time.time(),
        "block_s": 60.0,
        "phases": (Phase(0, 0.5),),
        "generation": 1,
        "state": "running",
        "who": "test",
        "why": "test",
        "plan": {},
    }
    return Experiment(**(values | changed))
