"""Which runs keep the checkpoints that they would go on from. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from stat import S_ISREG
from typing import Final, Literal

from train.config.sections import RunRetentionConfig
from train.context import JobResult
from train.run.recovery.unfinished import START, holder_of, kept

_JOB: Final = "job.json"


@dataclass(frozen=True)
class RunFolder:
    """A run by what is in its folder. ``bytes``: of checkpoints and what else it would go on from.

    ``at``: when it was last at work. ``result``: None where it has not ended.
    """

    folder: Path
    at: datetime
    state: Literal["at work", "unfinished", "ended"]
    bytes: int
    result: JobResult | None

    @property
    def name(self) -> str:
        return self.folder.name


def run_folders(runs: Path) -> list[RunFolder]:
    """The runs under a folder, the one that was last at work last."""
    found = []
    for folder in {path.parent for name in (_JOB, START) for path in runs.glob(f"*/{name}")}:
        files = [status for part in kept(folder) for status in _statuses(part, *_inside(part))]
        began = _statuses(folder / _JOB, folder / START) or _statuses(folder)
        size = sum(file.st_size for file in files if S_ISREG(file.st_mode))
        state: Literal["at work", "unfinished", "ended"] = "unfinished" if files else "ended"
        at = datetime.fromtimestamp(max(file.st_mtime for file in (*began, *files)), UTC)
        found.append(RunFolder(folder, at, "at work" if holder_of(folder) else state, size, _result(folder)))
    return sorted(found, key=lambda run: (run.at, run.name))


def _inside(folder: Path) -> Iterator[Path]:
    """All that is in a folder, as far as it is there by then: a run at work removes its older checkpoints."""
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name) for name in (*folders, *files))


def _statuses(*paths: Path) -> list[os.stat_result]:
    """Of those that are still there."""
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            found.append(path.stat())
    return found


def kept_runs(runs: list[RunFolder], config: RunRetentionConfig, needed: Collection[str]) -> dict[str, str]:
    """Name -> why it keeps what it has, of the runs that have something to go on from.

    Args:
        runs: as ``run_folders`` lists them.
        needed: names of those that somebody may go on with.
    """
    having = [run for run in runs if run.state != "ended"]
    if config.keep_last is None:
        return {run.name: "all do: keep_last is null" for run in having}
    since = datetime.now(UTC) - timedelta(days=config.days)
    newest = {run.name for run in [run for run in having if run.state == "unfinished"][-config.keep_last :]}
    reasons: dict[str, str] = {}
    for run in having:
        for holds, reason in (
            (run.state == "at work", "it is at work"),
            (run.name in needed, "a cycle may go on with it"),
            (run.name in newest, f"one of the last {config.keep_last}"),
            (run.at >= since, f"it was at work in the last {config.days:g} days"),
        ):
            if holds:
                reasons.setdefault(run.name, reason)
    return reasons


def _result(folder: Path) -> JobResult | None:
    try:
        return JobResult.model_validate(json.loads((folder / "result.json").read_bytes()))
    except (OSError, ValueError):
        return None
