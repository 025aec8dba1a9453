"""The weights of the step that was the best on held-out prompts, for ``train.keep=best``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from feedback.files import fsync_path, fsync_tree, link_or_copy
from serve.policies.folder import WrittenFile
from train.checkpoint.folders import CheckpointError, checkpoints, step_of
from train.config.training import TrainConfig
from train.controller.worker_group import WorkerGroup

REWARD: Final = "held_out/reward"
_WRITTEN: Final = "written.json"


@dataclass(frozen=True)
class Best:
    """``folder``: what stands in a run's folder of a candidate after ``step`` steps. ``reward``: the mean."""

    step: int
    reward: float
    folder: Path

    def restore(self, run: Path) -> dict[str, WrittenFile]:
        """Put what stands in ``folder`` into a run's folder; the answer is that of the export that wrote it."""

        def place(source: str, to: str) -> None:
            Path(to).unlink(missing_ok=True)  # of a publishing that was killed: it may be the same file
            (link_or_copy if source.endswith(".safetensors") else shutil.copy2)(source, to)

        shutil.copytree(
            self.folder, run, dirs_exist_ok=True, ignore=shutil.ignore_patterns(_WRITTEN), copy_function=place
        )
        if not (self.folder / _WRITTEN).exists():  # of a version that kept none
            return {}
        written = json.loads((self.folder / _WRITTEN).read_bytes())
        return {name: WrittenFile(**file) for name, file in written.items()}


class BestWeights:
    """Weights are written when a step is better than all before it, and go when no run needs them any more.

    A killed run goes on from a checkpoint, and what is written of later steps does not count until they come again: so
    the best of the steps up to each checkpoint stays as long as that. It is durable before the checkpoint is.
    """

    def __init__(self, config: TrainConfig, run: Path, actor: WorkerGroup) -> None:
        self._wanted, self._run, self._actor = config.keep == "best", run, actor
        self._folder = folder_of(run)

    def look(self, history: Sequence[Mapping[str, float]]) -> None:
        """Write the weights as they are, if the last step was measured and is the best of its run."""
        if not self._wanted or REWARD not in history[-1]:
            return
        before = best_of(self._run, history[:-1])
        if before is not None and before.reward >= history[-1][REWARD]:
            return
        folder, aside = _of_step(self._run, len(history)), self._folder / ".new"
        for old in (aside, folder):
            shutil.rmtree(old, ignore_errors=True)
        (aside / "candidate").mkdir(parents=True)
        written: Mapping[str, WrittenFile] = self._actor.export(aside / "candidate")
        (aside / _WRITTEN).write_text(json.dumps({name: asdict(file) for name, file in written.items()}))
        fsync_tree(aside)
        aside.rename(folder)
        fsync_path(self._folder)

    def prune(self, history: Sequence[Mapping[str, float]]) -> None:
        """Remove what neither this run needs nor one that goes on from a checkpoint of it, be that still in writing.

        Raises:
            CheckpointError: as ``best_of``.
        """
        if not self._wanted or not self._folder.exists():
            return
        saved = [step_of(checkpoint) for checkpoint in checkpoints(self._run / "checkpoints")]
        steps = {*saved, *range(max(saved, default=0), len(history)), len(history)}
        found = [best_of(self._run, history[:step]) for step in steps]
        needed = {best.folder for best in found if best is not None}
        for folder in set(self._folder.iterdir()) - needed:
            shutil.rmtree(folder)


def best_of(run: Path, history: Sequence[Mapping[str, float]]) -> Best | None:
    """The best of the steps in ``history``, the first of equal ones; None if none was measured.

    Raises:
        CheckpointError: its weights are not there: another step's would pass for the best.
    """
    measured = [(metrics[REWARD], step) for step, metrics in enumerate(history, start=1) if REWARD in metrics]
    if not measured:
        return None
    reward, step = max(measured, key=lambda found: found[0])
    folder = _of_step(run, step)
    if not folder.exists():
        raise CheckpointError(
            f"step {step} was the best on train.evaluate_suite (reward {reward:.3f}), and its weights are not in "
            f"{folder}: train.keep was not best then, or they were removed. Set train.keep to last, or give the run "
            "another name (--run)"
        )
    return Best(step, reward, folder)


def folder_of(run: Path) -> Path:
    return run / "best"


def _of_step(run: Path, step: int) -> Path:
    return folder_of(run) / f"step-{step:08d}"
