"""How the ranks of a pool find each other, and which of their failures follow from another rank's."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed
from torch.distributed import Store, TCPStore


def join_ranks(store: Store, rank: int, ranks: int, timeout_s: float) -> None:
    """Make the process group of a pool; every rank calls it. Its collectives fail after ``timeout_s`` seconds."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def open_store(address: str, timeout_s: float, port: int = 0) -> TCPStore:
    """A rendezvous store in this process, on any free port if ``port`` is 0; it lives as long as this object.

    It listens on ``address`` alone. A TCPStore alone listens on all addresses, without authentication.
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
    """Whether a rank failed because another one has gone, so that the cause is to be looked for there."""
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
"""Parts of the messages of gloo, torch's TCPStore and NCCL, none of which has a type of its own."""
