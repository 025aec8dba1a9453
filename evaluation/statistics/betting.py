"""Tests and confidence sequences for the mean of bounded observations, by betting: valid at every look.

Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting", JRSS-B 86(1) (arXiv
2010.09686). A gambler who thinks the mean greater than m bets on each observation before it is seen. If the mean is m
or less, no strategy makes the wealth grow in expectation, so it is an e-process: with probability 1 - alpha it never
reaches 1/alpha (Ville's inequality), however often anybody looks and whatever makes them stop.

The strategy is a mixture of constant bets (their "diversified Kelly betting"; Cover's universal portfolio): the wealth
is split evenly over ``FRACTIONS`` of the largest bet that can't go bankrupt. That is a predictable plug-in bet, the
mean of the fractions weighted by what each has earned, and it needs no tuning to variance, skewness or the share of
items that differ. The squares put most bets where small gains among many zeros want them: for differences of +1
(6.5 % of items), -1 (3.5 %) and 0, the best constant bet is 0.3 of the largest one. With the fractions fixed the wealth
falls as m rises, so that inversion gives intervals.

What is assumed: given those before it, each observation has the mean that the hypothesis speaks of, or one on its
side. Independent draws do, and items of a bank in random order, each used once. No distribution is assumed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evaluation.statistics.intervals import Floats

FRACTIONS: Floats = ((np.arange(16) + 0.5) / 16) ** 2
"""Constant bets, as fractions of the largest one allowed; the wealth starts in equal parts on each."""

_LARGEST = float(np.finfo(np.float64).max)
_GRID = 32  # means that an inversion tries at a time
_BLOCK = 16_384  # payoffs held at once: 128 KB, which caches hold
_MANY = 128  # tests from which on a batch goes item by item


class OutOfBounds(ValueError):
    """A value lies outside the declared bounds. The message names the item, the value and the bounds."""


@dataclass(frozen=True)
class Hypothesis:
    """The null hypothesis about observations in [low, high].

    ``alternative`` is what evidence is sought for: "greater" tests "the mean is at most ``mean``", "less" tests "the
    mean is at least ``mean``". Raises ValueError unless low < mean < high.
    """

    mean: float
    low: float
    high: float
    alternative: Literal["greater", "less"] = "greater"

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.mean < self.high < math.inf:
            raise ValueError(
                f"a mean of {self.mean:g} can't be tested: it must lie within ({self.low:g}, {self.high:g})"
            )

    def payoffs(self, values: Floats) -> Floats:
        """What the largest bet earns on each value, per unit staked: -1 or more, in expectation 0 or less under H0."""
        if self.alternative == "greater":
            return (values - self.mean) / (self.mean - self.low)
        return (self.mean - values) / (self.high - self.mean)


@dataclass(frozen=True, eq=False)
class Wealth:
    """The state of a test after ``n`` observations: all that the next ones need.

    ``bets`` [16, *shape] is the wealth on each of ``FRACTIONS``, ``peak`` [*shape] the largest e-value after any
    observation so far, ``total`` [*shape] the sum of observations. The shape is () for one test, or that of a batch.
    """

    n: int
    bets: Floats
    peak: Floats
    total: Floats

    @property
    def e_value(self) -> Floats:
        """Evidence against the hypothesis after n observations, [*shape]; its expectation under H0 is 1 at most."""
        return np.asarray(np.minimum(functools.reduce(np.add, self.bets), _LARGEST))

    @property
    def mean(self) -> Floats:
        """The mean of what was observed, [*shape]; NaN while there is nothing."""
        return self.total / self.n if self.n else np.full_like(self.total, math.nan)

    def record(self) -> dict[str, Any]:
        """The state of one test as JSON can hold it, exactly; null stands for wealth beyond the largest float."""
        if self.peak.shape != ():
            raise ValueError(f"a batch of tests of shape {self.peak.shape} has no record: keep them one by one")
        bets = [float(bet) if math.isfinite(bet) else None for bet in self.bets]
        return {"n": self.n, "bets": bets, "peak": float(self.peak), "total": float(self.total)}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Wealth:
        """The state that ``record`` gave. Raises ValueError if it has another number of bets than ``FRACTIONS``."""
        bets = np.array([math.inf if bet is None else bet for bet in record["bets"]], np.float64)
        if bets.shape != FRACTIONS.shape:
            raise ValueError(f"the record has {len(bets)} bets and this version makes {len(FRACTIONS)}: begin anew")
        return cls(int(record["n"]), bets, np.array(record["peak"], np.float64), np.array(record["total"], np.float64))


def start(shape: tuple[int, ...] = ()) -> Wealth:
    """A test, or a batch of them, before its first observation: an e-value of 1."""
    bets = np.full((len(FRACTIONS), *shape), 1 / len(FRACTIONS))
    return Wealth(0, bets, np.ones(shape), np.zeros(shape))


def bet(wealth: Wealth, values: ArrayLike, hypothesis: Hypothesis, items: Sequence[Hashable] | None = None) -> Wealth:
    """The state after ``values`` [*shape, n] too, in this order.

    Going on from a state gives the very floats of one pass over everything: an observation multiplies each bet's
    wealth once, wherever a call ends. Raises OutOfBounds for a value outside the hypothesis' bounds or not finite, by
    its name in ``items`` [n], else by its number in the whole sequence.
    """
    array = np.asarray(values, np.float64)
    if array.shape[:-1] != wealth.peak.shape or array.ndim == 0:
        raise ValueError(f"values of shape {array.shape} don't go on tests of shape {wealth.peak.shape}")
    n = array.shape[-1]
    check_bounds(
        array, hypothesis.low, hypothesis.high, range(wealth.n + 1, wealth.n + 1 + n) if items is None else items
    )
    bets, peak = wealth.bets.copy(), wealth.peak
    # An observation equal to the mean changes nothing, and of paired differences most are 0.
    for e_values in _e_values(bets, array[array != hypothesis.mean] if array.ndim == 1 else array, hypothesis.payoffs):
        peak = np.maximum(peak, e_values.max(axis=-1))
    # In order, as np.sum does not add.
    total = np.add.accumulate(np.concatenate([wealth.total[..., None], array], axis=-1), axis=-1)[..., -1]
    return Wealth(wealth.n + n, bets, peak, total)


def rejects(wealth: Wealth, alpha: float | Floats) -> NDArray[np.bool_]:
    """Whether the hypothesis is rejected at level ``alpha``, [*shape]: the e-value has been 1/alpha at some look.

    A level of 0, a budget that is spent, rejects nothing.
    """
    return np.asarray(wealth.peak * alpha >= 1)


def more_items(wealth: Wealth, alpha: float) -> int | None:
    """About how many more observations a test needs to reject at ``alpha``, if they go on like those so far.

    The best constant bet's rate so far is taken to go on. None if no bet has earned anything yet, or alpha is 0.
    """
    if rejects(wealth, alpha):
        return 0
    rate = (math.log(min(float(wealth.bets.max()), _LARGEST)) + math.log(len(FRACTIONS))) / max(wealth.n, 1)
    if rate <= 0 or alpha <= 0:
        return None
    return max(1, math.ceil((-math.log(alpha) - math.log(float(wealth.e_value))) / rate))


def paired_differences(
    candidate: ArrayLike, incumbent: ArrayLike, low: float, high: float, items: Sequence[Hashable]
) -> Floats:
    """``candidate - incumbent`` [n], rewards in [low, high]: observations in [low - high, high - low].

    Raises OutOfBounds with the item's name for a reward outside the bounds, ValueError if lengths differ.
    """
    a, b = np.asarray(candidate, np.float64), np.asarray(incumbent, np.float64)
    if not a.shape == b.shape == (len(items),):
        raise ValueError(f"{len(items)} items have rewards of shape {a.shape} and {b.shape}: pairs need one of each")
    check_bounds(a, low, high, items)
    check_bounds(b, low, high, items)
    return a - b


def cluster_means(
    values: ArrayLike, clusters: Sequence[Hashable], counted: Collection[Hashable] = ()
) -> tuple[Floats, list[Hashable]]:
    """The mean of each cluster [*shape, k] of ``values`` [*shape, n], and the k clusters' names, as they appear.

    Items of a cluster (turns of a conversation, variants of a prompt) may depend on each other in any way. Clusters
    that were drawn independently don't, so a cluster is one observation. Its mean keeps the items' bounds, and the
    hypothesis is then about an item of a cluster drawn at random: a large cluster counts like a small one. (A sum
    would need a declared largest size, and bets that allow for it.)

    A cluster must be whole: one in ``counted``, of which an observation was made already, raises ValueError.
    """
    array = np.asarray(values, np.float64)
    if array.shape[-1] != len(clusters) or not len(clusters):
        raise ValueError(f"{array.shape[-1]} values for {len(clusters)} names of clusters: one each, and one or more")
    numbers: dict[Hashable, int] = {}
    of_item = np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters], np.int64)
    for cluster in numbers:
        if cluster in counted:
            raise ValueError(f"cluster {cluster!r} has been counted before: all of its items go into one observation")
    sizes = np.bincount(of_item, minlength=len(numbers))
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp)
    together = array[..., np.argsort(of_item, kind="stable")]
    means = np.add.reduceat(together, starts, axis=-1) / sizes
    return np.clip(means, array.min(), array.max()), list(numbers)  # rounding must not carry a mean out of its bounds


def interval(values: ArrayLike, low: float, high: float, alpha: float) -> tuple[float, float]:
    """The two-sided confidence interval for the mean after all of ``values`` [n]: the end of the sequence."""
    lower, upper = confidence_sequence(values, low, high, alpha)
    return (float(lower[-1]), float(upper[-1])) if len(lower) else (low, high)


def confidence_sequence(values: ArrayLike, low: float, high: float, alpha: float) -> tuple[Floats, Floats]:
    """Lower and upper confidence bounds [n] for the mean after each of ``values`` [n], in [low, high].

    With probability 1 - alpha the mean lies within all of them at once; alpha is split evenly. They only narrow
    (a running intersection). For a single bound at level alpha use ``lower_bounds`` or ``upper_bounds``.
    """
    return lower_bounds(values, low, high, alpha / 2), upper_bounds(values, low, high, alpha / 2)


def upper_bounds(values: ArrayLike, low: float, high: float, alpha: float) -> Floats:
    """Upper confidence bounds [n] at level ``alpha``, as ``lower_bounds``."""
    return -lower_bounds(-np.asarray(values, np.float64), -high, -low, alpha)


def lower_bounds(values: ArrayLike, low: float, high: float, alpha: float) -> Floats:
    """Lower confidence bounds [n] for the mean after each of ``values`` [n]: all hold with probability 1 - alpha.

    The largest mean m that the test of "at most m" has rejected by then, of a grid of means: rounded down, the last
    one by (high - low) / 32,768 at most. So where ``bet`` rejects a mean, the bound lies above it, to that precision.
    """
    array = np.asarray(values, np.float64)
    if not low < high or not 0 < alpha < 1:
        raise ValueError(f"no bound at level {alpha:g} for values in [{low:g}, {high:g}]")
    check_bounds(array, low, high, range(1, len(array) + 1))
    steps = np.arange(1, _GRID) / _GRID
    reached, width = low, high - low
    for _ in range(2):
        means = reached + width * steps
        if rejected := np.count_nonzero(_first_rejections(array, low, means, alpha) < len(array)):
            reached = float(means[rejected - 1])
        width /= _GRID
    # The way there has a grid of its own, densest at the end. It is what a chart shows.
    way = reached - (reached - low) * (1 - np.arange(1, _GRID + 1) / _GRID) ** 2 if reached > low else np.empty(0)
    means = np.concatenate([way, reached + width * steps])
    firsts = np.maximum.accumulate(_first_rejections(array, low, means, alpha))
    return np.concatenate([[low], means])[np.searchsorted(firsts, np.arange(len(array)), side="right")]


def check_bounds(values: Floats, low: float, high: float, items: Sequence[Hashable]) -> None:
    """Raises OutOfBounds for the first of ``values`` [..., n] outside [low, high] or not finite, naming its item."""
    inside = (values >= low) & (values <= high)
    if not inside.all():
        at = tuple(np.argwhere(~inside)[0])
        raise OutOfBounds(
            f"item {items[at[-1]]!r} has the value {values[at]:g}, outside the bounds [{low:g}, {high:g}]"
        )


def _first_rejections(values: Floats, low: float, means: Floats, alpha: float) -> NDArray[np.intp]:
    """Which of ``values`` [n] is the first to reject each of ``means`` [m] as an upper limit of the mean; n: none."""
    bets = start(means.shape).bets
    firsts = np.full(means.shape, len(values))
    at = 0
    column = means[:, None]
    for e_values in _e_values(bets, values[None], lambda block: (block - column) / (column - low)):
        rejected = e_values * alpha >= 1
        found = rejected.any(axis=-1) & (firsts == len(values))
        firsts[found] = at + rejected.argmax(axis=-1)[found]
        at += e_values.shape[-1]
    return firsts


def _e_values(bets: Floats, values: Floats, payoffs: Callable[[Floats], Floats]) -> Iterator[Floats]:
    """The e-values [*shape, k] after each of k values, block by block; ``bets`` [16, *shape] change in place.

    Multiplications and additions alone, in one order: the same floats on any machine, wherever a block ends, for one
    test as for a batch of them. A batch goes item by item, a few tests go bet by bet: whichever is the longer vector.
    """
    rows = bets[0].size
    block = max(16, _BLOCK // max(1, rows))
    with np.errstate(over="ignore", under="ignore"):
        for at in range(0, values.shape[-1], block):
            payoff = payoffs(values[..., at : at + block])
            e_values = (_by_item if rows > _MANY else _by_bet)(bets, payoff)
            yield np.minimum(e_values, _LARGEST, out=e_values)


def _by_item(bets: Floats, payoffs: Floats) -> Floats:
    fractions = np.empty_like(bets)  # in full: a product of whole arrays is the quicker one
    fractions.T[...] = FRACTIONS
    factors = np.empty_like(bets)
    by_item = np.ascontiguousarray(np.moveaxis(payoffs, -1, 0))
    e_values = np.empty_like(by_item)
    for payoff, e_value in zip(by_item, e_values, strict=True):
        np.multiply(fractions, payoff, out=factors)
        np.add(factors, 1, out=factors)
        np.multiply(bets, factors, out=bets)
        np.add.reduce(bets, axis=0, out=e_value)
    return np.moveaxis(e_values, 0, -1)


def _by_bet(bets: Floats, payoffs: Floats) -> Floats:
    e_values = np.zeros_like(payoffs)
    for number, fraction in enumerate(FRACTIONS):
        factors = payoffs * fraction
        factors += 1
        factors[..., 0] *= bets[number]
        np.multiply.accumulate(factors, axis=-1, out=factors)
        bets[number] = factors[..., -1]
        e_values += factors
    return e_values
