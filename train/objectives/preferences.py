"""Pairs of a better and a worse response: what algorithms that learn from them share. Pure functions of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from train.batch.packed import PackedBatch


def pairs(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """(chosen, rejected) of each pair, which is a group of two, of rewards 1 and 0: int64 [P], sequences by group.

    Raises:
        ValueError: a group is not such a pair.
    """
    by_group = batch.groups.argsort(stable=True)
    better = batch.rewards[by_group] > 0.5
    chosen, rejected = by_group[better], by_group[~better]
    groups = batch.groups.unique()
    if not (torch.equal(batch.groups[chosen], groups) and torch.equal(batch.groups[rejected], groups)):
        raise ValueError(
            f"{len(batch)} sequences in {len(groups)} groups are not pairs: each group needs one response of reward 1 "
            "and one of reward 0, in the same micro-batch"
        )
    return chosen, rejected
