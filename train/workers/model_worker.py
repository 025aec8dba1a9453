"""A model in training: its optimizer, one step of it on a batch, its part of a checkpoint. Actor, critic and scorer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from train import algorithms
from train.algorithms.base import Loss, logged_values
from train.batch.packed import PackedBatch
from train.checkpoint.dcp import Saved, Saver, load
from train.config.training import TrainConfig
from train.controller.dispatch import dispatch, to_all, to_all_gathered
from train.controller.usage import Usage, peak_memory
from train.controller.worker import Worker
from train.host_memory.parking_worker import ParkingWorker
from train.model.fsdp import log_once, rows_for, training_mode
from train.model.mesh import Meshes, make_meshes, mesh_sizes
from train.model.tensor_parallel import share_random_state
from train.optimizers.build import make_optimizer, move_state, tensors_of
from train.optimizers.schedule import share_of_peak

MicroLoss = Callable[[PackedBatch], tuple[Loss, Tensor]]
"""Of a micro-batch: its loss with what to log, and the model's output that the loss is of, float32 [T]."""


class TrainedWorker(ParkingWorker):
    """One FSDP rank of a model in training, with its optimizer."""

    saver: Saver
    all_patterns_fit: ClassVar[bool] = False
    """Whether each pattern of train.optimizer.groups must fit a parameter: they are written for the policy."""

    def __init__(self, *, policy: Path, config: TrainConfig, **peers: Any) -> None:
        super().__init__(**peers)
        self.policy, self.config = policy, config
        self.algorithm = algorithms.load(config.algorithm)
        self.updates = Usage(0)
        self.meshes = meshes_of(config, self.peers)
        self.model: nn.Module = self.build()
        o = config.optimizer
        self.optimizer = make_optimizer(self.model, o, self.learning_rate, all_patterns_fit=self.all_patterns_fit)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: share_of_peak(step, o, self.updates_of_run)
        )
        self.parks_state = config.fsdp.offload_optimizer and torch.cuda.is_available()
        if config.fsdp.offload_optimizer and not self.parks_state:
            log_once("train.fsdp.offload_optimizer does nothing: the compute device is a CPU")
        # Process groups cost memory, and are not given back.
        self.saver = self.before.saver if isinstance(self.before, TrainedWorker) else Saver(config.step_timeout_s)

    def rest(self) -> None:
        self.saver.ended(wait=True)
        for name in ("model", "optimizer", "schedule", "algorithm"):
            vars(self).pop(name, None)
        super().rest()

    def state_tensors(self) -> Iterable[Tensor]:
        return tensors_of(self.optimizer)

    def build(self) -> nn.Module:
        """The sharded model, of ``policy``."""
        raise NotImplementedError

    @property
    def build_options(self) -> dict[str, Any]:
        """The arguments of ``train.model.fsdp.build`` that every model in training has."""
        return {
            "dtype": getattr(torch, self.config.dtype),
            "meshes": self.meshes,
            "options": self.config.fsdp,
            "fp8": self.config.fp8,
            "activation_checkpointing": bool(self.config.activation_checkpointing),
        }

    @property
    def learning_rate(self) -> float:
        """Peak learning rate."""
        return self.config.optimizer.learning_rate

    @property
    def updates_of_run(self) -> int:
        """Optimizer steps of the model in the run, at most."""
        return self.config.updates

    def take_step(self, batch: PackedBatch, loss_of: MicroLoss, count: float) -> tuple[dict[str, float], Tensor]:
        """One optimizer step on the batch; every rank must call it.

        Args:
            loss_of: summed over all micro-batches and ranks it is what is minimised, over the sum of ``count``.
            count: this rank's share of what the sum is divided by.

        Returns:
            (metrics, output): the loss, the means of what ``loss_of`` logs, grad_norm before clipping, and the learning
            rate; and the model's output before the step, float32 [T]. If the norm is not finite the weights are as they
            were, and ``train.observe.health.check_health`` ends the run.
        """
        began = time.perf_counter()
        if self.meshes.tp is not None:
            share_random_state(self.meshes.tp)
        total = all_sum(torch.tensor(count, dtype=torch.float64))
        micro_batches = equal_count(batch, self.config.micro_batch_tokens)
        means = Means()
        before = torch.zeros(len(batch.tokens))
        training_mode(self.model)
        assert isinstance(self.model, FSDPModule)
        for i, (sequences, micro) in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            self.model.set_requires_gradient_sync(last or bool(self.config.fsdp.reduce_every_micro_batch))
            counts = len(sequences) > 0
            (loss, health), output = loss_of(micro)
            if counts:
                before[batch.token_index(sequences)] = output.detach()
            means.add(health, micro.response_mask, counts=counts)
            means.add_to("loss", loss.detach() * float(counts), 0.0)
            # FSDP averages gradients over ranks; the sum over all of them is wanted.
            (loss * float(counts) / total * self.world_size).backward()
            if counts:
                self._count(micro)
        grad_norm = clip_gradients(self.model, self.config.optimizer.max_grad_norm)
        if math.isfinite(grad_norm):
            self._step()
        self.optimizer.zero_grad()
        rate = self.learning_rate * share_of_peak(self.schedule.last_epoch, self.config.optimizer, self.updates_of_run)
        self.schedule.step()
        means.add_to("loss", torch.zeros(()), float(total) / self.world_size)
        metrics = {**means.over_ranks(), "grad_norm": grad_norm, "learning_rate": rate}
        self.updates = replace(self.updates, seconds=self.updates.seconds + time.perf_counter() - began)
        return metrics, before

    def _step(self) -> None:
        if self.parks_state:
            move_state(self.optimizer, torch.device("cuda"))
        self.optimizer.step()
        if self.parks_state:
            move_state(self.optimizer, torch.device("cpu"))

    def _count(self, micro: PackedBatch) -> None:
        """Add what an update has computed for a micro-batch."""
        sampled, was = micro.response_mask.nonzero().flatten(), self.updates
        rows = rows_for(self.model, micro, sampled - 1)
        pairs = sum(span.length * (span.prefix + span.length / 2) for span in rows.spans)
        self.updates = replace(
            was, rows=was.rows + len(rows.tokens), scored=was.scored + len(sampled), pairs=was.pairs + pairs
        )

    @dispatch(to_all_gathered)
    def usage(self, _: None = None) -> Usage:
        """What each rank has used since ``device``, and computed in updates since the last call."""
        found, self.updates = replace(self.updates, peak_memory=peak_memory()), Usage(0)
        return found

    @dispatch(to_all)
    def save_checkpoint(self, folder: Path, *, step: int) -> None:
        """Start to write this part of the checkpoint of ``step`` to ``folder``; ``saved`` returns how that ended."""
        self.saver.start(folder, step, self.model, self.optimizer, self.schedule)

    @dispatch(to_all)
    def saved(self, wait: bool) -> list[Saved]:
        """The saves that ended since the last call; ``wait`` for one under way."""
        return self.saver.ended(wait=wait)

    @dispatch(to_all)
    def load_checkpoint(self, checkpoint: Path, *, part: str) -> None:
        """Take over weights, optimizer, schedule and random state of a checkpoint's part, of any number of ranks."""
        load(checkpoint, part, self.model, self.optimizer, self.schedule)
        if self.parks_state:
            move_state(self.optimizer, torch.device("cpu"))


def meshes_of(config: TrainConfig, peers: Mapping[str, Worker]) -> Meshes:
    """The meshes of another worker in the same process, or new ones: process groups cost memory."""
    for worker in peers.values():
        if isinstance(meshes := vars(worker).get("meshes"), Meshes):
            return meshes
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return make_meshes(device_type, **mesh_sizes(config, torch.distributed.get_world_size()))


def forward_per_token(
    model: nn.Module,
    batch: PackedBatch,
    micro_batch_tokens: int,
    per_token: Callable[[nn.Module, PackedBatch], Tensor],
) -> Tensor:
    """The output of ``per_token``, float32 [T], without gradient, in as many micro-batches on every rank.

    Behind it the model is sharded, as before.
    """
    model.eval()
    result = torch.zeros(len(batch.tokens))
    with torch.no_grad():
        for sequences, micro in equal_count(batch, micro_batch_tokens):
            values = per_token(model, micro)
            if len(sequences):
                result[batch.token_index(sequences)] = values
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root, and layers by a setting, stay gathered for a backward pass that never comes
    return result


def equal_count(batch: PackedBatch, tokens: int) -> list[tuple[Tensor, PackedBatch]]:
    """Micro-batches of ``tokens`` tokens at most, as many on every rank: each pass is a collective under FSDP.

    A rank that needs fewer makes smaller ones. Where it has not enough sequences for that, it repeats some in
    micro-batches that must not count: only their collectives matter.

    Returns:
        (indices of its sequences in the batch, int64 [n], n = 0 if it must not count; the micro-batch) of each.
    """
    count = torch.tensor(len(batch.micro_batches(tokens)))
    torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX)
    groups = batch.micro_batches(tokens, at_least=int(count))
    if len(groups) == count == 1:
        return [(groups[0], batch)]
    idle = (torch.empty(0, dtype=torch.int64), batch.select(batch.units()[0]))
    return [(group, batch.select(group)) for group in groups] + [idle] * (int(count) - len(groups))


class Means:
    """Means of what micro-batches log, over all of them and all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, values: dict[str, Tensor], response_mask: Tensor, *, counts: bool) -> None:
        """Add what ``train.algorithms.base.logged_values`` takes of each; only the names unless it ``counts``."""
        for name, value in values.items():
            taken = logged_values(value.detach(), response_mask)
            taken = taken if counts else taken[:0]
            self.add_to(name, taken.double().sum(), float(taken.numel()))

    def add_to(self, name: str, total: Tensor, count: float) -> None:
        """Add to the sum that is named, and to what it is divided by."""
        self._sums[name] = self._sums.get(name, torch.zeros(2, dtype=torch.float64)) + torch.stack(
            [total.double().cpu(), torch.tensor(count, dtype=torch.float64)]
        )

    def over_ranks(self) -> dict[str, float]:
        """The means, of what there was any of; every rank must call it, and must have added to the same names."""
        total = all_sum(torch.stack(list(self._sums.values())))
        return {name: float(s / n) for name, (s, n) in zip(self._sums, total, strict=True) if n}


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their norm over all ranks is ``max_norm`` at most; returns the norm before.

    What several ranks hold (replicas, and whole parameters under tensor parallelism) counts once. Every rank must call
    it.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    parts = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    assert len(parts) == len(gradients), "FSDP2 shards every parameter"
    norms = torch.stack([torch.linalg.vector_norm(part) for part in parts]).double().cpu()  # one wait for the device
    copies = torch.tensor([copies_of(gradient) for gradient in gradients], dtype=torch.float64)
    norm = float(all_sum((norms.square() / copies).sum()).sqrt())
    if norm > max_norm:
        for part in parts:
            part.mul_(max_norm / norm)
    return norm


def copies_of(tensor: DTensor) -> int:
    """Ranks that hold each element."""
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if isinstance(placement, Replicate))


def all_sum(value: Tensor) -> Tensor:
    """The sum over ranks."""
    torch.distributed.all_reduce(value)
    return value
