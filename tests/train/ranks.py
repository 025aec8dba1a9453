"""A function run in the ranks of a gloo group, a process each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

TIMEOUT = timedelta(seconds=600)
_IMPORTED = ["train.workers.actor", "tests.train.tiny_models", "torch.testing"]


def run_ranks(count: int, function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What ``function(rank, folder, *arguments)`` returns on each rank; it is kept in ``folder`` for ``found_by``."""
    start_ranks(_run, (count, function, folder, arguments), count)
    return found_by(count, folder)


def start_ranks(run: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """``run(rank, *arguments)`` in a process each, forked from one that has imported torch and transformers."""
    multiprocessing.set_forkserver_preload(_IMPORTED)  # does nothing once it runs
    torch.multiprocessing.start_processes(run, arguments, nprocs=count, start_method="forkserver")


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
