"""GSPO: group sequence policy optimisation (arXiv 2507.18071).

A reward is of a whole response, and so is what is clipped: the response's likelihood ratio, to the power of one over
its length. Either all tokens of a response have a gradient, or none. The bounds of such a mean are narrow (3e-4 and
4e-4). The advantages are GRPO's.
"""

from __future__ import annotations

from torch import Tensor

from train.algorithms.grpo import GRPO
from train.batch.packed import PackedBatch
from train.objectives.losses import sequence_ratio_of_tokens


class GSPO(GRPO):
    def ratio(self, log_probs: Tensor, old_log_probs: Tensor, batch: PackedBatch) -> Tensor:
        return sequence_ratio_of_tokens(log_probs, old_log_probs, batch)
