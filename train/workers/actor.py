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
    def update(self, batch: PackedBatch) -> dict[str, float]:
        """One optimizer step on the batch; the loss is averaged over the response tokens of all ranks."""
        return self.learn(batch)[0]

    @dispatch(answer_and_per_token)
    def learn(self, batch: PackedBatch) -> tuple[dict[str, float], Tensor]:
        """``update``, and what ``log_probs`` would have given before it, at no cost: float32 [T]."""
        before = torch.zeros(len(batch.tokens))
        tokens = all_sum(batch.response_mask.sum().double())
        micro_batches = equal_count(batch, self.config.micro_batch_tokens)
        totals: dict[str, Tensor] = {}
        self.model.train()
        for i, sequences in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            require_gradient_sync(self.model, last or self.config.fsdp.reduce_every_micro_batch)
            micro = batch.select(sequences if len(sequences) else [0])
            mask = micro.response_mask * float(len(sequences) > 0)
            log_probs, entropy = token_log_probs(self.model, micro)
            if len(sequences):
                before[batch.token_index(sequences)] = log_probs.detach()
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
        return {**means, "grad_norm": grad_norm, "learning_rate": rate}, before

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
            log_probs, _ = token_log_probs(model, batch.select(sequences if len(sequences) else [0]))
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


def all_sum(value: Tensor) -> Tensor:
    """The sum over ranks."""
    torch.distributed.all_reduce(value)
    return value
