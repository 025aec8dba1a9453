"""From components to a reward: the weighted mean of those that are there, vectorised over a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feedback.schema import REWARDS

_NO_REASON = "no reason given"


@dataclass(frozen=True)
class Composed:
    """A batch of rewards."""

    reward: pa.Array
    components: pa.Array
    missing: pa.Array


def compose(
    names: Sequence[str], weights: Sequence[float], values: Sequence[pa.Array], reasons: Sequence[pa.Array]
) -> Composed:
    """Reward, components and missing of each row, as the columns of ``rewards``.

    weights: above 0, one a component. values: a finite number or null a row. reasons: why a value is null.
    A row without any component has no reward.
    """
    table = np.column_stack([value.to_numpy(zero_copy_only=False).astype(np.float64) for value in values])
    absent = np.isnan(table)
    weight = ~absent @ np.asarray(weights, dtype=np.float64)
    total = np.where(absent, 0.0, table) @ np.asarray(weights, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        reward = pa.array(total / weight, mask=weight == 0)
    keys = pa.array(names, pa.string())
    return Composed(
        reward,
        _maps("components", ~absent, keys, pa.array(table[~absent])),
        _maps("missing", absent, keys, _of_rows(reasons, absent)),
    )


def _maps(column: str, there: NDArray[np.bool_], keys: pa.Array, items: pa.Array) -> pa.Array:
    """A map a row, with an entry for each component that is ``there``; ``items`` are theirs, row after row."""
    offsets = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(np.int32)
    component = np.nonzero(there)[1]
    kind = REWARDS.field(column).type
    return pa.MapArray.from_arrays(pa.array(offsets), keys.take(pa.array(component)), items).cast(kind)


def _of_rows(reasons: Sequence[pa.Array], absent: NDArray[np.bool_]) -> pa.Array:
    row, component = np.nonzero(absent)
    joined = pa.concat_arrays([reason.cast(pa.string()) for reason in reasons])
    return joined.take(pa.array(component * len(absent) + row)).fill_null(_NO_REASON)
