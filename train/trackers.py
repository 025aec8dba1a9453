"""Where a run's numbers go: ``metrics.jsonl``, one line a step, and TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter


class Tracker:
    """Writes each step's metrics to ``run/metrics.jsonl`` and ``run/tensorboard/``. A context manager."""

    def __init__(self, run: Path) -> None:
        self._lines = (run / "metrics.jsonl").open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run / "tensorboard"))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._lines.write(json.dumps({"step": step, **metrics}) + "\n")
        self._lines.flush()
        for name, value in metrics.items():
            self._board.add_scalar(f"train/{name}", value, step)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lines.close()
        self._board.close()
