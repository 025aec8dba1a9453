"""The policy in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train import algorithms
from train.batch import PackedBatch
from train.checkpoint import Saved, Saver, load
from train.config import TrainConfig
from train.controller import Worker, answer_and_per_token, by_tokens, dispatch, per_token, to_all
from train.fsdp import build, export, require_gradient_sync, token_log_probs
from train.lora import export_adapter
from train.mesh import Meshes, make_meshes


class ActorWorker(Worker):
    """One FSDP rank of the policy in training, with its optimizer."""

    def __init__(self, *, policy: Path, config: TrainConfig, **peers: Any) -> None:
        super().__init__(**peers)
        self.policy, self.config = policy, config
        self.algorithm = algorithms.load(config.algorithm)
        self.meshes = meshes_of(config, self.world_size)
        self.model = build(
            policy,
            dtype=getattr(torch, config.dtype),
            meshes=self.meshes,
            options=config.fsdp,
            activation_checkpointing=config.activation_checkpointing,
            lora=config.lora,
        )
        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=o.learning_rate,
            betas=o.betas,
            weight_decay=o.weight_decay,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / (o.warmup_steps + 1))
        )
        self.saver = Saver(config.step_timeout_s)

    @dispatch(per_token)
    def log_probs(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: logprobs of the response tokens under the weights as they are."""
        return forward_log_probs(self.model, batch, self.config.micro_batch_tokens)

    @dispatch(by_tokens)
    def update(self, batch: PackedBatch, *, kl_coefficient: float | None = None) -> dict[str, float]:
        """One optimizer step on the batch, with the algorithm's loss over all ranks.

        Args:
            kl_coefficient: the adapted one; the config's if None.
        """
        return self.learn(batch, kl_coefficient=kl_coefficient)[0]

    @dispatch(answer_and_per_token)
    def learn(self, batch: PackedBatch, *, kl_coefficient: float | None = None) -> tuple[dict[str, float], Tensor]:
        """``update``, and what ``log_probs`` would have given before it, at no cost: float32 [T]."""
        if kl_coefficient is not None:
            self.algorithm.kl_coefficient = kl_coefficient
        before = torch.zeros(len(batch.tokens))
        count = all_sum(torch.tensor(self.algorithm.count(batch), dtype=torch.float64))
        micro_batches = equal_count(batch, self.config.micro_batch_tokens)
        means = Means()
        self.model.train()
        for i, sequences in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            require_gradient_sync(self.model, last or self.config.fsdp.reduce_every_micro_batch)
            micro = batch.select(sequences if len(sequences) else batch.units()[0])
            log_probs, entropy = token_log_probs(self.model, micro)
            loss, health = self.algorithm.loss(log_probs, micro)
            if len(sequences):
                before[batch.token_index(sequences)] = log_probs.detach()
            means.add({"entropy": entropy, **health}, micro.response_mask, counts=len(sequences) > 0)
            means.add_to("loss", loss.detach() * float(len(sequences) > 0), 0.0)
            # FSDP averages gradients over ranks; the sum over all of them is wanted.
            (loss * float(len(sequences) > 0) / count * self.world_size).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not torch.isfinite(torch.tensor(grad_norm)):
            raise FloatingPointError(f"the gradient norm is {grad_norm}; no update was made")
        self.optimizer.step()
        self.optimizer.zero_grad()
        rate = self.schedule.get_last_lr()[0]
        self.schedule.step()
        means.add_to("loss", torch.zeros(()), float(count) / self.world_size)
        return {**means.over_ranks(), "grad_norm": grad_norm, "learning_rate": rate}, before

    @dispatch(to_all)
    def save_checkpoint(self, driver: str, *, folder: Path, step: int) -> None:
        """Start a checkpoint of the run's ``step``; ``driver`` is JSON kept beside it. ``saved`` tells how it ended."""
        keep = self.config.checkpoint.keep
        self.saver.start(folder, step, self.model, self.optimizer, self.schedule, driver, keep=keep)

    @dispatch(to_all)
    def saved(self, wait: bool) -> list[Saved]:
        """The checkpoints that were finished or failed since the last call; ``wait`` for one under way."""
        return self.saver.ended(wait=wait)

    @dispatch(to_all)
    def load_checkpoint(self, checkpoint: Path) -> None:
        """Take over weights, optimizer, schedule and random state of a checkpoint, of any number of ranks."""
        load(checkpoint, self.model, self.optimizer, self.schedule)

    @dispatch(to_all)
    def export(self, folder: Path) -> None:
        """Write the weights to ``folder`` as a Hugging Face model, and beside it, if asked, the ``adapter``."""
        export(self.model, self.policy, folder)
        if self.config.lora is not None and self.config.lora.publish_adapter:
            export_adapter(self.model, self.config.lora, self.policy, folder.with_name("adapter"))


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


def forward_log_probs(model: torch.nn.Module, batch: PackedBatch, micro_batch_tokens: int) -> Tensor:
    """float32 [T], without gradient, in micro-batches that every rank has the same number of."""
    model.eval()
    result = torch.zeros(len(batch.tokens))
    with torch.no_grad():
        for sequences in equal_count(batch, micro_batch_tokens):
            log_probs, _ = token_log_probs(model, batch.select(sequences if len(sequences) else batch.units()[0]))
            if len(sequences):
                result[batch.token_index(sequences)] = log_probs
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
        """The means; every rank must call it, and must have added to the same names."""
        total = all_sum(torch.stack(list(self._sums.values())))
        return {name: float(s / n) if n else 0.0 for name, (s, n) in zip(self._sums, total, strict=True)}


def all_sum(value: Tensor) -> Tensor:
    """The sum over ranks."""
    torch.distributed.all_reduce(value)
    return value
