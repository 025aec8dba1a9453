"""Estimators of KL(policy || reference) from tokens that the policy sampled, and the control of its weight.

Written with r = ref / policy of a token (J. Schulman, "Approximating KL Divergence", 2020). In the reward the value of
an estimator counts; in the loss its gradient alone, and that is another matter ("A Comedy of Estimators", arXiv
2512.21852; "Rethinking KL Regularization in RLHF", arXiv 2510.01555). With tokens sampled by the policy itself, the
expected gradient is: of k1 zero, whatever the policies; of k2 that of KL(policy || reference); of k3 that of
KL(reference || policy).

Tokens that another policy sampled, as in later minibatches and in traffic, are weighed by policy / behaviour without
gradient: expectations are then what they are of the policy's own tokens, at the prefixes that were sampled, as far as
no weight is capped (train/objectives/corrections.py). Weighed so, the gradient of k2 is that of DeepSeek-V3.2's
estimator (arXiv 2512.02556, eq. 7), whose ratio has a gradient too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from torch import Tensor

LARGEST_LOG_RATIO: Final = 20.0
"""Nats. Of two policies that are further apart at a token, an exponential is meaningless, and would overflow."""

LARGEST_K3_LOG_RATIO: Final = 7.0
"""Nats. Where the reference is more than this much likelier, k3 goes on along its tangent: the gradient of a single
token stays within e^7 - 1 (about 1,100) times the weight of the KL, and keeps its sign."""


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """-log r: unbiased, of high variance; single terms may be negative. [T] → [T], nats."""
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(log r)² / 2: biased, of low variance, never negative; its gradient is unbiased. [T] → [T], nats."""
    return 0.5 * (log_probs - ref_log_probs) ** 2


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """r - 1 - log r: unbiased, of low variance, never negative; its gradient is biased. [T] → [T], nats.

    Beyond log r = ``LARGEST_K3_LOG_RATIO`` it is linear, and then less than r - 1 - log r.
    """
    log_ratio = ref_log_probs - log_probs
    bounded = log_ratio.clamp(max=LARGEST_K3_LOG_RATIO)
    beyond = log_ratio - bounded  # 0, without gradient, within the bound
    return bounded.exp() - 1 - bounded + math.expm1(LARGEST_K3_LOG_RATIO) * beyond


def k3_unbiased(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2, log(policy / ref) · ∇ log policy. [T] → [T], nats.

    Its expectation over tokens that the policy itself sampled is the KL of the next token's distribution, and its
    gradient's expectation the gradient of that. What a token does to the KL of those after it is not in it (which a KL
    in the reward has).
    """
    value, gradient = k3(log_probs, ref_log_probs), k2(log_probs, ref_log_probs)
    return value.detach() + gradient - gradient.detach()


ESTIMATORS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_unbiased": k3_unbiased,
}


def adapted_coefficient(
    coefficient: float, kl: float, *, target: float, horizon: int, minimum: float, maximum: float
) -> float:
    """The KL's weight after a step, so that the KL comes to its target (arXiv 1909.08593, section 2.2).

    It grows by a factor of 1 + error / horizon, with the relative error (kl - target) / target clipped to ±0.2; the
    paper's K_β is 1 / horizon, 0.1. NaN if ``kl`` is, which was measured in the step, in nats per token.
    """
    error = min(max((kl - target) / target, -0.2), 0.2)
    return min(max(coefficient * (1 + error / horizon), minimum), maximum)
