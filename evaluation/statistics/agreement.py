"""Agreement between people who judge the same things."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def krippendorff_alpha(counts: NDArray[np.int64], repeats: NDArray[np.int64]) -> float | None:
    """Krippendorff's alpha of nominal values: 1 is perfect agreement, 0 is that of chance, and below that is worse.

    Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011), section C; units with one value say nothing.

    Args:
        counts: [units, values], how many people gave each value.
        repeats: [units], how many units have these very counts.

    None where nothing can be said: no unit has two judgements, or all people gave the same value everywhere.
    """
    judged = counts.sum(axis=1)
    paired = judged >= 2
    counts, repeats, judged = counts[paired].astype(float), repeats[paired], judged[paired]
    weights = repeats / np.maximum(judged - 1, 1)
    coincidences = np.einsum("u,ui,uj->ij", weights, counts, counts) - np.diag(weights @ counts)
    totals = coincidences.sum(axis=0)
    everything = totals.sum()
    expected = everything**2 - (totals**2).sum()
    if expected == 0:
        return None
    return float(1 - (everything - 1) * (everything - np.trace(coincidences)) / expected)
