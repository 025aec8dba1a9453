"""SFT: supervised fine-tuning on demonstrations (arXiv 2203.02155, section 3.5, step 1).

What people wrote in place of a response is learned as if the policy had sampled it: maximum likelihood, the mean over
the demonstrations' tokens of -log pi(token). Nothing is learned of the prompts.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from train.algorithms.base import Algorithm, Loss
from train.batch.packed import PackedBatch


class SFT(Algorithm):
    dataset: ClassVar[Literal["demonstrations"] | None] = "demonstrations"

    def loss(self, log_probs: Tensor, batch: PackedBatch) -> Loss:
        return -(log_probs * batch.response_mask).sum(), {"logp": log_probs}
