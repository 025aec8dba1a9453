"""RLOO: REINFORCE leave-one-out (arXiv 2402.14740).

A response is one action: its reward, less its KL if there is any, weighs the log-probability of the whole of it, the
sum over its tokens. Of several responses to a prompt, the mean reward of the others is the baseline of each: unbiased,
and without a critic. There is no clip.
"""

from __future__ import annotations

from torch import Tensor

from train.algorithms.base import PolicyGradient
from train.batch.packed import PackedBatch
from train.objectives.advantages import leave_one_out
from train.objectives.losses import reinforce


class RLOO(PolicyGradient):
    compares_groups = True
    clips = False

    def advantages(self, batch: PackedBatch) -> Tensor:
        return self.compared(batch, leave_one_out)

    def surrogate(self, ratio: Tensor, log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        return reinforce(ratio, log_probs, advantages)
