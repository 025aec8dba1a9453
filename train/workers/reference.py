"""The policy that training started from, frozen: what KL is measured to."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train.batch.packed import PackedBatch
from train.config.training import TrainConfig
from train.controller.dispatch import dispatch, per_token
from train.host_memory.parking_worker import ParkingWorker
from train.model.fsdp import build
from train.model.lora import adapters_off
from train.own_model.model_class import maker
from train.workers.actor import ActorWorker, forward_log_probs
from train.workers.model_worker import meshes_of


class ReferenceWorker(ParkingWorker):
    """One FSDP rank of the frozen parent policy."""

    def __init__(self, *, policy: Path, config: TrainConfig, **peers: Any) -> None:
        super().__init__(**peers)
        self.config = config
        actor = self.peers.get("actor")
        self.shared = False
        if isinstance(actor, ActorWorker) and config.lora is not None and actor.policy == policy:
            # A LoRA run has its parent already: the actor with its adapters off.
            self.shared, self.model = True, actor.model
        else:
            self.meshes = meshes_of(config, self.peers)
            self.model = build(
                policy,
                dtype=getattr(torch, config.dtype),
                meshes=self.meshes,
                options=config.fsdp,
                fp8=config.fp8,
                frozen=True,
                make=maker(config.model),
            )

    def rest(self) -> None:
        vars(self).pop("model", None)
        super().rest()

    def weight_tensors(self) -> Iterable[Tensor]:
        return () if self.shared else self.model.parameters()

    def before_call(self, method: str) -> None:
        super().before_call(method)
        if self.shared:
            self.peers["actor"].before_call(method)

    @dispatch(per_token)
    def log_probs(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: logprobs of the response tokens under the parent policy."""
        with adapters_off(self.model) if self.shared else nullcontext():
            return forward_log_probs(self.model, batch, self.config.micro_batch_tokens)
