"""Policy losses: pure functions over packed tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from train.batch import PackedBatch


def token_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """pi / pi_old of each token. Both float [T], nats → float [T]."""
    return (log_probs - old_log_probs).exp()


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective (arXiv 1707.06347, eq. 7), negated, with DAPO's two bounds (arXiv 2503.14476, eq. 10).

    Args:
        ratio, advantages: float [T]; gradients flow through the first alone.

    Returns:
        (loss, clipped): float [T], and bool [T], true where the clip stopped the gradient.
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def token_mean(batch: PackedBatch) -> tuple[Tensor, float]:
    """Every response token of the batch counts alike: (weights float32 [T], the number of tokens)."""
    mask = batch.response_mask
    return mask.float(), float(mask.sum())


def sequence_mean(batch: PackedBatch) -> tuple[Tensor, float]:
    """Every response counts alike, and so does each of its tokens: (weights float32 [T], the number of responses)."""
    each = 1.0 / (batch.lengths - batch.prompt_lengths)
    return batch.response_mask * batch.per_token(each), float(len(batch))


AGGREGATIONS: dict[str, Callable[[PackedBatch], tuple[Tensor, float]]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
}
"""By name: (weight of each token's loss, 0 at prompts; this batch's share of what the sum is divided by)."""
