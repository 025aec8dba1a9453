"""ReMax (arXiv 2310.10505).

REINFORCE whose baseline is the reward of the greedy response to the same prompt: one more response per prompt, and no
critic. The log-probability of a response is the sum over its tokens.
"""

from __future__ import annotations

from torch import Tensor

from train.algorithms.base import PolicyGradient
from train.batch.packed import PackedBatch
from train.objectives.advantages import greedy_baseline
from train.objectives.losses import reinforce


class ReMax(PolicyGradient):
    needs_greedy = True
    clips = False

    def advantages(self, batch: PackedBatch) -> Tensor:
        return batch.per_token(greedy_baseline(self.rewards(batch), batch.baselines))

    def surrogate(self, ratio: Tensor, log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        return reinforce(ratio, log_probs, advantages)
