"""A candidate against the control on live traffic: commit, hold or roll back, decided at any time.

The unit is a source: what the assignment draws for, a user, else a session, else (in a switchback) a block of time. A
source is one row, which closes a fixed time after its first interaction and never changes afterwards; so its thumbs
are one voice, however many. Rows are read in the order in which they close.

Each row i becomes an unbiased estimate of the difference of means, candidate less control,

    psi_i = (A_i - pi_i) / (pi_i (1 - pi_i)) * (Y_i - m_i)

with A_i 1 for the candidate, pi_i the share that the candidate was drawn with, and m_i what earlier rows, and what this
source did before the experiment, predict of the outcome Y_i in [0, 1]. That is the doubly robust term of Waudby-Smith
et al. 2022 ("Anytime-valid off-policy inference for contextual bandits", arXiv 2210.10768), and with a covariate it is
CUPED (Deng et al. 2013). Where every interaction has a prediction and few a value, Y_i can be prediction-powered. Both
have a coefficient that is fitted on the rows before i alone, so psi_i stays unbiased, and within bounds that are known
before it. As psi is bounded row by row, a bettor against "the mean is at most c" who stakes a fixed
share f of what the worst row could cost multiplies its wealth by 1 + f (psi - c) / (c - low) and gains nothing on
average if the statement is true; the mean wealth of several f exceeds 1 / alpha with probability alpha at most, ever
(Ville; Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting", JRSS B 86). No
distribution is assumed, the share may change from phase to phase, and the effect may drift.

Decisions read the highest wealth so far, so they depend on rows alone and not on when somebody looked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evaluation.statistics.intervals import Floats
from evaluation.statistics.wealth import FRACTIONS, POWERED_FRACTIONS, first_crossing, greatest_refuted, wealth_path

Bools = NDArray[np.bool_]

_PRIOR_ROWS: Final = 2.0  # rows at 0.5 that the prediction of an outcome starts from
_RECENT_ROWS: Final = 20.0  # rows that the prediction rests on, about
_SLOPE_ROWS: Final = 10  # rows before a coefficient is taken from them
_RATIO_ROWS: Final = 100.0  # prior rows at the declared shares in the sample-ratio test: mismatches of some 5 points


@dataclass(frozen=True)
class Rows:
    """One row per source [n], in the order of closing.

    ``candidate``: whether it was assigned to the candidate, ``propensities``: with what probability, ``values``: the
    mean of each outcome over the source's interactions, NaN without one. ``covariates``: each outcome's mean before the
    experiment less the mean of all, NaN for the new. ``predictions``: each outcome's predicted mean over all
    interactions of the source that could have had a value, weighted as those that have one; ``labelled_predictions``:
    over these; within the outcome's bounds, NaN without one. ``responded``: the share of the source's interactions with
    a value of each outcome; without it, whether there is one. ``pending`` sources have not closed yet, ``late`` values
    came after their row had closed and count for nothing, ``crossed`` sources were served by both arms and count for
    the one that they met first.
    """

    candidate: Bools
    propensities: Floats
    values: Mapping[str, Floats]
    covariates: Mapping[str, Floats] = field(default_factory=dict)
    predictions: Mapping[str, Floats] = field(default_factory=dict)
    labelled_predictions: Mapping[str, Floats] = field(default_factory=dict)
    responded: Mapping[str, Floats] = field(default_factory=dict)
    pending: int = 0
    late: int = 0
    crossed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What is compared, in its own units. ``bounds`` are declared; latency and length have those of the server.

    ``margin``, above 0 for a guardrail: how much worse the candidate may be. ``success`` outcomes must be shown better
    by more than their margin. ``predicted``: rows are ``prediction_powered`` where they have predictions, which suits
    outcomes that few interactions have.
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
    that is let pass.
    """

    alpha_commit: float = 0.05
    alpha_rollback: float = 0.05
    alpha_checks: float = 0.01
    response_margin: float = 0.0


@dataclass(frozen=True)
class Difference:
    """Candidate less control in the outcome's units, with a confidence sequence, of n rows per arm.

    ``value`` is the mean of psi, which the bounds are about; while rows are few, what is expected of them moves it far
    from what was seen. ``observed`` is that: the difference of the arms' means, rows weighted by the inverse of how
    likely their arm was (Hajek), None until both have a row. ``low`` holds at 1 - alpha_commit and ``high`` at 1 -
    alpha_rollback (split between outcomes) where higher is better, the other way round where lower is. ``gain`` and
    ``harm``: the highest e-value so far against "not better than the margin" and "not worse than the rollback margin".
    ``harm_at``: the number of rows, closed and with a value, at which harm was shown first. ``earlier`` rows had a
    covariate and ``predicted`` ones predictions; ``variance_ratio``: the variance that these left, as a share of that
    without them.
    """

    name: str
    value: float
    observed: float | None
    low: float
    high: float
    candidates: int
    controls: int
    gain: float
    harm: float
    gain_at: int | None
    harm_at: int | None
    earlier: int = 0
    predicted: int = 0
    variance_ratio: float = 1.0


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
        open_ones = [(outcome.name, "is not shown to be within its margin") for outcome in unsafe]
        open_ones += [] if gained else [(outcome.name, "is not shown to be better") for outcome in successes]
        reasons = [_say(by_name[name], what, shown=False) for name, what in open_ones]
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
    [n] are of the source, read at its first interaction; ``predictions`` [n] of every interaction, of which those with
    a value by then are the labelled ones. Only rows closed by ``now`` are returned.
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
        labelled_predictions={
            name: mean(np.where(np.isnan(np.asarray(values[name], np.float64)), np.nan, column), arrivals[name])
            for name, column in (predictions or {}).items()
        },
        pending=len(first) - len(rows),
        late=late,
        crossed=len(np.unique(source[~its_arm])),
    )


def pseudo_outcomes(
    values: ArrayLike,
    candidate: ArrayLike,
    propensities: ArrayLike,
    covariates: ArrayLike | None = None,
    *,
    power: ArrayLike = 0.0,
) -> tuple[Floats, Floats, Floats]:
    """psi [..., n] of ``values`` in [0, 1], and the least and the greatest that each could have been.

    ``candidate`` and ``propensities`` broadcast against ``values``; histories stand in leading axes. ``covariates``
    [..., n] are from before the experiment, less their mean then, NaN where there is none. They move what is expected
    of a row by theta (x - recent mean of x), with a theta that is fitted on earlier rows, within [0, 1]. Values that
    are ``prediction_powered`` lie in [-power, 1 + power], with the ``power`` [..., n] of each.
    """
    y, arm, share, wider = np.broadcast_arrays(
        np.asarray(values, np.float64),
        np.asarray(candidate, bool),
        np.asarray(propensities, np.float64),
        np.asarray(power, np.float64),
    )
    expected = _recent(np.clip(y, 0.0, 1.0), 0.5)
    if covariates is not None:
        x = np.nan_to_num(np.broadcast_to(np.asarray(covariates, np.float64), y.shape))
        shift = x - _recent(x, 0.0)
        expected = np.clip(expected + _slope(y - expected, shift) * shift, 0.0, 1.0)
    psi = np.where(arm, 1 / share, -1 / (1 - share)) * (y - expected)
    above, below = 1 + wider - expected, expected + wider
    return psi, -np.maximum(below / share, above / (1 - share)), np.maximum(above / share, below / (1 - share))


def prediction_powered(
    values: ArrayLike, predictions: ArrayLike, labelled_predictions: ArrayLike
) -> tuple[Floats, Floats]:
    """Each row's value [..., n] by all its responses, labelled or not, and the power lambda [..., n] that it has.

    ``values`` y in [0, 1] are the means over what is labelled, ``predictions`` f in [0, 1] those over all responses of
    the row, and ``labelled_predictions`` g those over the labelled ones; NaN where there is none. A row becomes
    lambda f + (y - lambda g), in [-lambda, 1 + lambda]: the mean prediction over all, and the mean of what the
    predictions lack where that is known (Angelopoulos et al. 2023, "Prediction-powered inference", Science 382). Its
    mean is that of y whatever the predictions are worth if E[f - g] = 0 in both arms: f must give each response the
    weight that it has in g on average over which ones are labelled.

    lambda in [0, 1] is the power tuning of PPI++ (Angelopoulos, Duchi and Zrnic 2023, arXiv 2311.01453): the
    coefficient that leaves the least variance, here by least squares on the rows before, so that each row is unbiased
    given those.
    """
    y = np.asarray(values, np.float64)
    gap = np.nan_to_num(np.asarray(predictions, np.float64) - np.asarray(labelled_predictions, np.float64))
    power = np.clip(-_slope(y - _recent(y, 0.5), gap), 0.0, 1.0)
    return y + power * gap, power


def sample_ratio(candidate: ArrayLike, propensities: ArrayLike) -> Floats:
    """The evidence [n] after each source that the candidate is not drawn with the declared ``propensities`` [n].

    A Bayes factor of a Beta prior about the declared share against that share, which exceeds 1 / alpha with probability
    alpha at most if the share is true (Lindon and Malek 2022, "Anytime-valid inference for multinomial count data",
    NeurIPS); phases of different shares multiply. Shares that are equal to 9 digits are of one phase, as a control's
    row has 1 - (1 - 0.1), which is not quite 0.1.
    """
    arm, share = np.asarray(candidate, bool), np.asarray(propensities, np.float64)
    growth = np.ones(len(arm))
    digits = np.round(share, 9)
    for digit in np.unique(digits):
        rows = np.flatnonzero(digits == digit)
        chosen, phase = arm[rows], share[rows[0]]
        seen = np.arange(len(rows)) + _RATIO_ROWS
        posterior = (_before(chosen.astype(np.float64)) + _RATIO_ROWS * phase) / seen
        growth[rows] = np.where(chosen, posterior / phase, (1 - posterior) / (1 - phase))
    return np.multiply.accumulate(growth)


def _difference(rows: Rows, outcome: Outcome, alpha_gain: float, alpha_harm: float) -> Difference:
    """Everything about one outcome, computed on [0, 1] with 1 the best and turned back."""
    low, high = outcome.bounds
    span = high - low
    has = ~np.isnan(rows.values[outcome.name])

    def unit(columns: Mapping[str, Floats]) -> Floats:
        scaled = (_column(columns, outcome.name, has) - low) / span
        return scaled if outcome.higher_is_better else 1 - scaled

    y, arm, share = unit(rows.values), rows.candidate[has], rows.propensities[has]
    predictions, labelled = unit(rows.predictions), unit(rows.labelled_predictions)
    covariates = _column(rows.covariates, outcome.name, has)
    predicted, earlier = ~np.isnan(predictions - labelled) & outcome.predicted, ~np.isnan(covariates)
    powered, power = prediction_powered(y, predictions, labelled) if outcome.predicted else (y, np.zeros(len(y)))
    fractions = POWERED_FRACTIONS if outcome.predicted else FRACTIONS
    psi, least, most = pseudo_outcomes(powered, arm, share, covariates if earlier.any() else None, power=power)
    adjusted = bool(predicted.any() or earlier.any())

    def above(c: float) -> Floats:
        return wealth_path(psi, least, c, fractions)

    def below(c: float) -> Floats:
        return wealth_path(-psi, -most, c, fractions)

    guardrail = outcome.role == "guardrail"
    gain = above((-outcome.margin if guardrail else outcome.margin) / span)
    harm = below((outcome.margin if guardrail else outcome.rollback_margin) / span)
    estimate = float(psi.mean()) if len(psi) else float("nan")
    worst, best = (
        greatest_refuted(above, alpha_gain, -1.0, 1.0),
        -greatest_refuted(below, alpha_harm, -1.0, 1.0),
    )
    if not outcome.higher_is_better:
        estimate, worst, best = -estimate, -best, -worst
    return Difference(
        name=outcome.name,
        value=estimate * span,
        observed=_observed(rows.values[outcome.name][has], arm, share),
        low=worst * span,
        high=best * span,
        candidates=int(arm.sum()),
        controls=int((~arm).sum()),
        gain=float(gain.max(initial=1.0)),
        harm=float(harm.max(initial=1.0)),
        gain_at=_at(gain, alpha_gain),
        harm_at=_at(harm, alpha_harm),
        earlier=int(earlier.sum()),
        predicted=int(predicted.sum()),
        variance_ratio=_ratio(psi, pseudo_outcomes(y, arm, share)[0]) if adjusted else 1.0,
    )


def _observed(values: Floats, arm: Bools, share: Floats) -> float | None:
    """The difference of the arms' mean ``values`` [n], each weighted by the inverse of its arm's probability."""
    if arm.all() or not arm.any():
        return None
    return float(
        np.average(values[arm], weights=1 / share[arm]) - np.average(values[~arm], weights=1 / (1 - share[~arm]))
    )


def _column(columns: Mapping[str, Floats], name: str, has: Bools) -> Floats:
    """The rows that have a value; NaN where there is no such column."""
    return columns[name][has] if name in columns else np.full(int(has.sum()), np.nan)


def _ratio(adjusted: Floats, plain: Floats) -> float:
    """The variance that is left."""
    return float(adjusted.var() / plain.var()) if len(plain) and plain.var() > 0 else 1.0


def _response_rates(rows: Rows, name: str, margin: float) -> float:
    """The highest evidence so far that the arms' shares of what has a value differ by more than ``margin``."""
    has = ~np.isnan(rows.values[name])
    tested = [has, rows.responded[name]] if name in rows.responded else [has]  # what selects rows, and what people do
    paths = []
    for responded in tested:
        psi, low, high = pseudo_outcomes(responded, rows.candidate, rows.propensities)
        paths += [wealth_path(psi, low, margin), wealth_path(-psi, -high, margin)]
    return float(np.mean(paths, axis=0).max(initial=1.0))


def _slope(y: Floats, x: Floats) -> Floats:
    """The coefficient [..., n] of ``y`` on ``x`` by least squares through 0, on the rows before each.

    A row where x is 0 says nothing; before there are a few others, the coefficient is 0.
    """
    before = _before(x * x)
    slope = np.divide(_before(x * y), before, out=np.zeros(y.shape), where=before > 1e-12)
    return np.where(_before((x != 0).astype(np.float64)) >= _SLOPE_ROWS, slope, 0.0)


def _recent(y: Floats, first: float) -> Floats:
    """The mean [..., n] of the last rows before each, from ``first`` on.

    What drifts through a day leaves little in y less this. Else a drift would count as an effect wherever the arms
    differ in which of their rows have a value.
    """
    means, current = np.empty_like(y), np.full(y.shape[:-1], first)
    for i in range(y.shape[-1]):
        means[..., i] = current
        current = current + (y[..., i] - current) / min(i + 1 + _PRIOR_ROWS, _RECENT_ROWS)
    return means


def _before(values: Floats) -> Floats:
    """Sums along the last axis of what stands before each entry."""
    return np.cumsum(values, axis=-1) - values


def _at(path: Floats, alpha: float) -> int | None:
    return (int(first_crossing(path, alpha)) or None) if len(path) else None


def _say(difference: Difference, what: str, *, shown: bool = True) -> str:
    """A reason. One that decided has the estimate that its bounds are about, any other one what was seen so far."""
    if difference.observed is None:
        return (
            f"{difference.name} {what}: {difference.candidates} rows of the candidate and {difference.controls} of the "
            "control have a value"
        )
    none_yet = "no difference seen yet, " if difference.low <= 0 <= difference.high else ""
    found = f"{difference.value:+.4f}" if shown else f"{none_yet}observed {difference.observed:+.4f}"
    return (
        f"{difference.name} {what}: {found}, [{difference.low:+.4f}, {difference.high:+.4f}] at any "
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
        if (values := rows.values[outcome.name]).shape != (n,):
            raise ValueError(f"outcome {outcome.name} has values of shape {values.shape} for {n} rows")
        outside = (values < low) | (values > high)
        if outside.any():
            at = int(outside.argmax())
            raise ValueError(f"outcome {outcome.name} is {values[at]:g} in row {at}, outside [{low:g}, {high:g}]")
        for columns in (rows.predictions, rows.labelled_predictions):
            predictions = columns.get(outcome.name, np.zeros(0))
            if ((predictions < low) | (predictions > high)).any():
                raise ValueError(f"a prediction of outcome {outcome.name} is outside [{low:g}, {high:g}]")
