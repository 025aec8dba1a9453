"""Off-policy corrections: weights for tokens that another policy, or another engine, sampled."""

from __future__ import annotations

from torch import Tensor


def truncated_importance(log_probs: Tensor, behaviour_log_probs: Tensor, *, cap: float) -> Tensor:
    """min(pi / mu, cap) for each token (truncated importance sampling; E. Ionides, 2008).

    Args:
        log_probs: float [T], the trainer's, at the start of the update.
        behaviour_log_probs: float [T], of the policy and engine that sampled.
        cap: the largest weight.

    Returns:
        float [T], without gradient.
    """
    return (log_probs - behaviour_log_probs).exp().clamp(max=cap).detach()
