"""The policy that training started from, frozen: what KL is measured to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train.batch import PackedBatch
from train.config import TrainConfig
from train.controller import Worker, dispatch, per_token
from train.fsdp import build
from train.workers.actor import forward_log_probs


class ReferenceWorker(Worker):
    """One FSDP rank of the frozen parent policy."""

    def __init__(self, *, policy: Path, config: TrainConfig, **peers: Any) -> None:
        super().__init__(**peers)
        self.config = config
        self.model = build(policy, dtype=getattr(torch, config.dtype)).requires_grad_(False)

    @dispatch(per_token)
    def log_probs(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: logprobs of the response tokens under the parent policy."""
        return forward_log_probs(self.model, batch, self.config.micro_batch_tokens)
