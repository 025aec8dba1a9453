"""``train.trackers: [wandb]``: Weights & Biases. Offline, in ``wandb/`` of the run's folder, unless you say otherwise.

W&B's own variables count: ``WANDB_MODE`` (online sends as the run goes, and needs a key), ``WANDB_PROJECT`` and all
others. ``wandb sync runs/RUN/wandb/offline-run-*`` sends what an offline run kept.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from feedback.processes.signals import handlers_deferred
from train.observe.hooks import RunInfo
from train.observe.trackers import Tracker


class Wandb(Tracker):
    """A W&B run. One that was killed and goes on is another of the same group, and begins with the steps so far: W&B
    takes no step twice."""

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # offline means that nothing is sent
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                f"{error}; install it with: pip install 'millrace[wandb]', or pip install wandb"
            ) from error
        with handlers_deferred():
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "millrace"),
                mode=os.environ.get("WANDB_MODE", "offline"),
                name=run.name,
                group=run.name,
                dir=run.folder,
                config={"parent": run.parent, "train": run.config.model_dump(mode="json")},
                settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
                reinit="create_new",
            )
        self._failed = False
        for step, metrics in enumerate(run.history):
            self.log(step, metrics)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with handlers_deferred():
            self._run.log({f"train/{name}": value for name, value in metrics.items()}, step=step)

    def fail(self, error: BaseException) -> None:
        self._failed = True

    def close(self) -> None:
        with handlers_deferred():
            self._run.finish(exit_code=int(self._failed))
