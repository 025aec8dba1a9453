"""PPO: proximal policy optimisation (arXiv 1707.06347), with generalised advantage estimation (arXiv 1506.02438).

A critic predicts the value of the state before each token. A token's advantage is how much better things went
than the critic expected, by GAE with gamma and lambda, whitened over the batch; it weighs the token in PPO's clipped
objective. The critic learns the return, which is the advantage, before whitening, plus the value. The reward comes with
the last token, or with the tokens or steps that a process reward gives it to; with ``kl.placement: reward``, and k1 as
estimator, each token's reward is less by its KL to the parent, as in InstructGPT (arXiv 2203.02155, eq. 2). The paper's
K epochs over minibatches are ``train.epochs`` and ``train.minibatches``.
"""

from __future__ import annotations

from torch import Tensor

from train.algorithms.base import PolicyGradient
from train.batch.packed import PackedBatch
from train.objectives.advantages import gae, whiten


class PPO(PolicyGradient):
    needs_critic = True
    takes_token_rewards = True

    def advantages(self, batch: PackedBatch) -> Tensor:
        return whiten(self._gae(batch), batch.response_mask)

    def returns(self, batch: PackedBatch) -> Tensor:
        assert batch.values is not None
        return self._gae(batch) + batch.values

    def _gae(self, batch: PackedBatch) -> Tensor:
        assert batch.values is not None
        critic = self.config.critic
        return gae(self.token_rewards(batch), batch.values, batch, critic.gamma, critic.lam)
