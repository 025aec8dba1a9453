"""Estimators of KL(policy || reference) from its samples (J. Schulman, "Approximating KL Divergence", 2020)."""

from __future__ import annotations

from torch import Tensor


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Unbiased, of high variance; single terms may be negative. [T] → [T], nats."""
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Biased, of low variance, never negative. [T] → [T], nats."""
    return 0.5 * (log_probs - ref_log_probs) ** 2


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Unbiased, of low variance, never negative. [T] → [T], nats."""
    log_ratio = ref_log_probs - log_probs
    return log_ratio.exp() - 1 - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
