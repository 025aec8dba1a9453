"""Off-policy corrections: weights for tokens that another policy, or another engine, sampled.

``old`` is the policy at the start of the step, ``behaviour`` the one that sampled. A loss that is clipped around old
and weighed by old / behaviour is PPO's with three policies, the decoupled one (arXiv 2110.00641).
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.batch.packed import PackedBatch
from train.config.algorithms import CorrectionConfig

Weights = tuple[Tensor, dict[str, Tensor]]
"""(float [T], without gradient; what to log of them)."""


def importance_weights(old_log_probs: Tensor, batch: PackedBatch, config: CorrectionConfig) -> Weights:
    """The weight of each token's loss, a KL in it included: the ratio of old to behaviour, bounded by the config.

    - truncate: min(ratio, cap) (truncated importance sampling; E. Ionides, 2008).
    - mask: the ratio where it is within floor and cap, else 0 (masked importance sampling).
    - none, or a clip centred on the behaviour policy: 1.

    A ratio is of the token, or, at level sequence, the product over the response: a reward is of whole responses, so
    that is what makes it another policy's. At level auto it is of the token where this run has sampled, whose policies
    hardly differ and where long products are all noise, and the product for logged responses. Besides, a response whose
    geometric mean ratio is not within ``geometric_low`` and ``geometric_high`` has weight 0 (geometric-mean rejection).
    What has weight 0 still counts where a loss is averaged. Of equal policies every weight is exactly 1.

    Args:
        old_log_probs: float [T], nats, the trainer's.
        batch: with ``behaviour_log_probs``.

    Returns:
        (weights, health): float [T], and over response tokens: ``importance_weight``; ``capped_fraction``;
        ``masked_fraction``; ``effective_sample_size``, (Σ w)² / (n Σ w²), from 1 / n to 1, of this micro-batch, so that
        what is logged is the mean over micro-batches.
    """
    mask = batch.response_mask
    log_ratio = (old_log_probs.detach() - batch.behaviour_log_probs) * mask
    by_response = batch.response_sums(log_ratio)
    whole = (
        batch.per_token(~batch.fresh) if config.level == "auto" else torch.full_like(mask, config.level == "sequence")
    )
    ratio = torch.where(whole, batch.per_token(by_response), log_ratio).exp()
    above, below = ratio > config.cap, ratio < config.floor
    nowhere = torch.zeros_like(mask)
    if config.form == "none" or config.proximal == "behaviour":
        weights, capped, masked = torch.ones_like(ratio), nowhere, nowhere
    elif config.form == "truncate":
        weights, capped, masked = ratio.clamp(max=config.cap), above, nowhere
    else:
        weights, capped, masked = ratio, nowhere, above | below
    masked = masked | batch.per_token(_rejected((by_response / batch.response_lengths).exp(), config))
    weights = weights.masked_fill(masked, 0.0)
    return weights, {
        "importance_weight": weights,
        "capped_fraction": (capped & ~masked).float(),
        "masked_fraction": masked.float(),
        "effective_sample_size": _effective_sample_size(weights[mask]),
    }


def _rejected(geometric_mean: Tensor, config: CorrectionConfig) -> Tensor:
    """[S] → bool [S]: outside the bounds, as far as there are any."""
    low = 0.0 if config.geometric_low is None else config.geometric_low
    high = torch.inf if config.geometric_high is None else config.geometric_high
    return (geometric_mean < low) | (geometric_mean > high)


def _effective_sample_size(weights: Tensor) -> Tensor:
    """[n] → []: 0 if all weights are."""
    squares = weights.square().sum()
    return torch.where(squares > 0, weights.sum() ** 2 / (len(weights) * squares), torch.zeros_like(squares))
