"""How often a run was started again by itself, when, why, and from where it went on. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from pydantic import BaseModel, TypeAdapter, ValidationError

from feedback.files import replace_file
from train.controller.failure_kinds import Kind

RESTARTS: Final = "restarts.json"


class Restart(BaseModel):
    """``kind`` and ``cause``: of the failure, which ``failed_after`` steps were done before, if its driver was so far.
    ``step``: of the checkpoint that the run went on from, 0 if there was none. ``ranks``: of all pools together; None
    until its workers are up."""

    at: datetime
    kind: Kind
    cause: str
    failed_after: int | None
    step: int
    ranks: int | None = None


_RESTARTS: Final = TypeAdapter(list[Restart])


def read_restarts(folder: Path) -> list[Restart]:
    """Those of a run, the oldest first; none if their file is damaged."""
    try:
        return _RESTARTS.validate_json((folder / RESTARTS).read_bytes())
    except (FileNotFoundError, ValidationError):
        return []


def add_restart(folder: Path, restart: Restart) -> None:
    """Put a restart on record."""
    _write(folder, [*read_restarts(folder), restart])


def note_ranks(folder: Path, ranks: int) -> None:
    """Put on record with how many ranks the run has gone on, if it was started again and that isn't known."""
    restarts = read_restarts(folder)
    if restarts and restarts[-1].ranks is None:
        _write(folder, [*restarts[:-1], restarts[-1].model_copy(update={"ranks": ranks})])


def _write(folder: Path, restarts: Sequence[Restart]) -> None:
    replace_file(folder / RESTARTS, _RESTARTS.dump_json(list(restarts), indent=1))
