"""DPO: direct preference optimisation (arXiv 2305.18290), with IPO and cDPO as options.

Of two responses to a prompt people chose one. The policy is its own reward model: a response's implicit reward is
beta * log(pi / pi_ref), and its difference between the chosen and the rejected response is to be large, as the
Bradley-Terry model has it. The reference is the parent policy, frozen.

- ``preference_loss: sigmoid``: -log sigmoid(beta * h), h being the difference of the two log ratios (eq. 7).
- ``label_smoothing`` e > 0: each pair is the other way round with probability e (cDPO; E. Mitchell, "A note on DPO with
  noisy preferences & relationship to IPO", 2023, eq. 3).
- ``preference_loss: ipo``: (h - 1 / (2 beta))^2, beta being IPO's tau, which does not let h grow without end (arXiv
  2310.12036, eq. 17). h is of whole responses, as in the paper; TRL divides each log ratio by its response's tokens,
  so that its beta for the same gap is larger by about that number.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor
from torch.nn.functional import logsigmoid

from train.algorithms.base import Algorithm, Loss
from train.batch.packed import PackedBatch
from train.objectives.preferences import pairs


class DPO(Algorithm):
    dataset: ClassVar[Literal["pairs"] | None] = "pairs"
    needs_reference = True
    whole_groups = True

    def loss(self, log_probs: Tensor, batch: PackedBatch) -> Loss:
        assert batch.ref_log_probs is not None
        chosen, rejected = self.pairs(batch)
        log_ratio = batch.response_sums(log_probs - batch.ref_log_probs)
        h = log_ratio[chosen] - log_ratio[rejected]
        rewards = self.config.beta * log_ratio.detach()
        margin = rewards[chosen] - rewards[rejected]
        log_prob = batch.response_sums(log_probs.detach())
        return self.preference_loss(h).sum(), {
            "margin": margin,
            "accuracy": (margin > 0).float(),
            "reward_chosen": rewards[chosen],
            "reward_rejected": rewards[rejected],
            "logp_chosen": log_prob[chosen],
            "logp_rejected": log_prob[rejected],
        }

    def pairs(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """(chosen, rejected): int64 [P], sequences."""
        return pairs(batch)

    def preference_loss(self, h: Tensor) -> Tensor:
        """float [P], of how much more the chosen response's log ratio is than the rejected one's, float [P], nats."""
        beta, e = self.config.beta, self.config.label_smoothing
        if self.config.preference_loss == "ipo":
            return (h - 1 / (2 * beta)) ** 2
        return -(1 - e) * logsigmoid(beta * h) - e * logsigmoid(-beta * h)

    def count(self, batch: PackedBatch) -> float:
        return len(batch) / 2
