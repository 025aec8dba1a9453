"""GRPO: group relative policy optimisation (arXiv 2402.03300).

Several responses to one prompt are sampled and scored. Each is as good as it is better than its group's mean; that
number weighs all its tokens in PPO's clipped objective. No critic. The loss is averaged over the tokens of the whole
batch, and each token is weighed by a truncated importance ratio, since the engine that sampled it and the trainer
don't compute quite the same probabilities.
"""

from __future__ import annotations

from torch import Tensor

from train.advantages import group_relative
from train.batch import PackedBatch
from train.config import AlgorithmConfig
from train.corrections import truncated_importance
from train.kl import ESTIMATORS
from train.losses import clipped_surrogate


class GRPO:
    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    def advantages(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: each response's advantage at each of its tokens."""
        c = self.config
        return batch.per_token(group_relative(batch.rewards, batch.groups, normalise_by_std=c.normalise_by_std))

    def loss(self, log_probs: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token, float32 [T], and what to log of it, each [T].

        Args:
            log_probs: float32 [T], of the policy in training, with gradient.
            batch: with advantages; with old logprobs, unless they are those of ``log_probs``; with reference logprobs,
                if there is a KL coefficient.
        """
        c = self.config
        assert batch.advantages is not None
        old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        surrogate, clipped = clipped_surrogate(
            log_probs, old, batch.advantages, clip_low=c.clip_low, clip_high=c.clip_high
        )
        weight = truncated_importance(old, batch.behaviour_log_probs, cap=c.importance_cap)
        loss = weight * surrogate
        if c.kl_coefficient:
            assert batch.ref_log_probs is not None
            loss = loss + c.kl_coefficient * ESTIMATORS[c.kl_estimator](log_probs, batch.ref_log_probs)
        return loss, {"clip_fraction": clipped.float(), "importance_weight": weight}
