"""What is measured of responses: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def distinct_n(responses: Sequence[Sequence[int]], n: int) -> float:
    """Distinct n-grams over all n-grams of all responses (token ids); 0 if no response has n tokens.

    Li et al. 2016, "A diversity-promoting objective function" (arXiv 1510.03055), sec. 5.2, with tokens for words.
    Falls as a suite grows: compare policies on the same suite only.
    """
    grams = [tuple(tokens[i : i + n]) for tokens in responses for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repeated(tokens: Sequence[int], n: int) -> float:
    """The share of a response's n-grams (token ids) that it had before; 0 if it has fewer than n + 1 tokens."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def kl_terms(
    incumbent: NDArray[np.floating], candidate: NDArray[np.floating]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Terms of KL(incumbent || candidate) and of KL(candidate || incumbent), one per token, none negative, in nats.

    Takes the log-probabilities [tokens] that the two policies give to tokens which the *incumbent* sampled, at
    temperature 1 with nothing cut off. With r = candidate / incumbent, the first is k3 = r - 1 - log r of Schulman 2020
    (joschu.net/blog/kl-approx.html), the second r log r - (r - 1), the same estimator importance-weighted by r. Under
    the incumbent E[r] = 1, so the mean of each is without bias the KL between the two next-token distributions,
    averaged over the prefixes that the incumbent visits. Where the candidate puts its mass on tokens that the
    incumbent hardly ever samples, a small sample puts the second far too low; the first then grows, and is the one to
    bound.
    """
    log_ratio = candidate.astype(np.float64) - incumbent.astype(np.float64)
    ratio = np.exp(log_ratio)
    # expm1 keeps small ratios from cancelling to noise; rounding may still leave -1e-17.
    excess = np.expm1(log_ratio)
    forward = np.maximum(excess - log_ratio, 0.0)
    # -inf * 0: a token that the candidate can't say adds 1 to the second, its limit.
    weighted = np.where(ratio > 0, ratio * np.where(ratio > 0, log_ratio, 0.0), 0.0)
    return forward, np.maximum(weighted - excess, 0.0)
