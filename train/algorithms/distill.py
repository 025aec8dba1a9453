"""On-policy distillation: the policy samples, and a larger one says of each token how likely it found it.

A token's advantage is the logprob that the teacher gives it, less the policy's own when it was sampled: a sample of the
reverse KL to the teacher, turned round, for that token alone (the discount is 0). It weighs the token in PPO's clipped
objective. Agarwal et al., arXiv 2306.13649, has the reverse KL over whole distributions; an API tells the sampled
tokens' logprobs, and their mean is the same.
"""

from __future__ import annotations

from torch import Tensor

from train.algorithms.base import Loss, PolicyGradient
from train.batch.packed import PackedBatch


class Distill(PolicyGradient):
    takes_token_rewards = True

    def advantages(self, batch: PackedBatch) -> Tensor:
        return -self._reverse_kl(batch)

    def loss(self, log_probs: Tensor, batch: PackedBatch) -> Loss:
        loss, logged = super().loss(log_probs, batch)
        return loss, logged | {"reverse_kl": self._reverse_kl(batch)}

    def _reverse_kl(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: nats, of each sampled token."""
        return (batch.behaviour_log_probs - self.token_rewards(batch)) * batch.response_mask
