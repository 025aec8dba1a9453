"""KTO: Kahneman-Tversky optimisation (arXiv 2402.01306, eq. 8), which needs no pairs, only thumbs.

A response is worth r = log(pi / pi_ref), and how good that is depends on a point of reference: z0, the policy's KL to
its parent. People value gains over it, and mind losses, less and less the larger they are: lambda_D sigmoid(beta (r -
z0)) is the value of a desirable response, lambda_U sigmoid(beta (z0 - r)) of an undesirable one; the loss is what it
lacks of lambda. z0 is the mean of r over responses to other prompts than their own, 0 at least, and without gradient
(section 4.1): the dataflow gives it, one number for all of an update, over all ranks.

lambda_D is ``desirable_weight``, lambda_U ``undesirable_weight``. With n_D thumbs up and n_U down, they are to be such
that lambda_D n_D / (lambda_U n_U) is between 1 and 3/2, one of them being 1 (eq. 9); unset, they are. With many more
thumbs down and equal weights, a policy unlearns what it is told off for and finds nothing better.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from train.algorithms.base import Algorithm, Loss
from train.batch.packed import PackedBatch
from train.config.algorithms import AlgorithmConfig


class KTO(Algorithm):
    dataset = "thumbs"
    needs_reference = True
    needs_mismatched = True

    def loss(self, log_probs: Tensor, batch: PackedBatch) -> Loss:
        beta, lambda_d = self.config.beta, self.config.desirable_weight or 1.0
        lambda_u = self.config.undesirable_weight or 1.0
        assert batch.ref_log_probs is not None
        r = batch.response_sums(log_probs - batch.ref_log_probs)
        z0 = batch.baselines
        desirable = batch.rewards > 0.5
        loss = torch.where(
            desirable,
            lambda_d * (1 - (beta * (r - z0)).sigmoid()),
            lambda_u * (1 - (beta * (z0 - r)).sigmoid()),
        )
        rewards, log_prob = beta * r.detach(), batch.response_sums(log_probs.detach())
        return loss.sum(), {
            "reward_desirable": rewards[desirable],
            "reward_undesirable": rewards[~desirable],
            "logp_desirable": log_prob[desirable],
            "logp_undesirable": log_prob[~desirable],
            "z0": z0,
        }

    def count(self, batch: PackedBatch) -> float:
        return float(len(batch))

    def settled(self, rewards: Sequence[float]) -> AlgorithmConfig:
        c, desirable = self.config, sum(rewards)
        undesirable = len(rewards) - desirable
        if c.desirable_weight is not None or c.undesirable_weight is not None or not desirable or not undesirable:
            return c
        up, down = max(1.0, undesirable / desirable), max(1.0, desirable / undesirable / 1.5)
        return c.model_copy(update={"desirable_weight": up, "undesirable_weight": down})
