"""What runs in a rank: its workers, one of each role, and how a call reaches them."""

from __future__ import annotations

import importlib
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed import Store, TCPStore


class Worker:
    """One rank of a group. ``peers`` are the workers of the other groups in the same process, by role."""

    def __init__(self, peers: dict[str, Worker]) -> None:
        self.peers = peers
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()

    def close(self) -> None:
        """Leave what would not go by itself when the process ends in good order."""


class Workers:
    """The workers of one process, by role."""

    def __init__(self) -> None:
        self.by_role: dict[str, Worker] = {}

    def create(self, role: str, target: str, options: dict[str, Any]) -> None:
        self.by_role[role] = load_class(target)(peers=self.by_role, **options)

    def call(self, role: str, method: str, argument: Any, options: dict[str, Any]) -> Any:
        return getattr(self.by_role[role], method)(argument, **options)

    def close(self) -> None:
        """All of them, the newest first."""
        for worker in reversed(self.by_role.values()):
            worker.close()


def load_class(target: str) -> type[Any]:
    """The class named ``module:Class``."""
    module, _, name = target.partition(":")
    cls: type[Any] = getattr(importlib.import_module(module), name)
    return cls


def join_ranks(store: Store, rank: int, ranks: int, timeout_s: float) -> None:
    """Make the process group of a pool; every rank calls it. Its collectives fail after ``timeout_s`` seconds."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def open_store(address: str, timeout_s: float, port: int = 0) -> TCPStore:
    """A rendezvous store in this process, on any free port if ``port`` is 0; it lives as long as this object.

    It listens on ``address`` alone. Left to itself a TCPStore listens on all addresses, and it asks nobody who he is.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )


def find_store(address: str, port: int, timeout_s: float) -> TCPStore:
    """The store that another process has opened, or opens within ``timeout_s`` seconds."""
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def follows_from_another(error: str) -> bool:
    """Whether a failure is what a rank says when another one has gone: the cause is to be looked for there."""
    return any(sign in error for sign in _LOST_PEER)


_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "recvValue failed",
    "sendBytes failed",
    "remote process exited or there was a network error",
    "Timed out waiting",
)
"""As gloo, torch's TCPStore and NCCL say it."""
