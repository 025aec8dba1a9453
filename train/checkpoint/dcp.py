"""The part of a checkpoint that is one model in training with its optimizer: sharded, written in the background.

It is a folder, ``actor`` or ``critic``, in that of the checkpoint (train/checkpoint/folders.py): the shards
(torch.distributed.checkpoint: it loads on any number of ranks) and ``rank-0003.json`` of each rank, its random and
schedule state. What the training process does after ``Saver.start`` returned does not change what is written. The
driver makes the checkpoint whole when all its parts are written (train/run/checkpoints.py).
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from feedback.files import replace_file
from train.checkpoint.folders import CheckpointError, require_room, step_of, torn
from train.checkpoint.random_state import numbered_seed, random_state, seed_all, set_random_state
from train.model.hf_io import own_slice

_FAILURES: Final = (OSError, RuntimeError, CheckpointException)
_SPARE: Final = 1.05  # metadata and alignment, beside the tensors themselves


@dataclass(frozen=True)
class Saved:
    """How a save ended: ``error`` is None if all is on the disk."""

    step: int
    error: str | None = None


class Saver:
    """Saves of one rank, one at a time; every rank makes one and calls it alike.

    Args:
        timeout_s: for each collective of a save, and for the whole of one.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # The save's thread must not share a group with the training's collectives: their order would be chance.
        self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._running: tuple[int, Future[Any], float] | None = None  # step, its writing by all ranks, deadline
        self._ended: list[Saved] = []

    def start(
        self,
        folder: Path,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
    ) -> None:
        """Copy the state aside and write it to ``folder`` in the background; first waits for a running save.

        How it ended, failures of the copy included, is returned by ``ended``.

        Args:
            folder: of this part; it is made.
            step: steps of the driver that the state has behind it.
        """
        self._wait()
        rank = torch.distributed.get_rank()
        try:
            state = state_of(model, optimizer)
            needed = torch.tensor(_local_bytes(state) * _SPARE)
            torch.distributed.all_reduce(needed, group=self._group)
            # An optimizer may have its learning rates as tensors.
            mine = json.dumps({"random": random_state(), "schedule": schedule.state_dict()}, default=float)
            with self._agreed():
                if rank == 0:
                    folder.mkdir(parents=True)
                    require_room(folder, float(needed))
            with self._agreed():
                replace_file(folder / f"rank-{rank:04d}.json", mine.encode(), private=True)
            writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
            written = dcp.async_save(state, storage_writer=writer, process_group=self._group)
            assert isinstance(written, Future)
        except _FAILURES as error:  # returned by ended(); the driver decides what it means
            self._ended.append(Saved(step, _say(error)))
        else:
            self._running = step, written, time.monotonic() + self._timeout_s

    def ended(self, *, wait: bool) -> list[Saved]:
        """The saves that ended since the last call, those out of time too; ``wait`` for one that is running."""
        if self._running is not None and (wait or self._running[1].done() or time.monotonic() > self._running[2]):
            self._wait()
        ended, self._ended = self._ended, []
        return ended

    def _wait(self) -> None:
        if self._running is None:
            return
        (step, written, deadline), self._running = self._running, None
        error = None
        try:
            written.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            error = f"it was not written within {self._timeout_s:g} s"
        except _FAILURES as failure:
            error = _say(failure)
        self._ended.append(Saved(step, error))

    @contextmanager
    def _agreed(self) -> Iterator[None]:
        """What fails on one rank fails on all, before any waits for it in a collective."""
        problem = None
        try:
            yield
        except (OSError, CheckpointError) as error:
            problem = _say(error)
        problems: list[str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(problems, problem, group=self._group)
        if any(problems):
            raise CheckpointError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text))


def load(
    checkpoint: Path,
    part: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """Take over a part of a checkpoint, on as many ranks as there are; every rank must call it.

    A rank that the checkpoint does not have gets random numbers of its own, derived from the step.

    Raises:
        CheckpointError: it is not whole, or it is of a model of other names or shapes.
    """
    if problem := torn(checkpoint):
        raise CheckpointError(
            f"{checkpoint} is torn: {problem}; remove it, and the run continues from the one before it"
        )
    rank, folder = torch.distributed.get_rank(), checkpoint / part
    weights, moments = get_state_dict(model, optimizer, options=_OPTIONS)
    state = _stored(weights, moments, optimizer)
    try:
        _require_same_slices(folder, state.get(PACKED, {}))
        dcp.load(state, checkpoint_id=folder)
    except (*_FAILURES, ValueError, LookupError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{folder} does not fit the model in training (another policy, other shapes, or another train.optimizer, "
            f"train.lora or train.algorithm.critic.lora), or can't be read: {_say(error)}"
        ) from error
    loaded = state["optimizer"]["state"]
    for name, values in moments["state"].items():  # what is packed was loaded in place
        loaded[name] = values | loaded[name]
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_OPTIONS
    )
    mine = folder / f"rank-{rank:04d}.json"
    kept = json.loads((mine if mine.exists() else folder / "rank-0000.json").read_text())
    schedule.load_state_dict(kept["schedule"])
    if mine.exists():
        set_random_state(kept["random"])
    else:
        seed_all(numbered_seed(step_of(checkpoint), rank))


# --------------------------------------------------------------------------------------------------------- state

_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)  # what is frozen is the parent policy's


PACKED: Final = "packed"
"""In a state, the moments of torchao's optimizers, which on some ranks are no plain numbers, by the parameter's name,
the moment's and the rank's slice: so they load on ranks with the same slices, bit for bit."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The trained parameters and the optimizer's state, by name, as this rank's shards.

    Raises:
        CheckpointError: the optimizer keeps tensors that no rank but this one has.
    """
    weights, moments = get_state_dict(model, optimizer, options=_OPTIONS)
    return _stored(weights, moments, optimizer)


def _stored(weights: dict[str, Any], moments: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    packs = type(optimizer).__module__.startswith("torchao.")
    plain: dict[str, dict[str, Any]] = {}
    packed: dict[str, dict[str, Tensor]] = {}
    for name, values in moments["state"].items():
        plain[name] = {}
        for key, value in values.items():
            if packs and isinstance(value, DTensor):
                slices = ", ".join(f"{part.start}:{part.stop}" for part in own_slice(value))
                packed[f"{name} {key} [{slices}]"] = _parts(value.to_local())
                continue
            if isinstance(value, Tensor) and value.ndim and not isinstance(value, DTensor):
                raise CheckpointError(
                    f"the optimizer keeps {key} of {name} as a plain tensor of shape {list(value.shape)}, which the "
                    "other ranks don't have; it must be a DTensor, as the parameter is (torch.zeros_like makes one)"
                )
            plain[name][key] = value
    stored = {"model": weights, "optimizer": {**moments, "state": plain}}
    return stored | ({PACKED: packed} if packed else {})


def _parts(local: Tensor) -> dict[str, Tensor]:
    if not is_traceable_wrapper_subclass(local):
        return {"values": local}
    names, _ = local.__tensor_flatten__()
    return {name: getattr(local, name) for name in names}


def _require_same_slices(folder: Path, packed: dict[str, Any]) -> None:
    if not packed:
        return
    there = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    if lacking := next((key for key in packed if f"{PACKED}.{key}.{next(iter(packed[key]))}" not in there), None):
        raise ValueError(
            f"it has no {lacking}: 8-bit moments load on as many ranks, with the same train.fsdp, as have saved "
            "them; go on with those, or start a new run"
        )


def _local_bytes(state: dict[str, Any]) -> int:
    total = 0
    for value in state.values():
        if isinstance(value, dict):
            total += _local_bytes(value)
        elif isinstance(value, Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            total += local.numel() * local.element_size()
    return total


def _say(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
