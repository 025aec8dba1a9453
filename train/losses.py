"""Policy losses: pure functions over packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective (arXiv 1707.06347, eq. 7), negated, with DAPO's two bounds (arXiv 2503.14476, eq. 10).

    Args:
        log_probs, old_log_probs, advantages: float [T]; gradients flow through the first alone.

    Returns:
        (loss, clipped): float [T], and bool [T], true where the clip stopped the gradient.
    """
    ratio = (log_probs - old_log_probs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped
