"""CISPO: clipped importance sampling weight policy optimisation (MiniMax-M1, arXiv 2506.13585).

PPO's clip takes tokens out of the loss, most of all the rare ones where reasoning turns. Here the importance sampling
weight is clipped, not the token's update: it weighs REINFORCE's log-probability without being differentiated itself, so
that every token always has a gradient. There is no lower bound (``clip_low`` 1); advantages are GRPO's, and all tokens
count alike.
"""

from __future__ import annotations

from torch import Tensor

from train.algorithms.grpo import GRPO
from train.objectives.losses import clipped_weight


class CISPO(GRPO):
    def surrogate(self, ratio: Tensor, log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        return clipped_weight(ratio, log_probs, advantages, clip_low=c.clip_low, clip_high=c.clip_high)
