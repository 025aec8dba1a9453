"""A reward model by Bradley and Terry (1952), as InstructGPT trains it (arXiv 2203.02155, eq. 1).

Of two responses to a prompt people chose one. The reward model gives each a score r, and the probability that the first
is chosen is sigmoid(r_chosen - r_rejected); its negative log likelihood is the loss. Scores have no zero of their own:
only differences at one prompt mean something. With ``label_smoothing`` e, each pair is the other way round with
probability e.

Nothing is sampled and no policy is trained: what is trained is the policy's body with a head of one output.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from train.algorithms.base import Algorithm, Loss
from train.batch.packed import PackedBatch
from train.objectives.preferences import pairs


class RewardModel(Algorithm):
    dataset = "pairs"
    whole_groups = True

    def loss(self, scores: Tensor, batch: PackedBatch) -> Loss:
        """scores: float32 [T]; that of a sequence stands at its last token."""
        chosen, rejected = pairs(batch)
        r = scores[batch.cu_seqlens[1:] - 1]
        margin = r[chosen] - r[rejected]
        e = self.config.label_smoothing
        loss = -(1 - e) * logsigmoid(margin) - e * logsigmoid(-margin)
        return loss.sum(), {
            "margin": margin,
            "accuracy": (margin.sign() + 1) / 2,  # equal scores are a guess
            "reward_chosen": r[chosen],
            "reward_rejected": r[rejected],
        }

    def count(self, batch: PackedBatch) -> float:
        return len(batch) / 2
