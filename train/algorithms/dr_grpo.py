"""Dr.GRPO: GRPO done right (arXiv 2503.20783).

GRPO without its two biases. Dividing by the group's standard deviation gives more weight to prompts that are nearly
always, or hardly ever, answered well; so the advantage is the difference to the group's mean. Dividing by the
response's own length makes wrong answers long; so each response counts by the sum over its tokens, over one length for
all (aggregation constant_length).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from train.algorithms.base import PolicyGradient
from train.batch.packed import PackedBatch
from train.objectives.advantages import group_relative


class DrGRPO(PolicyGradient):
    compares_groups = True

    def advantages(self, batch: PackedBatch) -> Tensor:
        return self.compared(batch, partial(group_relative, normalise_by_std=False))
