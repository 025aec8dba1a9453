"""A function run in the ranks of a gloo group, a process each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from train.checkpoint.dcp import Saved
from train.checkpoint.folders import aside_of, begin_aside, make_whole

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


def save_part(worker: Any, part: str, folder: Path, step: int) -> Saved:
    """A whole checkpoint of one worker's part, made as a driver makes one; every rank must call it. How it ended."""
    first = torch.distributed.get_rank() == 0
    if first:
        begin_aside(folder, step, "{}")
    torch.distributed.barrier()
    worker.save_checkpoint(aside_of(folder, step) / part, step=step)
    ended: Saved
    [ended] = worker.saved(True)
    torch.distributed.barrier()
    if first:
        make_whole(folder, step)
    torch.distributed.barrier()
    return ended


def _run(rank: int, count: int, function: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), count)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=count, store=store, timeout=TIMEOUT)
    torch.save(function(rank, folder, *arguments), folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
