"""The reward model in training: one score for each sequence."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from serve.policies.folder import WrittenFile
from train.algorithms.base import Loss
from train.batch.packed import PackedBatch
from train.controller.dispatch import answer_and_per_token, dispatch, per_token, to_all
from train.export.model_folder import export
from train.model.scalar_head import UNSTORED, build_with_scalar_head, sequence_scores
from train.own_model.separation import require_apart, scalar_outputs
from train.workers.model_worker import TrainedWorker, forward_per_token


class ScorerWorker(TrainedWorker):
    """One FSDP rank of the reward model in training: the policy's body with a head of one output."""

    def build(self) -> nn.Module:
        model = build_with_scalar_head(self.policy, **self.build_options)
        require_apart(model, self.build_options["dtype"], scalar_outputs)
        return model

    @dispatch(per_token)
    def scores(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: the score of each sequence, at its last token; 0 elsewhere."""
        return forward_per_token(self.model, batch, self.config.micro_batch_tokens, scores_at_the_end)

    @dispatch(answer_and_per_token)
    def learn(self, batch: PackedBatch) -> tuple[dict[str, float], Tensor]:
        """One optimizer step on the batch, with the algorithm's loss over all ranks; and ``scores`` before it."""

        def loss_of(micro: PackedBatch) -> tuple[Loss, Tensor]:
            scores = scores_at_the_end(self.model, micro)
            return self.algorithm.loss(scores, micro), scores

        return self.take_step(batch, loss_of, self.algorithm.count(batch))

    @dispatch(to_all)
    def export(self, folder: Path) -> dict[str, WrittenFile]:
        """Write the weights to ``folder`` as transformers' sequence-classification model with one label; the answer is
        of ``train.export.model_folder.export``."""
        return export(self.model, self.policy, folder, unstored=UNSTORED)


def scores_at_the_end(model: nn.Module, batch: PackedBatch) -> Tensor:
    """float32 [T], with gradient; 0 before the last token of each sequence."""
    at = (batch.cu_seqlens[1:] - 1,)
    return torch.zeros(len(batch.tokens)).index_put(at, sequence_scores(model, batch))
