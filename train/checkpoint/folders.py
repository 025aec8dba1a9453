"""The folders of a run's checkpoints: which are whole, which is the last, what goes. Imports no torch.

``checkpoints/step-00000012`` is one that was whole when it got its name: ``driver.json``
(train/run/recovery/resume.py), a folder for each model in training (train/checkpoint/dcp.py), and ``whole.json``, which
names every file with its size. ``.step-00000012.new`` is being written, ``.step-00000012.old`` removed; after a kill
either can be removed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

from feedback.files import fsync_path, replace_file

FORMAT: Final = 2


class CheckpointError(RuntimeError):
    """A checkpoint can't be written, or can't be continued from; the text says why and what to do."""


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints of a run, the newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def torn(checkpoint: Path) -> str | None:
    """What of a checkpoint is missing or cut short, by its file sizes; None if it is whole."""
    try:
        whole = json.loads((checkpoint / "whole.json").read_text())
        files: dict[str, int] = whole["files"]
        if whole["format"] != FORMAT:
            return f"whole.json is of format {whole['format']!r}, this version reads format {FORMAT}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"whole.json can't be read ({error})"
    for name, size in files.items():
        path = checkpoint / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
    return None


def prune(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints, each by renaming it aside first, so that none is ever partial."""
    for old in checkpoints(folder)[keep:]:
        _remove(old)


def _remove(checkpoint: Path) -> None:
    aside = checkpoint.with_name(f".{checkpoint.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)
    shutil.rmtree(aside)


def remove_unfinished(folder: Path) -> list[str]:
    """Remove what a killed run left half-written or half-removed; the names."""
    left = sorted(folder.glob(".step-*"))
    for path in left:
        shutil.rmtree(path)
    return [path.name for path in left]


def aside_of(folder: Path, step: int) -> Path:
    return folder / f".{name_of(step)}.new"


def begin_aside(folder: Path, step: int, driver: str) -> Path:
    """The folder in which the parts of a checkpoint are written, with ``driver.json`` in it.

    Raises:
        OSError: it can't be made.
    """
    aside = aside_of(folder, step)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    replace_file(aside / "driver.json", driver.encode(), private=True)  # a driver's state has texts of users in it
    return aside


def make_whole(folder: Path, step: int) -> Path:
    """Rename the folder written aside to its final name, which means that it is complete; the checkpoint.

    Raises:
        OSError: the disk refuses.
    """
    aside, final = aside_of(folder, step), folder / name_of(step)
    inside = sorted(aside.rglob("*"))
    files = {path.relative_to(aside).as_posix(): path.stat().st_size for path in inside if path.is_file()}
    replace_file(aside / "whole.json", json.dumps({"format": FORMAT, "files": files}, indent=1).encode(), private=True)
    for directory in [path for path in inside if path.is_dir()] + [aside]:
        fsync_path(directory)
    if final.exists():  # of the same step, by a run that was started again with other settings
        _remove(final)
    aside.rename(final)
    fsync_path(folder)
    return final


def require_room(folder: Path, needed: float) -> None:
    """Raise CheckpointError if the disk of ``folder`` has fewer bytes left than ``needed``."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"a checkpoint needs {needed / 2**20:.0f} MiB, {folder} has {free / 2**20:.0f} MiB left: free some, or "
            "lower train.checkpoint.keep, or raise train.checkpoint.every_steps"
        )
