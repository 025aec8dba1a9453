"""Who answers better, from comparisons of two answers: win rates and strengths without a judge's habits.

One logistic model serves both. A comparison of policy i with policy j has the log odds

    strength_i - strength_j + position * (+1 if i's answer was shown first, else -1) + length * tanh(difference / scale)

and what is reported has the last two terms at zero: the answers as if of one length, shown in neither order. It is the
model of Bradley and Terry 1952 ("Rank analysis of incomplete block designs", Biometrika 39) with the length term of
Dubois et al. 2024 ("Length-controlled AlpacaEval", arXiv 2404.04475, ``length_controlled_minimal`` in their code) and
a term for the order of the answers, which they randomise instead. Averaging both orders is not enough: where a judge
prefers the first answer 70/30, a true win rate of 60 % averages to 58.5 %.

Preferences lie in [0, 1]: 1 for a win, 0.5 for a tie, or a judge's probability. Intervals are of the sandwich, so both
orders of an item count as one observation, and a preference need not be a coin toss (Liang and Zeger 1986).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.special import expit

from evaluation.statistics.intervals import Floats

# A prior worth this many tied items between each policy and the mean one, and none about position and length beyond
# keeping the fit finite. A policy that wins every comparison then has a finite strength; 1,000 items hardly feel it.
_TIES = 1.0
_RIDGE = 0.01
# The least sum of squares by which columns must differ: at a quarter of it (the largest curvature) the ridge is as much
# as what is known, and below it an interval would be of its making.
_TOLD_APART = 4 * _RIDGE
_MAX_STEPS = 100


@dataclass(frozen=True)
class WinRate:
    """A candidate's share of wins over a baseline, ties half, with its interval, and what was taken out of it.

    ``raw``: the mean preference. ``first``: the share that the first of two equal answers of one length wins.
    ``longer``: the share that an answer wins over an equal one which is one ``scale`` shorter. ``items`` were compared,
    ``identical`` of them with the same text on both sides.
    """

    value: float
    low: float
    high: float
    raw: float
    first: float
    longer: float
    items: int
    identical: int


@dataclass(frozen=True)
class Strengths:
    """Bradley-Terry strengths [policies], in log odds against the mean policy, with their covariance.

    ``first`` and ``longer`` as in ``WinRate``. ``comparisons`` [policies] counts those that each policy is in.
    """

    policies: tuple[str, ...]
    strengths: Floats
    covariance: Floats
    first: float
    longer: float
    comparisons: NDArray[np.int64]

    def strength(self, policy: str, *, confidence: float) -> tuple[float, float, float]:
        """``policy``'s log odds against the mean policy, with its interval: (strength, low, high)."""
        at = self.policies.index(policy)
        return _interval(self.strengths[at], self.covariance[at, at], confidence)

    def win_rate(self, policy: str, other: str, *, confidence: float) -> tuple[float, float, float]:
        """The share of comparisons that ``policy`` wins over ``other``, with its interval: (share, low, high)."""
        contrast = np.zeros(len(self.policies))
        contrast[self.policies.index(policy)] += 1
        contrast[self.policies.index(other)] -= 1
        found = _interval(float(contrast @ self.strengths), float(contrast @ self.covariance @ contrast), confidence)
        return tuple(float(expit(end)) for end in found)  # type: ignore[return-value]


def win_rate(
    preferences: ArrayLike,
    candidate_first: ArrayLike,
    *,
    items: ArrayLike,
    confidence: float,
    candidate_lengths: ArrayLike | None = None,
    baseline_lengths: ArrayLike | None = None,
    identical: ArrayLike | None = None,
) -> WinRate:
    """The candidate's win rate over the baseline, of answers of one length, shown in neither order.

    All arguments are [n], one entry per judgement: ``preferences`` for the candidate, whether its answer was
    ``candidate_first``, which of the ``items`` was asked, both answers' lengths (tokens or characters; none: no length
    control), and whether both texts are ``identical``, which is a tie whatever a judge said. Items are the clusters.
    Raises ValueError on shapes that differ, a preference outside [0, 1], no judgement at all, or one order throughout.
    """
    wins = _check_preferences(preferences)
    n = len(wins)
    same = np.zeros(n, bool) if identical is None else _vector(identical, n, "identical").astype(bool)
    wins = np.where(same, 0.5, wins)
    # A tie by the rule carries nothing of the judge's habits: it has neither an order nor a length.
    order = np.where(same, 0.0, np.where(_vector(candidate_first, n, "candidate_first").astype(bool), 1.0, -1.0))
    length = np.where(same, 0.0, _length_terms(candidate_lengths, baseline_lengths, n))
    clusters = _codes(items, n, "items")
    beta, covariance = _fit(
        np.stack([np.ones(n), order, length], axis=1), wins, clusters, np.array([True, False, False])
    )
    low, high = _interval(beta[0], covariance[0, 0], confidence)[1:]
    rates = expit(np.array([beta[0], low, high, beta[1], beta[2] * np.tanh(1.0)]))
    return WinRate(
        value=float(rates[0]),
        low=float(rates[1]),
        high=float(rates[2]),
        raw=float(wins.mean()),
        first=float(rates[3]),
        longer=float(rates[4]),
        items=int(clusters.max()) + 1,
        identical=len(np.unique(clusters[same])),
    )


def win_rate_in_both_orders(
    scores: ArrayLike, verdicts: ArrayLike, lengths: ArrayLike, *, items: ArrayLike, confidence: float
) -> WinRate:
    """The win rate of pairs that were each judged in both orders.

    Args:
        scores: [n], what a pair without verdicts counts as: 0.5 says that both texts are the same.
        verdicts: [n, 2], for the candidate's as the first answer and as the second; NaN where there is none.
        lengths: [n, 2], of the candidate's answer and of the baseline's.
        items: [n], pairs with the same one depend on each other.

    Raises:
        ValueError: as ``win_rate``.
    """
    values, judged = np.asarray(scores, np.float64), np.asarray(verdicts, np.float64)
    ours, theirs = np.asarray(lengths, np.float64).T
    unjudged = np.asarray(np.isnan(judged).any(axis=1))
    preferences = np.where(unjudged[:, None], values[:, None], judged)
    return win_rate(
        preferences.T.ravel(),
        np.repeat([True, False], len(values)),
        items=np.tile(np.asarray(items), 2),
        candidate_lengths=np.tile(ours, 2),
        baseline_lengths=np.tile(theirs, 2),
        identical=np.tile(unjudged & (values == 0.5), 2),
        confidence=confidence,
    )


def bradley_terry(
    first: Sequence[str],
    second: Sequence[str],
    preferences: ArrayLike,
    *,
    items: ArrayLike,
    first_lengths: ArrayLike | None = None,
    second_lengths: ArrayLike | None = None,
    identical: ArrayLike | None = None,
) -> Strengths:
    """Strengths of all policies from comparisons [n], without the effects of order and length.

    ``preferences`` are for the policy whose answer was shown ``first``; the other arguments are as in ``win_rate``.
    Raises ValueError as it does, on a policy compared with itself, and where comparisons don't link all policies,
    naming the groups that never meet.
    """
    wins = _check_preferences(preferences)
    n = len(wins)
    if len(first) != n or len(second) != n:
        raise ValueError(f"{n} preferences between {len(first)} and {len(second)} policies: each needs one of both")
    policies = tuple(sorted({*first, *second}))
    at = {policy: index for index, policy in enumerate(policies)}
    i, j = np.array([at[policy] for policy in first]), np.array([at[policy] for policy in second])
    if (i == j).any():
        raise ValueError(f"policy {first[int((i == j).argmax())]} is compared with itself")
    if len(groups := linked(first, second)) > 1:
        parts = "; ".join(", ".join(group) for group in groups)
        raise ValueError(f"no comparison links these groups of policies, so they have no common scale: {parts}")
    same = np.zeros(n, bool) if identical is None else _vector(identical, n, "identical").astype(bool)
    wins = np.where(same, 0.5, wins)
    k = len(policies)
    design = np.zeros((n, k + 2))
    design[np.arange(n), i], design[np.arange(n), j] = 1.0, -1.0
    design[:, k] = np.where(same, 0.0, 1.0)
    design[:, k + 1] = np.where(same, 0.0, _length_terms(first_lengths, second_lengths, n))
    beta, covariance = _fit(design, wins, _codes(items, n, "items"), np.arange(k + 2) < k)
    centre = np.eye(k) - 1 / k
    return Strengths(
        policies=policies,
        strengths=centre @ beta[:k],
        covariance=centre @ covariance[:k, :k] @ centre,
        first=float(expit(beta[k])),
        longer=float(expit(beta[k + 1] * np.tanh(1.0))),
        comparisons=np.bincount(i, minlength=k) + np.bincount(j, minlength=k),
    )


def linked(first: Sequence[str], second: Sequence[str]) -> list[list[str]]:
    """Groups of policies that comparisons [n] of one with the other link, directly or through others."""
    policies = sorted({*first, *second})
    at = {policy: index for index, policy in enumerate(policies)}
    pairs = {(at[a], at[b]) for a, b in zip(first, second, strict=True)}
    ends = np.array(sorted(pairs)).reshape(-1, 2).T
    graph = coo_array((np.ones(len(pairs)), (ends[0], ends[1])), shape=(len(policies), len(policies)))
    count, group = connected_components(graph, directed=False)
    return [[policies[at] for at in np.flatnonzero(group == name)] for name in range(count)]


def _fit(design: Floats, wins: Floats, clusters: NDArray[np.int64], ties: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Coefficients [p] of a logistic regression and their sandwich covariance [p, p], from ``design`` [n, p].

    Iteratively reweighted least squares, with step halving. Columns in ``ties`` have a prior of fictitious ties, which
    in the covariance count as one more cluster: where a policy always wins, theirs is all the doubt there is. Raises
    ValueError where policies can't be told from the order or the lengths of answers.
    """
    used = design[:, design.any(axis=0)]
    if np.linalg.matrix_rank(used.T @ used, tol=_TOLD_APART, hermitian=True) < used.shape[1] - (ties.sum() > 1):
        raise ValueError(
            "the comparisons can't tell the policies from the order or the lengths of their answers: judge each pair "
            "in both orders, and leave the lengths out if they always differ by the same"
        )
    count = int(clusters.max()) + 1
    prior = np.where(ties, _TIES * len(wins) / count, 0.0)

    def objective(beta: Floats) -> float:
        logits = design @ beta
        likelihood = (wins * logits - np.logaddexp(0, logits)).sum()
        return float(likelihood + (prior * (beta / 2 - np.logaddexp(0, beta))).sum() - _RIDGE / 2 * beta @ beta)

    beta = np.zeros(design.shape[1])
    value = objective(beta)
    for _ in range(_MAX_STEPS):
        gradient, information = _derivatives(design, wins, beta, prior)
        step = np.linalg.solve(information, gradient)
        while (found := objective(beta + step)) < value - 1e-12 * abs(value):
            step /= 2
        beta, value = beta + step, found
        if np.abs(step).max() < 1e-10:
            break
    _, information = _derivatives(design, wins, beta, prior)
    scores = design * (wins - expit(design @ beta))[:, None]
    of_cluster = np.stack([np.bincount(clusters, column, minlength=count) for column in scores.T], axis=1)
    bread = np.linalg.inv(information)
    of_prior = prior * (0.5 - expit(beta)) - _RIDGE * beta
    meat = count / max(1, count - 1) * of_cluster.T @ of_cluster + np.outer(of_prior, of_prior)
    return beta, bread @ meat @ bread


def _derivatives(design: Floats, wins: Floats, beta: Floats, prior: Floats) -> tuple[Floats, Floats]:
    means, of_ties = expit(design @ beta), expit(beta)
    gradient = design.T @ (wins - means) + prior * (0.5 - of_ties) - _RIDGE * beta
    curvature = prior * of_ties * (1 - of_ties) + _RIDGE
    return gradient, (design * (means * (1 - means))[:, None]).T @ design + np.diag(curvature)


def _length_terms(ours: ArrayLike | None, theirs: ArrayLike | None, n: int) -> Floats:
    if ours is None or theirs is None:
        return np.zeros(n)
    difference = _vector(ours, n, "lengths").astype(np.float64) - _vector(theirs, n, "lengths").astype(np.float64)
    # About zero and not about the mean: two lists swapped must give the same scale, and the sign turned.
    scale = np.sqrt((difference**2).mean())
    return np.tanh(difference / scale) if scale > 0 else np.zeros(n)


def _interval(value: float, variance: float, confidence: float) -> tuple[float, float, float]:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence:g}")
    half = NormalDist().inv_cdf((1 + confidence) / 2) * float(np.sqrt(variance))
    return float(value), float(value) - half, float(value) + half


def _check_preferences(preferences: ArrayLike) -> Floats:
    wins = np.asarray(preferences, np.float64)
    if wins.ndim != 1 or wins.size == 0:
        raise ValueError(f"preferences must be a vector with one value or more, got shape {wins.shape}")
    if not ((wins >= 0) & (wins <= 1)).all():
        at = int((~((wins >= 0) & (wins <= 1))).argmax())
        raise ValueError(f"preferences lie in [0, 1], and judgement {at} has {wins[at]:g}")
    return wins


def _vector(values: ArrayLike, n: int, name: str) -> NDArray:
    array = np.asarray(values)
    if array.shape != (n,):
        raise ValueError(f"{name} must have one entry for each of {n} judgements, got shape {array.shape}")
    return array


def _codes(values: ArrayLike, n: int, name: str) -> NDArray[np.int64]:
    return np.unique(_vector(values, n, name), return_inverse=True)[1]
