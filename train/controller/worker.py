"""What runs in a rank: its workers, one of each role, and how a call reaches them."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed

from train.import_object import import_object


class Worker:
    """One rank of a group. ``peers`` are the workers of the other groups in the same process, by role."""

    def __init__(self, peers: dict[str, Worker]) -> None:
        self.peers = peers
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()

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

    def create(self, role: str, target: str, options: dict[str, Any]) -> None:
        self.by_role[role] = import_object(f"worker {role}", target)(peers=self.by_role, **options)

    def call(self, role: str, method: str, argument: Any, options: dict[str, Any]) -> Any:
        return getattr(self.by_role[role], method)(argument, **options)

    def close(self) -> None:
        """All of them, the newest first."""
        for worker in reversed(self.by_role.values()):
            worker.close()
