"""Worlds of traffic and judges: harm that must be seen, differences that are none, logs, and judges with habits."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit

from deploy.examples.simulate.world import Outcome, World
from evaluation.statistics import off_policy
from evaluation.statistics.experiment import Plan, prediction_powered, pseudo_outcomes
from evaluation.statistics.intervals import Floats
from evaluation.statistics.pairwise import win_rate
from evaluation.statistics.wealth import POWERED_FRACTIONS, first_crossing, wealth_path

THUMBS_UP = 0.7
FEEDBACKS = 4000
MOST_FEEDBACKS = {5: 2500, 10: 750, 15: 350}  # medians at which harm of so many points must be shown
MIN_ESS = 200
BLOCKS = 2000  # of an experiment
ITEMS = 20_000  # that a judge compares, in both orders

_ALPHA = Plan().alpha_rollback
_BATCH = 20  # histories drawn at once


def feedbacks_until_rollback(
    rng: np.random.Generator, harm: float, feedbacks: int, histories: int
) -> NDArray[np.int64]:
    """After how many feedbacks each history [histories] is rolled back, 0 for never. Half the sources get either
    policy."""
    found = []
    for at in range(0, histories, _BATCH):
        shape = min(_BATCH, histories - at), feedbacks
        candidate = rng.random(shape) < 0.5
        thumbs = rng.random(shape) < np.where(candidate, THUMBS_UP - harm, THUMBS_UP)
        psi, _, high = pseudo_outcomes(thumbs, candidate, 0.5)
        found.append(first_crossing(wealth_path(-psi, -high, 0.0), _ALPHA))
    return np.concatenate(found)


def harm(points: int, histories: int, seed: int) -> Outcome:
    """The median of the feedbacks that it takes to roll back a candidate which is worse by so many points."""
    most = MOST_FEEDBACKS[points]
    at = feedbacks_until_rollback(np.random.default_rng([seed, points]), points / 100, 8 * most, 5 * histories)
    median = float(np.median(np.where(at, at, 10**9)))
    low, high = np.quantile(np.where(at, at, 10**9), [0.1, 0.9])
    return Outcome(
        {f"harm_median_feedbacks.{points}": median},
        median <= most,
        f"rolled back after {median:.0f} feedbacks in the median ({low:.0f} to {high:.0f} in 80 % of {len(at)} "
        f"histories; bar: {most})",
    )


def false_rollback(histories: int, seed: int) -> Outcome:
    """The share of candidates no worse than the control that are rolled back, within 4,000 feedbacks and 40,000."""
    runs = 10 * histories
    at = feedbacks_until_rollback(np.random.default_rng([seed, 1]), 0.0, 10 * FEEDBACKS, runs)
    early, late = float(((at > 0) & (at <= FEEDBACKS)).mean()), float((at > 0).mean())
    return Outcome(
        {"false_rollback": late},
        late <= _ALPHA,
        f"rolled back within {FEEDBACKS} feedbacks {early:.3f}, within {10 * FEEDBACKS} {late:.3f} of {runs} histories "
        f"(bar: {_ALPHA:g})",
    )


def blocks_until_rollback(
    rng: np.random.Generator, harm: float, histories: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """After how many blocks each history [histories] is rolled back, 0 for never: adjusted, and by thumbs alone.

    A block has 20 responses of one user with a biased score each, and thumbs on two. What the user is like moves it,
    and of that the covariate knows three quarters of the variance.
    """
    adjusted, plain = [], []
    for at in range(0, histories, _BATCH):
        shape = min(_BATCH, histories - at), BLOCKS
        candidate = rng.random(shape) < 0.5
        before = rng.normal(size=shape)
        level = 0.5 + 0.1 * (np.sqrt(0.75) * before + np.sqrt(0.25) * rng.normal(size=shape)) - harm * candidate
        chance = np.clip(level[..., None] + rng.choice([-0.4, 0.4], (*shape, 20)), 0, 1)
        scores = np.clip(0.1 + 0.7 * chance + 0.1 * rng.normal(size=chance.shape), 0, 1)
        thumbs = (rng.random((*shape, 2)) < chance[..., :2]).mean(axis=-1)
        powered, power = prediction_powered(thumbs, scores.mean(axis=-1), scores[..., :2].mean(axis=-1))
        psi, _, high = pseudo_outcomes(powered, candidate, 0.5, before, power=power)
        adjusted.append(first_crossing(wealth_path(-psi, -high, 0.0, POWERED_FRACTIONS), _ALPHA))
        psi, _, high = pseudo_outcomes(thumbs, candidate, 0.5)
        plain.append(first_crossing(wealth_path(-psi, -high, 0.0), _ALPHA))
    return np.concatenate(adjusted), np.concatenate(plain)


def adjusted_evidence(histories: int, seed: int) -> Outcome:
    """Outcomes less what was before, and few thumbs corrected by scores: how seldom they err, and what they save."""
    without = [(at > 0).mean() for at in blocks_until_rollback(np.random.default_rng([seed, 4]), 0.0, 2 * histories)]
    harmful = blocks_until_rollback(np.random.default_rng([seed, 5]), 0.08, histories)
    medians = [float(np.median(np.where(at, at, 10**9))) for at in harmful]
    false = float(without[0])
    return Outcome(
        {"adjusted.false_rollback": false, "adjusted.harm_median_blocks": medians[0]},
        false <= _ALPHA and medians[0] <= 0.85 * medians[1],
        f"rolled back without harm {false:.3f} of {2 * histories} histories of {BLOCKS} blocks (bar: {_ALPHA:g}; by "
        f"thumbs alone {without[1]:.3f}), with harm of 8 points after {medians[0]:.0f} blocks in the median (bar: 0.85 "
        f"of the {medians[1]:.0f} by thumbs alone)",
    )


def logged_traffic(rng: np.random.Generator, n: int, noise: float, gain: float) -> tuple[dict[str, Floats], Floats]:
    """Responses of 12 tokens to prompts of any difficulty, as ``off_policy.estimate`` takes them, and the truth [n].

    The more good tokens, the likelier a thumb. The candidate's odds of a good one are e^``gain`` as high, and of the
    tokens that don't matter ``noise`` is its disagreement with the behaviour policy, in nats a response. The reward
    model is off by a tenth, too flat, and noisy.
    """
    tokens = 12
    old = rng.beta(4, 4, n)
    new = expit(logit(old) + gain)
    good = rng.binomial(tokens, old)
    behaviour = good * np.log(old) + (tokens - good) * np.log1p(-old)
    candidate = good * np.log(new) + (tokens - good) * np.log1p(-new) + noise * rng.normal(size=n) - noise**2 / 2
    thumb, truth = 0.2 + 0.6 * good / tokens, 0.2 + 0.6 * new
    return {
        "rewards": (rng.random(n) < thumb).astype(np.float64),
        "behaviour": behaviour,
        "candidate": candidate,
        "predicted": 0.1 + 0.7 * thumb + 0.05 * rng.normal(size=n),
        "expected": 0.1 + 0.7 * truth + 0.05 * rng.normal(size=n),
    }, truth


def off_policy_estimates(histories: int, seed: int) -> Outcome:
    """How far estimates are from the truth, and how often intervals cover it, at an effective sample of 200 or more."""
    rng = np.random.default_rng([seed, 2])
    errors, covered, bounded = [], [], []
    kinds = ((2000, 0.5, 0.2), (2000, 1.0, 0.3), (4000, 1.4, 0.2), (600, 0.4, 0.3))
    for n, noise, gain in kinds:
        # The truth of these prompts' distribution, not of one sample of them.
        truth = float(logged_traffic(np.random.default_rng(0), 400_000, noise, gain)[1].mean())
        for _ in range(histories):
            logged, _ = logged_traffic(rng, n, noise, gain)
            found = off_policy.estimate(**logged, bounds=(0.0, 1.0), confidence=0.95)
            if found.ess >= MIN_ESS and found.verdict == "estimated":
                errors.append(found.estimate.value - truth)
                covered.append(found.estimate.low <= truth <= found.estimate.high)
                bounded.append(found.lower <= truth)
    mean_error, coverage = float(np.abs(errors).mean()), float(np.mean(covered))
    return Outcome(
        {"off_policy.mean_error": mean_error, "off_policy.coverage": coverage},
        mean_error <= 0.02 and coverage >= 0.93,
        f"{mean_error:.4f} from the truth in the mean (bar: 0.02; bias {np.mean(errors):+.4f}), intervals cover "
        f"{coverage:.3f} (bar: 0.93), lower bounds {np.mean(bounded):.3f}, of {len(errors)} logs of "
        f"{len(kinds) * histories} with an effective sample of {MIN_ESS}",
    )


def judge_error(histories: int, seed: int) -> Outcome:
    """The largest mean distance of a win rate from the truth, over judges with habits: the first one, the longer
    one."""
    rng = np.random.default_rng([seed, 3])
    runs = max(2, histories // 20)
    worst, said = 0.0, []
    for name, first, length, spread in (
        ("first", 0.7, 0.5, 0.0),
        ("first, items differ", 0.7, 0.5, 1.0),
        ("longer", 0.5, 0.7, 0.0),
        ("longer, items differ", 0.5, 0.7, 1.0),
        ("both", 0.7, 0.7, 1.0),
    ):
        errors = [np.subtract(*_judged(rng, first, length, spread)) for _ in range(runs)]
        error, raw = np.abs(np.array(errors)).mean(axis=0)
        worst = max(worst, float(error))
        said.append(f"{name} {error:.4f} (mean of both orders {raw:.4f})")
    return Outcome(
        {"judge_error": worst}, worst <= 0.01, f"{', '.join(said)} from the truth in {runs} judgings (bar: 0.01)"
    )


def _judged(rng: np.random.Generator, first: float, longer: float, spread: float) -> tuple[Floats, Floats]:
    """((win rate, mean of both orders), (truth, truth)), by a judge that takes ``first`` or ``longer`` of equal
    answers.

    The candidate is better, and its answers are half as long again in the mean.
    """
    quality = logit(0.6) + spread * rng.normal(size=ITEMS)
    ours, theirs = rng.lognormal(4.4, 0.5, ITEMS), rng.lognormal(4.0, 0.5, ITEMS)
    taste = logit(longer) / np.tanh(1) * np.tanh((ours - theirs) / np.sqrt(((ours - theirs) ** 2).mean()))
    wins = rng.random((2, ITEMS)) < expit(quality + taste + logit(first) * np.array([[1], [-1]]))
    found = win_rate(
        wins.ravel(),
        np.repeat([True, False], ITEMS),
        items=np.tile(np.arange(ITEMS), 2),
        candidate_lengths=np.tile(ours, 2),
        baseline_lengths=np.tile(theirs, 2),
        confidence=0.95,
    )
    return np.array([found.value, found.raw]), np.full(2, expit(quality).mean())


WORLDS: dict[str, World] = {
    **{f"harm_median_feedbacks.{points}": partial(harm, points) for points in MOST_FEEDBACKS},
    "false_rollback": false_rollback,
    "adjusted": adjusted_evidence,
    "off_policy": off_policy_estimates,
    "judge_error": judge_error,
}
