"""What a run of a harness found, as it is kept beside the harness's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from feedback.files import replace_file

RESULT: Final = "result.json"


class HarnessFailed(RuntimeError):
    """A harness came to no results that count; the text says why."""


class Metric(BaseModel):
    """One metric of one task. ``stderr``: as the harness gives it; ``n``: of how many samples it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    metric: str
    value: float
    stderr: float | None
    n: int | None


class HarnessResult(BaseModel):
    """A run of a harness on one policy. It decides nothing.

    ``server``: whether it asked the running endpoint, or a server of that policy alone. ``model_args`` and
    ``arguments`` went to the harness as they were given. ``created_at`` is ISO 8601, UTC; ``seconds`` those of the
    harness.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    sha256: str
    server: Literal["endpoint", "own"]
    harness: str
    harness_version: str
    tasks: tuple[str, ...]
    limit: str | None
    model_args: str | None
    arguments: tuple[str, ...]
    metrics: tuple[Metric, ...]
    created_at: str
    seconds: float

    def save(self, folder: Path) -> None:
        """Write it into the run's folder, last of all: a folder without it is of a run that did not end well."""
        replace_file(folder / RESULT, self.model_dump_json(indent=2).encode() + b"\n")

    def lines(self) -> list[list[str]]:
        """A row of text for each metric, as ``COLUMNS`` names them."""
        limit = "" if self.limit is None else f" (limit {self.limit})"
        return [
            [
                str(self.version),
                f"{self.harness} {self.harness_version}",
                metric.task + limit,
                metric.metric,
                f"{metric.value:.4f}",
                "-" if metric.stderr is None else f"{metric.stderr:.4f}",
                "-" if metric.n is None else str(metric.n),
                self.created_at[:19],
            ]
            for metric in self.metrics
        ]


COLUMNS: Final = ["policy", "harness", "task", "metric", "value", "stderr", "n", "at (UTC)"]


def load_all(root: Path) -> list[tuple[Path, HarnessResult]]:
    """All results below a folder with the folders of their runs, oldest first. Raises ValueError naming a bad file."""
    found: list[tuple[Path, HarnessResult]] = []
    for path in root.glob(f"*/{RESULT}"):
        try:
            found.append((path.parent, HarnessResult.model_validate_json(path.read_bytes())))
        except ValueError as error:
            raise ValueError(f"{path} is no result of a harness: {error}") from error
    return sorted(found, key=lambda each: each[1].created_at)


def number(value: Any) -> float | None:
    """A finite number of a harness's result file; None for what it writes where there is none (N/A, NaN)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < float("inf") else None
