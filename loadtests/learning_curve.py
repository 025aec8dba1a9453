"""What a training of ``make bench-learn`` says of itself as it goes: used on both sides, a line of JSON at a time.

This file stands alone: it is also read by a peer's Python, and as a module of a home.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


class Curve:
    """Writes the file that the environment names in ``BENCH_CURVE``. Training begins when this is made."""

    def __init__(self) -> None:
        self._began, self._evaluating = time.monotonic(), 0.0
        self._note({"time": time.time()})

    def step(self, samples: int, accuracy: float | None, evaluating: float) -> None:
        """After a step.

        Args:
            samples: responses sampled in training so far.
            accuracy: on held-out prompts, if the step ended with an evaluation.
            evaluating: seconds that evaluations took since the last step, which don't count.
        """
        self._evaluating += evaluating
        seconds = time.monotonic() - self._began - self._evaluating
        self._note({"samples": samples, "seconds": round(seconds, 3), "accuracy": accuracy})

    def _note(self, line: dict[str, float | None]) -> None:
        with Path(os.environ["BENCH_CURVE"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
