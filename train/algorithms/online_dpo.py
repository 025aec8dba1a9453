"""Online DPO: DPO on pairs of the policy's own fresh responses (OAIF, arXiv 2402.04792), ranked by the reward.

Of the responses to a prompt the one with the highest reward is preferred to the one with the lowest; where several
have it, the first. Groups of equal rewards make no pair and are left out. The loss is DPO's, with all its options.
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.algorithms.offline.dpo import DPO
from train.batch.packed import PackedBatch


class OnlineDPO(DPO):
    dataset = None
    compares_groups = True
    clips = False

    def advantages(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: 1 for the best response of its group, -1 for the worst, 0 for those between."""
        sign = torch.zeros(len(batch))
        for group in batch.groups.unique():
            of = (batch.groups == group).nonzero().flatten()
            rewards = batch.rewards[of]
            if rewards.max() > rewards.min():
                sign[of[rewards.argmax()]], sign[of[rewards.argmin()]] = 1.0, -1.0
        return batch.per_token(sign)

    def pairs(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Those of the groups of which both responses are in the batch."""
        assert batch.advantages is not None
        sign = batch.advantages[batch.cu_seqlens[1:] - 1]
        better, worse = (sign > 0).nonzero().flatten(), (sign < 0).nonzero().flatten()
        chosen = better[torch.isin(batch.groups[better], batch.groups[worse])]
        rejected = worse[torch.isin(batch.groups[worse], batch.groups[better])]
        return chosen[batch.groups[chosen].argsort()], rejected[batch.groups[rejected].argsort()]

    def count(self, batch: PackedBatch) -> float:
        return float(len(self.pairs(batch)[0]))
