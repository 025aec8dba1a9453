"""GRPO: group relative policy optimisation (arXiv 2402.03300).

Several responses to one prompt are sampled and scored. Each is as good as it is better than its group's mean, in
standard deviations of the group; that number weighs all its tokens in PPO's clipped objective. No critic. The loss is
the mean over responses of the mean over a response's tokens, and the KL to the reference is a part of it, by k3.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from train.algorithms.base import PolicyGradient
from train.batch.packed import PackedBatch
from train.objectives.advantages import group_relative


class GRPO(PolicyGradient):
    compares_groups = True

    def advantages(self, batch: PackedBatch) -> Tensor:
        return self.compared(batch, partial(group_relative, normalise_by_std=True))
