"""Betting where each observation has bounds of its own: the wealth after every one, in numpy.

The test and its bets are those of ``betting``, which has one pair of bounds for all and goes on from a stored state.
Here the bounds are of the row: what live traffic allows changes with the share of traffic and with what is predicted.
Multiplications and additions in order alone, so that a verdict can be recomputed to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evaluation.statistics.intervals import Floats

# Fewer than ``betting`` has, about those that pay off for differences of 3 to 20 points between two arms: with its
# sixteen, a loss of 5 points of 70 is shown after 2,540 thumbs in the median, with these after 2,080.
FRACTIONS: Floats = np.array([0.02, 0.04, 0.08, 0.16, 0.32])
# Where values are prediction-powered, the bounds are up to three times as wide, so that these stake about as much: harm
# of 5 points is shown after 730 rows (20 responses, two with a thumb) in the median, and with those above after 1,150.
POWERED_FRACTIONS: Floats = 2.5 * FRACTIONS


def wealth_path(values: ArrayLike, low: ArrayLike, mean: float, fractions: Floats = FRACTIONS) -> Floats:
    """The wealth [..., n] after each of ``values`` [..., n] of a bettor against "their mean is at most ``mean``".

    ``low`` [..., n] or one number: the least that each value could have been, known before it, and below ``mean``. The
    bettor's capital is split over constant ``fractions`` of the largest stake that can't go bankrupt. Under the
    hypothesis the wealth exceeds 1 / alpha at any time with probability alpha at most (Ville; Waudby-Smith and Ramdas
    2024, "Estimating means of bounded random variables by betting", JRSS-B 86).
    """
    x = np.asarray(values, np.float64)
    payoffs = (x - mean) / (mean - np.asarray(low, np.float64))
    total = np.zeros(x.shape)
    with np.errstate(over="ignore", under="ignore"):
        for fraction in fractions:
            total += np.multiply.accumulate(fraction * payoffs + 1, axis=-1)
    return total / len(fractions)


def first_crossing(path: Floats, alpha: float) -> NDArray[np.int64]:
    """How many rows [...] it takes ``path`` [..., n] to reach 1 / ``alpha``; 0 if it does not."""
    crossed = path * alpha >= 1
    return np.where(crossed.any(axis=-1), crossed.argmax(axis=-1) + 1, 0) if path.shape[-1] else np.zeros(0, np.int64)


def greatest_refuted(path: Callable[[float], Floats], alpha: float, low: float, high: float) -> float:
    """The greatest mean in (low, high) that ``path`` has ever refuted at ``alpha``, to 1e-5 of the range; else ``low``.

    That is the lower end, at level ``alpha``, of a confidence sequence: evidence falls as the mean that it is against
    rises.
    """
    refuted, standing = low, high
    while standing - refuted > 1e-5 * (high - low):
        middle = (refuted + standing) / 2
        if path(middle).max(initial=0.0) * alpha >= 1:
            refuted = middle
        else:
            standing = middle
    return refuted
