"""A model in training: its optimizer, one step of it on a batch, its part of a checkpoint. Actor, critic and scorer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from train import algorithms
from train.algorithms.base import Loss
from train.batch.packed import PackedBatch
from train.checkpoint.dcp import Saved, Saver, load
from train.config.training import TrainConfig
from train.controller.dispatch import dispatch, to_all
from train.controller.rank import Worker
from train.model.fsdp import require_gradient_sync
from train.model.mesh import Meshes, make_meshes

MicroLoss = Callable[[PackedBatch, Tensor], Loss]
"""Of a micro-batch and the indices of its sequences in the batch (int64 [n]): its loss, and what to log. Where there
are no indices the micro-batch stands for nothing: it is run so that this rank takes part in the others' collectives."""


class TrainedWorker(Worker):
    """One FSDP rank of a model in training, with its optimizer."""

    def __init__(self, *, policy: Path, config: TrainConfig, **peers: Any) -> None:
        super().__init__(**peers)
        self.policy, self.config = policy, config
        self.algorithm = algorithms.load(config.algorithm)
        self.meshes = self._meshes()
        self.model = self.build()
        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=self.learning_rate,
            betas=o.betas,
            weight_decay=o.weight_decay,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / (o.warmup_steps + 1))
        )
        self.saver = Saver(config.step_timeout_s)

    def build(self) -> nn.Module:
        """The sharded model, of ``policy``."""
        raise NotImplementedError

    @property
    def learning_rate(self) -> float:
        """The peak one."""
        return self.config.optimizer.learning_rate

    def take_step(self, batch: PackedBatch, loss_of: MicroLoss, count: float) -> dict[str, float]:
        """One optimizer step on the batch; every rank must call it.

        Args:
            loss_of: summed over all micro-batches and ranks it is what is minimised, over the sum of ``count``.
            count: this rank's share of what the sum is divided by.

        Returns:
            The loss, the means of what ``loss_of`` logs, grad_norm before clipping, and the learning rate. If the norm
            is not finite the weights are as they were, and ``train.observe.health.check_health`` ends the run.
        """
        total = all_sum(torch.tensor(count, dtype=torch.float64))
        micro_batches = equal_count(batch, self.config.micro_batch_tokens)
        means = Means()
        self.model.train()
        for i, sequences in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            require_gradient_sync(self.model, last or self.config.fsdp.reduce_every_micro_batch)
            micro = batch.select(sequences if len(sequences) else batch.units()[0])
            counts = len(sequences) > 0
            loss, health = loss_of(micro, sequences)
            means.add(health, micro.response_mask, counts=counts)
            means.add_to("loss", loss.detach() * float(counts), 0.0)
            # FSDP averages gradients over ranks; the sum over all of them is wanted.
            (loss * float(counts) / total * self.world_size).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if math.isfinite(grad_norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        rate = self.schedule.get_last_lr()[0]
        self.schedule.step()
        means.add_to("loss", torch.zeros(()), float(total) / self.world_size)
        return {**means.over_ranks(), "grad_norm": grad_norm, "learning_rate": rate}

    @dispatch(to_all)
    def save_checkpoint(self, folder: Path, *, step: int) -> None:
        """Start to write this part of the checkpoint of the run's ``step`` to ``folder``; ``saved`` tells the end."""
        self.saver.start(folder, step, self.model, self.optimizer, self.schedule)

    @dispatch(to_all)
    def saved(self, wait: bool) -> list[Saved]:
        """The saves that ended since the last call; ``wait`` for one under way."""
        return self.saver.ended(wait=wait)

    @dispatch(to_all)
    def load_checkpoint(self, checkpoint: Path, *, part: str) -> None:
        """Take over weights, optimizer, schedule and random state of a checkpoint's part, of any number of ranks."""
        load(checkpoint, part, self.model, self.optimizer, self.schedule)

    def _meshes(self) -> Meshes:
        """Those of a worker in training in the same process, if there is one: process groups are not for nothing."""
        beside = [w.meshes for w in self.peers.values() if isinstance(w, TrainedWorker)]
        return beside[0] if beside else meshes_of(self.config, self.world_size)


def meshes_of(config: TrainConfig, ranks: int) -> Meshes:
    """The meshes that the config asks for, over the ranks of this process group."""
    t = config.rollout.tensor_parallel_size
    return make_meshes(
        "cuda" if torch.cuda.is_available() else "cpu",
        ranks=ranks,
        # With generation on ranks of its own, t need not divide these; then no order keeps anything in place.
        tensor_parallel_size=t if ranks // config.fsdp.replicas % t == 0 else 1,
        replicas=config.fsdp.replicas,
        sequence_parallel_size=config.fsdp.sequence_parallel,
    )


def forward_per_token(
    model: nn.Module,
    batch: PackedBatch,
    micro_batch_tokens: int,
    per_token: Callable[[nn.Module, PackedBatch], Tensor],
) -> Tensor:
    """What ``per_token`` gives, float32 [T], without gradient, in as many micro-batches on every rank."""
    model.eval()
    result = torch.zeros(len(batch.tokens))
    with torch.no_grad():
        for sequences in equal_count(batch, micro_batch_tokens):
            values = per_token(model, batch.select(sequences if len(sequences) else batch.units()[0]))
            if len(sequences):
                result[batch.token_index(sequences)] = values
    return result


def equal_count(batch: PackedBatch, tokens: int) -> list[Tensor]:
    """Micro-batches of ``tokens`` tokens at most, as many on every rank: each pass is a collective under FSDP.

    A rank that needs fewer makes smaller ones. Empty ones are added only where there are not enough sequences.
    """
    count = torch.tensor(len(batch.micro_batches(tokens)))
    torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX)
    micro_batches = batch.micro_batches(tokens, at_least=int(count))
    return micro_batches + [torch.empty(0, dtype=torch.int64)] * (int(count) - len(micro_batches))


class Means:
    """Means of what micro-batches log, over all of them and all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, values: dict[str, Tensor], response_mask: Tensor, *, counts: bool) -> None:
        """Take in tensors: of one of the mask's shape its response tokens, of another one all; or their names alone."""
        for name, value in values.items():
            taken = value.detach()
            taken = taken[response_mask] if taken.shape == response_mask.shape else taken.flatten()
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


def all_sum(value: Tensor) -> Tensor:
    """The sum over ranks."""
    torch.distributed.all_reduce(value)
    return value
