"""Best of n: SFT on the best of the policy's own fresh responses to each prompt (RAFT, arXiv 2304.06767, algorithm 1).

Where several have the highest reward, the first is learned. Groups of equal rewards have no best one and are left out,
unless ``train.algorithm.filter_groups`` is false, as RAFT has it; with ``min_reward`` so is a best one that is worse.
What is measured of a batch, the KL to the parent too, is of the responses that are learned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.algorithms.offline.sft import SFT
from train.batch.packed import PackedBatch, Rollout


class BestOfN(SFT):
    dataset = None
    compares_groups = True
    clips = False

    def kept(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The first of the best of each group, in the groups' order."""
        best: dict[int, Rollout] = {}
        for rollout in rollouts:
            if rollout.group not in best or rollout.reward > best[rollout.group].reward:
                best[rollout.group] = rollout
        least = self.config.min_reward
        return [rollout for rollout in best.values() if least is None or rollout.reward >= least]

    def advantages(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: 1, of what is learned."""
        return batch.per_token(torch.ones(len(batch)))
