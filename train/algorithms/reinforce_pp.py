"""REINFORCE++, and REINFORCE++ with baseline (arXiv 2501.03262).

A token's advantage is the reward from it to the response's end (all of it at the last token, unless a process reward
gives it to tokens or steps) less the KL of those tokens (k1), discounted by gamma per token (1 by default), normalised
over the whole batch, not within a prompt's group. It weighs the token in PPO's clipped objective. One response per
prompt will do.

With baseline, several responses to a prompt are sampled and their mean reward is taken from each, then all is
normalised over the batch; the KL is in the loss (k2).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from train.algorithms.base import PolicyGradient
from train.batch.packed import PackedBatch
from train.objectives.advantages import group_relative, returns_to_go, whiten


class ReinforcePlusPlus(PolicyGradient):
    takes_token_rewards = True

    def advantages(self, batch: PackedBatch) -> Tensor:
        returns = returns_to_go(self.token_rewards(batch), batch, self.config.gamma)
        return whiten(returns, batch.response_mask)


class ReinforcePlusPlusBaseline(PolicyGradient):
    compares_groups = True

    def advantages(self, batch: PackedBatch) -> Tensor:
        centred = self.compared(batch, partial(group_relative, normalise_by_std=False))
        return whiten(centred, batch.response_mask)
