"""A function run in the ranks of a gloo group, a process each."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

TIMEOUT = timedelta(seconds=60)


def run_ranks(count: int, function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What ``function(rank, folder, *arguments)`` returns on each rank; it is kept in ``folder`` for ``found_by``."""
    torch.multiprocessing.spawn(_run, (count, function, folder, arguments), nprocs=count)
    return found_by(count, folder)


def found_by(count: int, folder: Path) -> list[Any]:
    """What the ranks returned."""
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _run(rank: int, count: int, function: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), count)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=count, store=store, timeout=TIMEOUT)
    torch.save(function(rank, folder, *arguments), folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
