"""What a candidate would earn on traffic that another policy answered: importance weighting of logged interactions.

The weight of a response is exp(its log-probability under the candidate less that under the behaviour policy), both
summed over its tokens and both as sampled (temperature, top-k and top-p applied). IPS is Horvitz and Thompson 1952;
SNIPS divides by the sum of weights (Swaminathan and Joachims 2015, "The self-normalized estimator for counterfactual
learning", NeurIPS); doubly robust adds the weighted errors of a reward model to what it predicts of the candidate
(Dudík, Langford and Li 2011, ICML), here with normalised weights (Thomas and Brunskill 2016, "Data-efficient off-policy
policy evaluation", ICML), which keeps the estimate from leaving the range of rewards by much.

Responses of one cluster, a user or a session, are averaged first: a cluster is one voice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from evaluation.statistics.intervals import Floats
from evaluation.statistics.wealth import greatest_refuted, wealth_path

MIN_ESS: Final = 100.0
_MAX_LOG_WEIGHT: Final = 300.0  # keeps squares finite; one such weight leaves an effective sample of one
_SUPPORT_ALPHA: Final = 0.001  # of the test that weights average 1: they are skewed, so the level is not exact
_SMALLEST_GAP: Final = 0.05  # of the candidate's responses


@dataclass(frozen=True)
class Estimate:
    """A mean and the ends of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class OffPolicy:
    """What the log says of the candidate. ``verdict`` is "can't tell" for the ``reasons``, with counts.

    ``estimate``: the doubly robust one where a reward model predicted, else SNIPS. ``logged``: the mean of the rewards
    as they are, which the behaviour policy earned; ``gain``: the estimate less that, on the same clusters. ``lower``:
    what the mean reward exceeds with the stated confidence, whatever the weights are like, one-sided, from weights
    clipped at ``clip``. ``ess``: (sum of weights)^2 / sum of squares, over ``clusters`` of ``n`` responses.
    ``mean_weight`` is 1 in expectation where the behaviour policy can sample all that the candidate can.
    """

    verdict: Literal["estimated", "can't tell"]
    reasons: tuple[str, ...]
    estimate: Estimate
    ips: Estimate
    snips: Estimate
    doubly_robust: Estimate | None
    logged: Estimate
    gain: Estimate
    lower: float
    clip: float
    ess: float
    n: int
    clusters: int
    mean_weight: Estimate
    largest_share: float


def estimate(
    rewards: ArrayLike,
    behaviour: ArrayLike,
    candidate: ArrayLike,
    *,
    bounds: tuple[float, float],
    confidence: float,
    clusters: ArrayLike | None = None,
    predicted: ArrayLike | None = None,
    expected: ArrayLike | None = None,
) -> OffPolicy:
    """The candidate's mean reward from logged responses [n], rewards within ``bounds``.

    ``behaviour`` and ``candidate`` [n]: log-probabilities of the responses, nats, summed over tokens; the candidate's
    may be -inf. For the doubly robust estimate, ``predicted`` [n] is the reward model's value of the logged response
    and ``expected`` [n] its mean over responses that the candidate samples to the same prompt (or both a value of the
    prompt alone). ``clusters`` [n] names users or sessions. Raises ValueError on shapes that differ, no response, and a
    number that is none or out of bounds, naming its place.
    """
    r, old = _column(rewards, "rewards"), _column(behaviour, "behaviour log-probabilities")
    n = len(r)
    new = _column(candidate, "candidate log-probabilities", n, zero=True)
    old = _column(old, "behaviour log-probabilities", n)
    low, high = bounds
    if ((r < low) | (r > high)).any():
        at = int(((r < low) | (r > high)).argmax())
        raise ValueError(f"reward {at} is {r[at]:g}, outside [{low:g}, {high:g}]")
    if (predicted is None) != (expected is None):
        raise ValueError("the doubly robust estimate needs both predicted and expected")
    weights = np.exp(np.minimum(new - old, _MAX_LOG_WEIGHT))
    codes = np.arange(n) if clusters is None else _codes(clusters, n)
    count = int(codes.max()) + 1
    sizes = np.bincount(codes, minlength=count)

    def mean(column: Floats) -> Floats:
        """Of each cluster."""
        return np.bincount(codes, column, minlength=count) / sizes

    w, wr, plain = mean(weights), mean(weights * r), mean(r)
    ess = float((w / w.max()).sum() ** 2 / ((w / w.max()) ** 2).sum()) if w.max() > 0 else 0.0
    ips = _mean(wr, confidence)
    snips = _ratio(np.zeros(count), wr, w, confidence)
    gain = _ratio(-plain, wr, w, confidence)
    robust = None
    if predicted is not None and expected is not None:
        q, v = _column(predicted, "predicted rewards", n), _column(expected, "expected rewards", n)
        errors = mean(weights * (r - q))
        robust = _ratio(mean(v), errors, w, confidence)
        gain = _ratio(mean(v) - plain, errors, w, confidence)
    clip = float(np.sqrt(count))
    lower = low + (high - low) * _clipped_lower(
        mean(np.minimum(weights, clip) * (r - low)) / (high - low), clip, confidence
    )
    mean_weight = _mean(w, 1 - _SUPPORT_ALPHA)
    reasons = []
    if not ess >= MIN_ESS:
        reasons.append(
            f"the effective sample size is {ess:.1f} of {count} clusters ({n} responses), {MIN_ESS:g} are needed: the "
            f"candidate answers too differently; the heaviest has {w.max() / max(w.sum(), 1e-300):.0%} of all weight"
        )
    if mean_weight.high < 1 - _SMALLEST_GAP:
        reasons.append(
            f"unequal support: weights average {mean_weight.value:.3f} (at most {mean_weight.high:.3f}) where they "
            f"should average 1, so the log lacks about {1 - mean_weight.value:.0%} of what the candidate says"
        )
    return OffPolicy(
        verdict="can't tell" if reasons else "estimated",
        reasons=tuple(reasons),
        estimate=robust or snips,
        ips=ips,
        snips=snips,
        doubly_robust=robust,
        logged=_mean(plain, confidence),
        gain=gain,
        lower=lower,
        clip=clip,
        ess=ess,
        n=n,
        clusters=count,
        mean_weight=mean_weight,
        largest_share=float(w.max() / w.sum()) if w.sum() > 0 else 1.0,
    )


def _ratio(base: Floats, numerators: Floats, weights: Floats, confidence: float) -> Estimate:
    """``mean(base) + sum(numerators) / sum(weights)`` over clusters, with its interval.

    The variance is the jackknife's: leaving out the heaviest cluster shows what rests on it (Efron and Tibshirani 1993,
    ch. 11).
    """
    n, total = len(weights), weights.sum()
    if total <= 0 or n < 2:
        return Estimate(float("nan"), float("-inf"), float("inf"))
    value = base.mean() + numerators.sum() / total
    rest = total - weights
    if (rest <= 0).any():
        return Estimate(float(value), float("-inf"), float("inf"))
    without = (base.sum() - base) / (n - 1) + (numerators.sum() - numerators) / rest
    return _student(float(value), (without - without.mean()) ** 2 * (n - 1) / n, confidence)


def _mean(values: Floats, confidence: float) -> Estimate:
    n = len(values)
    if n < 2:
        return Estimate(float(values.mean()), float("-inf"), float("inf"))
    return _student(float(values.mean()), (values - values.mean()) ** 2 / (n * (n - 1)), confidence)


def _student(value: float, parts: Floats, confidence: float) -> Estimate:
    """The interval of an estimate whose variance is the sum of ``parts``, one per cluster.

    Where few clusters make up most of it, the variance is uncertain itself: Student's t has as many degrees of freedom
    as parts count effectively, (sum of parts)^2 / sum of squares (Satterthwaite 1946, "An approximate distribution of
    estimates of variance components").
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence:g}")
    variance = float(parts.sum())
    if variance == 0:
        return Estimate(value, value, value)
    freedom = 1 / float(((parts / variance) ** 2).sum())
    half = float(stdtrit(freedom, (1 + confidence) / 2)) * variance**0.5
    return Estimate(value, value - half, value + half)


def _clipped_lower(values: Floats, clip: float, confidence: float) -> float:
    """A lower bound on the mean reward in [0, 1], from clipped weights times rewards, of clusters [n].

    Clipping only lowers the mean of what is not negative, so a lower bound on the clipped mean is one on the value
    (Bottou et al. 2013, "Counterfactual reasoning and learning systems", JMLR 14, section 4.4). The bound is by
    betting, so it holds for any weights. The clip is sqrt(n) (Ionides 2008, "Truncated importance sampling").
    """
    found = greatest_refuted(lambda mean: wealth_path(values, 0.0, mean), 1 - confidence, 0.0, 1.0)
    return max(0.0, found)


def _column(values: ArrayLike, name: str, n: int | None = None, *, zero: bool = False) -> Floats:
    """A vector of finite numbers; ``zero`` allows log-probabilities of nothing, -inf."""
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or array.size == 0 or (n is not None and len(array) != n):
        raise ValueError(f"{name} must be a vector, one for each response, got shape {array.shape}")
    wrong = ~np.isfinite(array) & ~(np.isneginf(array) & zero)
    if wrong.any():
        at = int(wrong.argmax())
        raise ValueError(f"{name} must be numbers, response {at} has {array[at]:g}")
    return array


def _codes(clusters: ArrayLike, n: int) -> NDArray[np.int64]:
    names = np.asarray(clusters)
    if names.shape != (n,):
        raise ValueError(f"clusters must have one name for each of {n} responses, got shape {names.shape}")
    return np.unique(names, return_inverse=True)[1]
