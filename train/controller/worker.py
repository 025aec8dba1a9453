"""What runs in a rank: its workers, one of each role, and how a call reaches them."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed

from feedback.processes.freed_memory import give_freed_memory_back
from train.checkpoint.random_state import seed_all
from train.controller.dispatch import dispatch, to_all_gathered
from train.controller.heartbeat import Heartbeat
from train.controller.imported_files import Look, imported_files
from train.controller.usage import Device, Usage, peak_memory, reset_peak_memory, this_device
from train.import_object import import_object


class Worker:
    """One rank of a group. ``peers`` are the workers of the other groups in the same process, by role.

    ``before``: the worker of the same role in the last run of this process, which rests; what is costly to make, and
    holds nothing of a run, is taken over from it.
    """

    def __init__(self, peers: dict[str, Worker], before: Worker | None = None) -> None:
        self.peers, self.before = peers, before
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()

    @dispatch(to_all_gathered)
    def device(self, _: None = None) -> Device:
        """Where each rank computes; its peak of memory counts from here on."""
        reset_peak_memory()
        return this_device()

    @dispatch(to_all_gathered)
    def usage(self, _: None = None) -> Usage:
        """What each rank has used since ``device``."""
        return Usage(peak_memory())

    def before_call(self, method: str) -> None:
        """Have at hand what that method of it needs. Nothing, for most."""

    def make_room(self) -> None:
        """Leave the device to another worker of this process, until something is called of this one."""

    def rest(self) -> None:
        """Drop what is of the run that has ended; nothing is called from here on, but ``lend`` of a rollout."""

    def close(self) -> None:
        """Leave what would not go by itself when the process ends in good order."""


def compile_by_environment() -> None:
    """Have torch compile nothing where the environment says so, which it read when it was imported, maybe before."""
    if "torch._dynamo" in sys.modules and os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        torch._dynamo.config.disable = True


class Workers:
    """The workers of one process, by role."""

    def __init__(self) -> None:
        self.by_role: dict[str, Worker] = {}
        self._heartbeat: Heartbeat | None = None
        self._has_rested = False
        self._returned: set[str] = set()

    def begin_heartbeat(self, folder: Path, name: str, every_s: float) -> None:
        """Give signs of life to whoever watches the run of this folder, until the workers rest or the process ends."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._heartbeat = Heartbeat(folder, name, every_s)

    def prepare(self, target: str, argument: Any) -> None:
        """Call what a run needs of this process before any worker of it is made, by ``module:name``."""
        import_object("preparation", target, "function")(argument)

    def create(self, role: str, target: str, options: dict[str, Any]) -> None:
        before = self.by_role.get(role)
        worker: Worker = import_object(f"worker {role}", target)(peers=self.by_role, before=before, **options)
        worker.before = None
        self.by_role[role] = worker

    def seed(self, seed: int) -> None:
        """Give all random numbers of this process the same beginning, however many it has drawn before."""
        seed_all(seed)

    def rest(self) -> dict[str, Look]:
        """Keep the workers until another run, without what was of this one; free memory goes back to the system.

        Returns:
            The files of what this process has imported, apart from those that it has returned before.
        """
        for worker in self.by_role.values():
            worker.rest()
        if self._has_rested:
            gc.collect()
        else:  # vLLM has frozen what was there as its engine started, the models in training too, which are cycles
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        self._has_rested = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        give_freed_memory_back()
        found = imported_files(self._returned)
        self._returned |= found.keys()
        return found

    def call(self, role: str, method: str, argument: Any, options: dict[str, Any]) -> Any:
        worker = self.by_role[role]
        worker.before_call(method)
        return getattr(worker, method)(argument, **options)

    def close(self) -> None:
        """All of them, the newest first."""
        for worker in reversed(self.by_role.values()):
            worker.close()
