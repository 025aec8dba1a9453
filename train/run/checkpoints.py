"""A run's checkpoints as it goes, seen from the driver."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from train.checkpoint.folders import CheckpointError, aside_of, begin_aside, make_whole, prune
from train.config.sections import CheckpointConfig
from train.context import JobContext
from train.controller.worker_group import WorkerGroup
from train.observe.progress import say
from train.run.recovery.resume import Progress, checkpoints_of

FAILED_SAVES: Final = 2  # in a row end the run, which would otherwise go on for hours without a checkpoint


class Checkpoints:
    """A run's checkpoints, seen from the driver: when to save, and what became of it.

    Each group of workers writes its part in the background; when all have, the checkpoint gets its name. So it has the
    parts of one and the same step, or is not there.

    Args:
        parts: the groups in training, by the names of their parts.
        on_saved: called with the step and the folder of each checkpoint that is whole.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        context: JobContext,
        parts: Mapping[str, WorkerGroup],
        on_saved: Callable[[int, Path], None],
    ) -> None:
        self._config, self._run, self._folder = config, context.run, checkpoints_of(context)
        self._parts, self._on_saved = parts, on_saved
        self._ended: dict[int, dict[str, str | None]] = {}
        self._failed: list[str] = []

    def due(self, step: int) -> bool:
        """Whether the state after ``step`` steps is to be kept."""
        return self._config.every_steps is not None and step % self._config.every_steps == 0

    def save(self, progress: Progress) -> None:
        """Start a checkpoint; the next step need not wait for it. Raises as ``collect``."""
        try:
            aside = begin_aside(self._folder, progress.step, progress.model_dump_json())
        except OSError as error:
            return self._settle(progress.step, f"{type(error).__name__}: {error}")
        for part, group in self._parts.items():
            group.save_checkpoint(aside / part, step=progress.step)
        if not self._config.asynchronous:
            self.collect(wait=True)

    def collect(self, *, wait: bool = False) -> None:
        """Make whole what all groups have written since the last time; ``wait`` for a save that is under way.

        Raises:
            CheckpointError: saving failed twice in a row.
        """
        if self._config.every_steps is None:
            return
        for part, group in self._parts.items():
            for saved in group.saved(wait):
                self._ended.setdefault(saved.step, {})[part] = saved.error
        for step in sorted(step for step, ended in self._ended.items() if ended.keys() == self._parts.keys()):
            errors = [f"{part}: {error}" for part, error in self._ended.pop(step).items() if error is not None]
            self._settle(step, "; ".join(errors) or None)

    def _settle(self, step: int, error: str | None) -> None:
        """All parts of a checkpoint are written, or one is not and never will be."""
        if error is None:
            try:
                checkpoint = make_whole(self._folder, step)
                prune(self._folder, self._config.keep)
            except OSError as failure:
                error = f"{type(failure).__name__}: {failure}"
            else:
                self._failed.clear()
                return self._on_saved(step, checkpoint)
        shutil.rmtree(aside_of(self._folder, step), ignore_errors=True)
        self._failed.append(f"after step {step}: {error}")
        if len(self._failed) >= FAILED_SAVES:
            raise CheckpointError(f"{self._run}: no checkpoint could be saved, {'; '.join(self._failed)}")
        say(f"{self._run}: the checkpoint after step {step} failed, the run goes on: {error}")
