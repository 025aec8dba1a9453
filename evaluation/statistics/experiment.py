"""A candidate against the control on live traffic: commit, hold or roll back, decided at any time.

The unit is a source: what the assignment draws for, a user, else a session, else (in a switchback) a block of time. A
source is one row, which closes a fixed time after its first interaction and never changes afterwards; so its thumbs
are one voice, however many. Rows are read in the order in which they close.

Each row i becomes an unbiased estimate of the difference of means, candidate less control,

    psi_i = (A_i - pi_i) / (pi_i (1 - pi_i)) * (Y_i - m_i)

with A_i 1 for the candidate, pi_i the share that the candidate was drawn with, and m_i what earlier rows, and what this
source did before the experiment, predict of the outcome Y_i in [0, 1]. That is the doubly robust term of Waudby-Smith
et al. 2022 ("Anytime-valid off-policy inference for contextual bandits", arXiv 2210.10768), and with a covariate it is
CUPED (Deng et al. 2013). As psi is bounded row by row, a bettor against "the mean is at most c" who stakes a fixed
share f of what the worst row could cost multiplies its wealth by 1 + f (psi - c) / (c - low) and gains nothing on
average if the statement is true; the mean wealth of several f exceeds 1 / alpha with probability alpha at most, ever
(Ville; Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting", JRSS B 86). No
distribution is assumed, the share may change from phase to phase, and the effect may drift.

Decisions read the highest wealth so far, so they depend on rows alone and not on when somebody looked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr

from evaluation.statistics.intervals import Floats
from evaluation.statistics.wealth import first_crossing, greatest_refuted, wealth_path

Bools = NDArray[np.bool_]
Path = Callable[[float], Floats]  # the evidence [n] against "the difference is at most this"

_PRIOR_ROWS: Final = 2.0  # rows at 0.5 that the prediction of an outcome starts from
_RECENT_ROWS: Final = 20.0  # rows that the prediction rests on, about
_RATIO_ROWS: Final = 100.0  # prior rows at the declared shares in the sample-ratio test: mismatches of some 5 points


@dataclass(frozen=True)
class Rows:
    """One row per source [n], in the order of closing.

    ``candidate``: whether it was assigned to the candidate, ``propensities``: with what probability, ``values``: the
    mean of each outcome over the source's interactions, NaN without one. ``covariates``: each outcome's mean before the
    experiment, NaN for the new. ``predictions``: each outcome's predicted mean over all interactions. ``responded``:
    the share of the source's interactions with a value of each outcome; without it, whether there is one. ``pending``
    sources have not closed yet, ``late`` values came after their row had closed and count for nothing, ``crossed``
    sources were served by both arms and count for the one that they met first.
    """

    candidate: Bools
    propensities: Floats
    values: Mapping[str, Floats]
    covariates: Mapping[str, Floats] = field(default_factory=dict)
    predictions: Mapping[str, Floats] = field(default_factory=dict)
    responded: Mapping[str, Floats] = field(default_factory=dict)
    pending: int = 0
    late: int = 0
    crossed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What is compared, in its own units. ``bounds`` are declared; latency and length have those of the server.

    ``margin``, above 0 for a guardrail: how much worse the candidate may be. ``success`` outcomes must be shown better
    by more than their margin. ``predicted``: use the predictions (``prediction_powered``), for outcomes that few
    sources have; that evidence is asymptotic, and wants one share of traffic throughout.
    """

    name: str
    bounds: tuple[float, float] = (0.0, 1.0)
    higher_is_better: bool = True
    role: Literal["success", "guardrail"] = "success"
    margin: float = 0.0
    rollback_margin: float = 0.0
    predicted: bool = False


@dataclass(frozen=True)
class Plan:
    """The errors that an experiment may make, each spent once over its whole life.

    ``alpha_commit``: the probability that a candidate is committed which is no better, or past a guardrail.
    ``alpha_rollback``: that one is rolled back which harms no outcome by more than its ``rollback_margin``; split
    evenly between outcomes. ``alpha_checks``: that a sound experiment is held by the sample-ratio or the response-rate
    test, half each, the latter's split between success outcomes. ``response_margin``: the difference of response rates
    that is let pass. ``effect``: the size of effects, as a share of the bounds, that prediction-powered evidence looks
    for; ``min_labels`` per arm before it speaks.
    """

    alpha_commit: float = 0.05
    alpha_rollback: float = 0.05
    alpha_checks: float = 0.01
    response_margin: float = 0.0
    effect: float = 0.1
    min_labels: int = 100


@dataclass(frozen=True)
class Difference:
    """Candidate less control in the outcome's units, with a confidence sequence, of n rows per arm.

    ``low`` holds at 1 - alpha_commit and ``high`` at 1 - alpha_rollback (split between outcomes) where higher is
    better, the other way round where lower is. ``gain`` and ``harm``: the highest e-value so far against "not better
    than the margin" and "not worse than the rollback margin". ``harm_at``: the number of rows, closed and with a value,
    at which harm was shown first.
    """

    name: str
    value: float
    low: float
    high: float
    candidates: int
    controls: int
    gain: float
    harm: float
    gain_at: int | None
    harm_at: int | None


@dataclass(frozen=True)
class Decision:
    """``reasons`` are sentences; ``holds`` those that stand in the way of a commit whatever the outcomes say."""

    decision: Literal["commit", "hold", "roll back"]
    reasons: tuple[str, ...]
    holds: tuple[str, ...]
    differences: tuple[Difference, ...]
    sample_ratio: float
    response_rates: float


def decide(rows: Rows, outcomes: Sequence[Outcome], plan: Plan) -> Decision:
    """What to do now, from all rows since the start.

    Harm rolls back even where a check holds: a candidate that people stop answering to is not to stay for it. A commit
    needs every check passed, every guardrail shown, and one ``success`` outcome or more shown better (their alpha is
    split). Without rows nothing is shown, so it holds. Raises ValueError on shapes that differ, a propensity outside
    (0, 1), a value outside its bounds, and outcomes that can't decide.
    """
    _check(rows, outcomes)
    successes = [outcome for outcome in outcomes if outcome.role == "success"]
    differences = tuple(
        _difference(
            rows,
            outcome,
            plan,
            plan.alpha_commit / (len(successes) if outcome.role == "success" else 1),
            plan.alpha_rollback / len(outcomes),
        )
        for outcome in outcomes
    )
    by_name = {difference.name: difference for difference in differences}
    ratio = float(sample_ratio(rows.candidate, rows.propensities).max(initial=1.0))
    responses = max(_response_rates(rows, outcome.name, plan.response_margin) for outcome in successes)
    needed = 2 / plan.alpha_checks
    holds = []
    if ratio >= needed:
        shares = (
            f"{rows.candidate.mean():.2%} of {len(rows.candidate)} sources instead of {rows.propensities.mean():.2%}"
        )
        holds.append(f"sample-ratio mismatch: the candidate has {shares}; look for what is lost on the way")
    if responses >= needed * len(successes):
        holds.append("response rates differ between the arms, so those who answer are not comparable")
    harmed = [outcome for outcome in outcomes if by_name[outcome.name].harm_at is not None]
    gained = [outcome for outcome in successes if by_name[outcome.name].gain_at is not None]
    unsafe = [outcome for outcome in outcomes if outcome.role == "guardrail" and by_name[outcome.name].gain_at is None]
    if harmed:
        decision: Literal["commit", "hold", "roll back"] = "roll back"
        reasons = [_say(by_name[outcome.name], "is shown to be worse") for outcome in harmed]
    elif gained and not unsafe and not holds:
        decision = "commit"
        reasons = [_say(by_name[outcome.name], "is shown to be better") for outcome in gained]
    else:
        decision = "hold"
        reasons = [_say(by_name[outcome.name], "is not shown to be within its margin") for outcome in unsafe]
        reasons += [] if gained else [_say(by_name[outcome.name], "is not shown to be better") for outcome in successes]
    return Decision(decision, tuple(reasons), tuple(holds), differences, ratio, responses)


def one_row_per_source(
    sources: ArrayLike,
    candidate: ArrayLike,
    propensities: ArrayLike,
    at: ArrayLike,
    values: Mapping[str, ArrayLike],
    *,
    window_s: float,
    now: float,
    known_at: Mapping[str, ArrayLike] | None = None,
    covariates: Mapping[str, ArrayLike] | None = None,
    predictions: Mapping[str, ArrayLike] | None = None,
) -> Rows:
    """Rows from interactions [n]: who (``sources``), which arm, with what probability, and when (``at``, seconds).

    A source's row closes ``window_s`` after its first interaction and has what was known by then: ``values`` [n] of
    each outcome, NaN without one, that arrived at ``known_at`` [n] (of an outcome not in it: at ``at``). ``covariates``
    [n] are of the source, read at its first interaction; ``predictions`` [n] of every interaction. Only rows closed by
    ``now`` are returned.
    """
    when = np.asarray(at, np.float64)
    n = len(when)
    chosen, shares = np.asarray(candidate, bool), np.asarray(propensities, np.float64)
    if not len(sources := np.asarray(sources)) == len(chosen) == len(shares) == n:
        raise ValueError(f"{len(sources)} sources, {len(chosen)} arms, {len(shares)} propensities and {n} times differ")
    order = np.argsort(when, kind="stable")
    _, first, codes = np.unique(sources[order], return_index=True, return_inverse=True)
    source = np.empty(n, np.int64)
    source[order] = codes
    first = order[first]  # each source's first interaction
    closes = when[first] + window_s
    its_arm = chosen == chosen[first][source]
    inside = its_arm & (when <= closes[source])
    rows = np.argsort(when[first], kind="stable")
    rows = rows[closes[rows] <= now]

    def mean(column: ArrayLike, arrived: ArrayLike) -> Floats:
        numbers = np.asarray(column, np.float64)
        counted = inside & ~np.isnan(numbers) & (np.asarray(arrived, np.float64) <= closes[source])
        sums = np.bincount(source[counted], numbers[counted], minlength=len(first))
        counts = np.bincount(source[counted], minlength=len(first))
        return np.divide(sums, counts, out=np.full(len(first), np.nan), where=counts > 0)[rows]

    arrivals = {name: np.asarray((known_at or {}).get(name, when), np.float64) for name in values}
    late = sum(
        int((~np.isnan(np.asarray(column, np.float64)) & (arrivals[name] > closes[source])).sum())
        for name, column in values.items()
    )
    return Rows(
        candidate=chosen[first][rows],
        propensities=shares[first][rows],
        values={name: mean(column, arrivals[name]) for name, column in values.items()},
        covariates={name: np.asarray(column, np.float64)[first][rows] for name, column in (covariates or {}).items()},
        predictions={name: mean(column, when) for name, column in (predictions or {}).items()},
        pending=len(first) - len(rows),
        late=late,
        crossed=len(np.unique(source[~its_arm])),
    )


def pseudo_outcomes(
    values: ArrayLike, candidate: ArrayLike, propensities: ArrayLike, covariates: ArrayLike | None = None
) -> tuple[Floats, Floats, Floats]:
    """psi [..., n] of ``values`` in [0, 1], and the least and the greatest that each could have been.

    ``candidate`` and ``propensities`` broadcast against ``values``; histories stand in leading axes. ``covariates``
    [..., n] are from before the experiment, NaN where there is none; one coefficient is fitted on earlier rows.
    """
    y, arm, share = np.broadcast_arrays(
        np.asarray(values, np.float64), np.asarray(candidate, bool), np.asarray(propensities, np.float64)
    )
    predicted = _recent(y)
    if covariates is not None:
        predicted = np.clip(predicted + _cuped(y, np.asarray(covariates, np.float64)), 0.0, 1.0)
    psi = np.where(arm, 1 / share, -1 / (1 - share)) * (y - predicted)
    low = -np.maximum(predicted / share, (1 - predicted) / (1 - share))
    high = np.maximum((1 - predicted) / share, predicted / (1 - share))
    return psi, low, high


def sample_ratio(candidate: ArrayLike, propensities: ArrayLike) -> Floats:
    """The evidence [n] after each source that the candidate is not drawn with the declared ``propensities`` [n].

    A Bayes factor of a Beta prior about the declared share against that share, which exceeds 1 / alpha with probability
    alpha at most if the share is true (Lindon and Malek 2022, "Anytime-valid inference for multinomial count data",
    NeurIPS); phases of different shares multiply.
    """
    arm, share = np.asarray(candidate, bool), np.asarray(propensities, np.float64)
    growth = np.ones(len(arm))
    for phase in np.unique(share):
        rows = np.flatnonzero(share == phase)
        chosen = arm[rows]
        seen = np.arange(len(rows)) + _RATIO_ROWS
        posterior = (_before(chosen.astype(np.float64)) + _RATIO_ROWS * phase) / seen
        growth[rows] = np.where(chosen, posterior / phase, (1 - posterior) / (1 - phase))
    return np.multiply.accumulate(growth)


def prediction_powered(
    values: ArrayLike, predictions: ArrayLike, counted: ArrayLike | None = None
) -> tuple[Floats, Floats]:
    """The mean of all rows, labelled or not, and its variance, after each row [n]: NaN before there are two labels.

    ``values`` are NaN where there is no label; ``predictions`` are of every row; only rows that are ``counted`` are.
    PPI++ for a mean, with its power tuning (Angelopoulos, Duchi and Zrnic 2023, arXiv 2311.01453, example 6.1): the
    mean of y - lambda f over labelled rows plus lambda times the mean of f over the others, lambda = cov(y, f) /
    ((1 + n / N) var f). It is consistent whatever the predictions are worth, if labelled rows are like the others.
    """
    y, f = np.asarray(values, np.float64), np.asarray(predictions, np.float64)
    rows = np.ones(len(y), bool) if counted is None else np.asarray(counted, bool)
    labelled, others = rows & ~np.isnan(y), rows & np.isnan(y)
    y = np.where(labelled, y, 0.0)

    def total(column: Floats, where: Bools) -> Floats:
        return np.cumsum(np.where(where, column, 0.0))

    with np.errstate(invalid="ignore", divide="ignore"):
        n, m = total(np.ones(len(y)), labelled), total(np.ones(len(y)), others)
        mean_y, mean_f = total(y, labelled) / n, total(f, labelled) / n
        covariance = total(y * f, labelled) / n - mean_y * mean_f
        var_y, var_f = total(y * y, labelled) / n - mean_y**2, total(f * f, labelled) / n - mean_f**2
        elsewhere = total(f, others) / m
        var_elsewhere = total(f * f, others) / m - elsewhere**2
        overall = total(f * f, rows) / (n + m) - (total(f, rows) / (n + m)) ** 2
        tuned = covariance / ((1 + n / m) * overall)
        tuned = np.where((m >= 2) & (overall > 1e-12), tuned, 0.0)
        rectifier = var_y - 2 * tuned * covariance + tuned**2 * var_f
        used = tuned != 0
        mean = mean_y + np.where(used, tuned * (elsewhere - mean_f), 0.0)
        variance = np.maximum(rectifier, 0.0) / (n - 1) + np.where(used, tuned**2 * var_elsewhere / m, 0.0)
    return np.where(n >= 2, mean, np.nan), np.where(n >= 2, variance, np.nan)


def mixture(difference: Floats, variance: Floats, mean: float, effect: float) -> Floats:
    """The evidence [n] of estimates [n] with their ``variance`` against "the difference is at most ``mean``".

    The likelihood ratio of a half-normal effect of scale ``effect`` to ``mean``: Robbins' mixture, one-sided, as in
    Waudby-Smith et al. 2024 ("Time-uniform central limit theory and asymptotic confidence sequences", Annals of
    Statistics 52), in units of information 1 / variance. It holds at all times from a large enough sample on; 1 where
    an estimate or its variance is missing.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        shift = (difference - mean) * effect / np.sqrt(variance * (variance + effect**2))
        found = np.log(2) - np.log1p(effect**2 / variance) / 2 + shift**2 / 2 + log_ndtr(shift)
    return np.exp(np.where(np.isfinite(found), np.minimum(found, 700.0), 0.0))


def _difference(rows: Rows, outcome: Outcome, plan: Plan, alpha_gain: float, alpha_harm: float) -> Difference:
    """Everything about one outcome, computed on [0, 1] with 1 the best and turned back."""
    above, below, estimate, has = _evidence(rows, outcome, plan)
    low, high = outcome.bounds
    span = high - low
    guardrail = outcome.role == "guardrail"
    gain = above((-outcome.margin if guardrail else outcome.margin) / span)
    harm = below((outcome.margin if guardrail else outcome.rollback_margin) / span)
    worst, best = (
        greatest_refuted(above, alpha_gain, -1.0, 1.0),
        -greatest_refuted(below, alpha_harm, -1.0, 1.0),
    )
    if not outcome.higher_is_better:
        estimate, worst, best = -estimate, -best, -worst
    return Difference(
        name=outcome.name,
        value=estimate * span,
        low=worst * span,
        high=best * span,
        candidates=int((has & rows.candidate).sum()),
        controls=int((has & ~rows.candidate).sum()),
        gain=float(gain.max(initial=1.0)),
        harm=float(harm.max(initial=1.0)),
        gain_at=_at(gain, alpha_gain),
        harm_at=_at(harm, alpha_harm),
    )


def _evidence(rows: Rows, outcome: Outcome, plan: Plan) -> tuple[Path, Path, float, Bools]:
    """Paths of evidence against "not better by c" and "not worse by c", the estimate, and which rows have a value."""
    low, high = outcome.bounds

    def scaled(column: Floats) -> Floats:
        unit = (column - low) / (high - low)
        return unit if outcome.higher_is_better else 1 - unit

    y = scaled(rows.values[outcome.name])
    has = ~np.isnan(y)
    if outcome.predicted:
        f = scaled(rows.predictions[outcome.name])
        arms = [prediction_powered(y, f, rows.candidate == arm) for arm in (True, False)]
        enough = np.min([np.cumsum(has & (rows.candidate == arm)) for arm in (True, False)], axis=0) >= plan.min_labels
        delta = arms[0][0] - arms[1][0]
        variance = np.where(enough, arms[0][1] + arms[1][1], np.nan)
        value = float(delta[-1]) if len(delta) else float("nan")
        return (
            lambda c: mixture(delta, variance, c, plan.effect),
            lambda c: mixture(-delta, variance, c, plan.effect),
            value,
            has,
        )
    covariates = rows.covariates.get(outcome.name)
    psi, least, most = pseudo_outcomes(
        y[has], rows.candidate[has], rows.propensities[has], None if covariates is None else covariates[has]
    )
    return (
        lambda c: wealth_path(psi, least, c),
        lambda c: wealth_path(-psi, -most, c),
        float(psi.mean()) if len(psi) else float("nan"),
        has,
    )


def _response_rates(rows: Rows, name: str, margin: float) -> float:
    """The highest evidence so far that the arms' shares of what has a value differ by more than ``margin``."""
    has = ~np.isnan(rows.values[name])
    tested = [has, rows.responded[name]] if name in rows.responded else [has]  # what selects rows, and what people do
    paths = []
    for responded in tested:
        psi, low, high = pseudo_outcomes(responded, rows.candidate, rows.propensities)
        paths += [wealth_path(psi, low, margin), wealth_path(-psi, -high, margin)]
    return float(np.mean(paths, axis=0).max(initial=1.0))


def _cuped(y: Floats, x: Floats) -> Floats:
    """What each row's covariate adds to the prediction of its outcome, by least squares on the rows before it."""
    known = ~np.isnan(x)
    filled = np.where(known, x, 0.0)
    count = _before(known.astype(np.float64))
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_x, mean_y = _before(filled) / count, _before(np.where(known, y, 0.0)) / count
        covariance = _before(filled * y) / count - mean_x * mean_y
        variance = _before(filled**2) / count - mean_x**2
        slope = covariance / variance
        found = slope * (filled - mean_x)
    return np.where(known & (count >= 10) & (variance > 1e-12), found, 0.0)


def _recent(y: Floats) -> Floats:
    """The mean of the last rows before each, from 0.5 on: what drifts through a day leaves little in y less this.

    Else a drift would count as an effect wherever the arms differ in which of their rows have a value.
    """
    predicted, current = np.empty_like(y), np.full(y.shape[:-1], 0.5)
    for i in range(y.shape[-1]):
        predicted[..., i] = current
        current = current + (y[..., i] - current) / min(i + 1 + _PRIOR_ROWS, _RECENT_ROWS)
    return predicted


def _before(values: Floats) -> Floats:
    """Sums along the last axis of what stands before each entry."""
    return np.cumsum(values, axis=-1) - values


def _at(path: Floats, alpha: float) -> int | None:
    return (int(first_crossing(path, alpha)) or None) if len(path) else None


def _say(difference: Difference, what: str) -> str:
    if not difference.candidates or not difference.controls:
        return (
            f"{difference.name} {what}: {difference.candidates} rows of the candidate and {difference.controls} of the "
            "control have a value"
        )
    return (
        f"{difference.name} {what}: {difference.value:+.4f}, [{difference.low:+.4f}, {difference.high:+.4f}] at any "
        f"time, from {difference.candidates} rows of the candidate and {difference.controls} of the control"
    )


def _check(rows: Rows, outcomes: Sequence[Outcome]) -> None:
    n = len(rows.candidate)
    if not any(outcome.role == "success" for outcome in outcomes):
        raise ValueError("no outcome has the role success, so nothing could ever be shown to be better")
    if rows.propensities.shape != (n,) or ((rows.propensities <= 0) | (rows.propensities >= 1)).any():
        raise ValueError(f"propensities must lie between 0 and 1, one for each of {n} rows")
    for outcome in outcomes:
        low, high = outcome.bounds
        if outcome.role == "guardrail" and outcome.margin <= 0:
            raise ValueError(f"the guardrail {outcome.name} needs a margin above 0, got {outcome.margin:g}")
        if outcome.predicted and outcome.name not in rows.predictions:
            raise ValueError(f"outcome {outcome.name} is to be predicted and has no predictions")
        if outcome.predicted and len(np.unique(rows.propensities)) > 1:
            raise ValueError(
                f"outcome {outcome.name} is predicted, which compares plain means: the candidate's share must stay the "
                f"same, and it was {rows.propensities.min():g} to {rows.propensities.max():g}"
            )
        if (values := rows.values[outcome.name]).shape != (n,):
            raise ValueError(f"outcome {outcome.name} has values of shape {values.shape} for {n} rows")
        outside = (values < low) | (values > high)
        if outside.any():
            at = int(outside.argmax())
            raise ValueError(f"outcome {outcome.name} is {values[at]:g} in row {at}, outside [{low:g}, {high:g}]")
