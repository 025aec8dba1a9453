"""Advantage estimators: pure functions of rewards."""

from __future__ import annotations

import torch
from torch import Tensor


def group_relative(rewards: Tensor, groups: Tensor, *, normalise_by_std: bool) -> Tensor:
    """How much better each response is than its group's mean (GRPO, arXiv 2402.03300, eq. 4.1.3).

    Args:
        rewards: float [S].
        groups: int [S]; responses to one prompt share a number.
        normalise_by_std: divide by the group's standard deviation (unbiased). Without it: Dr.GRPO, arXiv 2503.20783.

    Returns:
        float [S]. Zero for a group whose rewards are all equal, the group of one included.
    """
    _, index = groups.unique(return_inverse=True)
    size = torch.zeros(int(index.max()) + 1).index_add_(0, index, torch.ones_like(rewards))
    mean = torch.zeros_like(size).index_add_(0, index, rewards) / size
    centred = rewards - mean[index]
    if not normalise_by_std:
        return centred
    variance = torch.zeros_like(size).index_add_(0, index, centred**2) / (size - 1).clamp(min=1)
    return centred / (variance.sqrt()[index] + 1e-6)


def uninformative(rewards: Tensor, groups: Tensor) -> Tensor:
    """bool [S]: the response is in a group whose rewards are all equal, so that it teaches nothing."""
    _, index = groups.unique(return_inverse=True)
    highest = torch.full((int(index.max()) + 1,), -torch.inf).scatter_reduce_(0, index, rewards, "amax")
    lowest = torch.full_like(highest, torch.inf).scatter_reduce_(0, index, rewards, "amin")
    return (highest == lowest)[index]
