"""The policy in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train import algorithms
from train.batch import PackedBatch
from train.config import TrainConfig
from train.controller import Worker, by_tokens, dispatch, per_token, to_all
from train.fsdp import build, export, require_gradient_sync, token_log_probs


class ActorWorker(Worker):
    """One FSDP rank of the policy in training, with its optimizer."""

    def __init__(self, *, policy: Path, config: TrainConfig, **peers: Any) -> None:
        super().__init__(**peers)
        self.policy, self.config = policy, config
        self.algorithm = algorithms.load(config.algorithm)
        self.model = build(
            policy, dtype=getattr(torch, config.dtype), activation_checkpointing=config.activation_checkpointing
        )
        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=o.learning_rate, betas=o.betas, weight_decay=o.weight_decay
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / (o.warmup_steps + 1))
        )

    @dispatch(per_token)
    def log_probs(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: logprobs of the response tokens under the weights as they are."""
        return forward_log_probs(self.model, batch, self.config.micro_batch_tokens)

    @dispatch(by_tokens)
    def update(self, batch: PackedBatch) -> dict[str, float]:
        """One optimizer step on the batch; the loss is averaged over the response tokens of all ranks."""
        tokens = all_sum(batch.response_mask.sum().double())
        micro_batches = equal_count(batch.micro_batches(self.config.micro_batch_tokens))
        totals: dict[str, Tensor] = {}
        self.model.train()
        for i, sequences in enumerate(micro_batches):
            require_gradient_sync(self.model, i == len(micro_batches) - 1)
            micro = batch.select(sequences if len(sequences) else [0])
            mask = micro.response_mask * float(len(sequences) > 0)
            log_probs, entropy = token_log_probs(self.model, micro)
            loss, health = self.algorithm.loss(log_probs, micro)
            # FSDP averages gradients over ranks; the sum over all tokens is wanted.
            ((loss * mask).sum() / tokens * self.world_size).backward()
            for name, value in {"loss": loss.detach(), "entropy": entropy, **health}.items():
                totals[name] = totals.get(name, torch.zeros((), dtype=torch.float64)) + (value * mask).double().sum()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not torch.isfinite(torch.tensor(grad_norm)):
            raise FloatingPointError(f"the gradient norm is {grad_norm}; no update was made")
        self.optimizer.step()
        self.optimizer.zero_grad()
        rate = self.schedule.get_last_lr()[0]
        self.schedule.step()
        means = {name: float(all_sum(value) / tokens) for name, value in totals.items()}
        return {**means, "grad_norm": grad_norm, "learning_rate": rate}

    @dispatch(to_all)
    def export(self, folder: Path) -> None:
        """Write the weights to ``folder`` as a Hugging Face model."""
        export(self.model, self.policy, folder)


def forward_log_probs(model: torch.nn.Module, batch: PackedBatch, micro_batch_tokens: int) -> Tensor:
    """float32 [T], without gradient, in micro-batches that every rank has the same number of."""
    model.eval()
    result = torch.zeros(len(batch.tokens))
    starts = batch.cu_seqlens
    with torch.no_grad():
        for sequences in equal_count(batch.micro_batches(micro_batch_tokens)):
            log_probs, _ = token_log_probs(model, batch.select(sequences if len(sequences) else [0]))
            if len(sequences):  # consecutive, by construction
                result[int(starts[sequences[0]]) : int(starts[sequences[-1] + 1])] = log_probs
    return result


def equal_count(micro_batches: list[Tensor]) -> list[Tensor]:
    """Empty micro-batches added until every rank has the same number: each pass is a collective under FSDP."""
    count = torch.tensor(len(micro_batches))
    torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX)
    return micro_batches + [torch.empty(0, dtype=torch.int64)] * (int(count) - len(micro_batches))


def all_sum(value: Tensor) -> Tensor:
    """The sum over ranks."""
    torch.distributed.all_reduce(value)
    return value
