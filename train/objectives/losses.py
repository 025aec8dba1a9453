"""Policy losses: pure functions over packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from train.batch.packed import PackedBatch
from train.objectives.kl import LARGEST_LOG_RATIO

# ------------------------------------------------------------------------------------------------------- ratios


def token_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """pi / pi_old of each token, at most e^20, so that one odd token does not end a run. [T], nats → float [T]."""
    return (log_probs - old_log_probs).clamp(max=LARGEST_LOG_RATIO).exp()


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, batch: PackedBatch) -> Tensor:
    """The geometric mean of a response's token ratios (GSPO, arXiv 2507.18071, eq. 7), at each of its tokens.

    s = (pi(y|x) / pi_old(y|x))^(1/|y|), whose gradient is s times the mean over the response of ∇ log pi (eq. 10).
    [T], nats → float [T].
    """
    mean = batch.response_sums(log_probs - old_log_probs) / batch.response_lengths
    return batch.per_token(mean.clamp(max=LARGEST_LOG_RATIO).exp())


def sequence_ratio_of_tokens(log_probs: Tensor, old_log_probs: Tensor, batch: PackedBatch) -> Tensor:
    """``sequence_ratio``, of which each token's entry has the gradient of its own logprob alone (GSPO-token, eq. 14).

    Where all tokens of a response have one weight the loss has the same gradient; where they have not, as under a
    correction by tokens, a token learns by its own weight, and one that is masked does not learn.
    """
    ratio = sequence_ratio(log_probs.detach(), old_log_probs, batch)
    return ratio * (log_probs - log_probs.detach()).exp()


# --------------------------------------------------------------------------------------------------- surrogates


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective (arXiv 1707.06347, eq. 7), negated, with DAPO's two bounds (arXiv 2503.14476, eq. 10).

    Args:
        ratio, advantages: float [T]; gradients flow through the first alone.
        dual_clip: where the advantage is negative, the loss is at most so many times its size, however likely the
            token has become (dual-clip PPO, arXiv 1912.09729).

    Returns:
        (loss, clipped): float [T], and bool [T], true where a clip stopped the gradient.
    """
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, clipped = torch.maximum(unclipped, bounded), bounded > unclipped
    if dual_clip is None:
        return loss, clipped
    most = -dual_clip * advantages
    too_much = (advantages < 0) & (loss > most)
    return torch.where(too_much, most, loss), clipped | too_much


def reinforce(ratio: Tensor, log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """-ratio · advantage · log pi of each token: the score function (R. Williams, 1992), and no clip.

    The ratio is a weight that makes up for what the policy has moved since the step began; until then it is 1.
    Gradients flow through ``log_probs`` alone. As ``clipped_surrogate`` returns it; nothing is clipped.
    """
    return -ratio.detach() * advantages * log_probs, torch.zeros_like(ratio, dtype=torch.bool)


def clipped_weight(
    ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """``reinforce`` with the ratio bounded (CISPO, arXiv 2506.13585, eqs. 4 and 5): no token is without gradient.
    Clipped is where the ratio was out of bounds.
    """
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, _ = reinforce(weight, log_probs, advantages)
    return loss, weight != ratio


# ------------------------------------------------------------------------------------------------- aggregations


def token_mean(batch: PackedBatch, _: int | None) -> tuple[Tensor, float]:
    """Every response token of the batch counts alike (DAPO, arXiv 2503.14476, eq. 12)."""
    mask = batch.response_mask
    return mask.float(), float(mask.sum())


def sequence_mean(batch: PackedBatch, _: int | None) -> tuple[Tensor, float]:
    """Every response counts alike, and so does each of its tokens (GRPO, arXiv 2402.03300, eq. 3).

    Of an episode of several turns it is the whole that counts as much as any other.
    """
    return batch.response_mask / batch.per_token(batch.episode_lengths), _episodes(batch)


def constant_length(batch: PackedBatch, max_tokens: int | None) -> tuple[Tensor, float]:
    """Every response counts by the sum over its tokens, over one length for all (Dr.GRPO, arXiv 2503.20783).

    Raises:
        ValueError: the length is not known.
    """
    if max_tokens is None:
        raise ValueError(
            "train.algorithm.aggregation=constant_length needs train.algorithm.max_tokens, which is "
            "train.rollout.max_tokens where the algorithm's settings are a part of train's"
        )
    return batch.response_mask / max_tokens, _episodes(batch)


def _episodes(batch: PackedBatch) -> float:
    """How many episodes the batch has; of one that is partly in it, the share of its tokens."""
    return float((batch.response_lengths.double() / batch.episode_lengths).sum())


AGGREGATIONS: Final[dict[str, Callable[[PackedBatch, int | None], tuple[Tensor, float]]]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant_length": constant_length,
}
"""By name: of a batch and the longest response that is sampled, (weight of each token's loss, float32 [T], 0 at
prompts; this batch's share of what the sum over micro-batches and ranks is divided by)."""
