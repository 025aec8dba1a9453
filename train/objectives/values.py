"""What a critic learns: pure functions over packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """Half the squared error of each value; with a clip, the larger one of the value's and the clipped value's.

    The clipped value is not further than ``clip`` from the one before the update, so that what moved further in the
    right direction is not moved on: the value function's counterpart of PPO's clip (arXiv 2005.12729, section 3; it is
    in PPO's published code, not in its paper). arXiv 2006.05990 found that it may also harm.

    Returns:
        (loss, clipped): float32 [T], and bool [T], true where the clip stopped the gradient.
    """
    loss = 0.5 * (values - returns) ** 2
    if clip is None:
        return loss, torch.zeros_like(loss, dtype=torch.bool)
    moved = (values - old_values).clamp(-clip, clip)
    clipped = 0.5 * (old_values + moved - returns) ** 2
    return torch.maximum(loss, clipped), clipped > loss


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 one that predicts the same value everywhere.

    Of the response tokens of a whole batch, [N]; 0 where all returns are equal, since there is nothing to explain.
    """
    variance = returns.double().var(correction=0)
    if variance == 0:
        return 0.0
    return float(1 - (returns - values).double().var(correction=0) / variance)
