"""Slices of tensors, and where FSDP2 puts them.

A *box* is a slice of a tensor: (start, stop) for each of its dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Box = tuple[tuple[int, int], ...]


class ReshardError(RuntimeError):
    """The weights could not be resharded; the text names the tensor and the layer."""


@dataclass(frozen=True)
class Held:
    """Where a tensor of ``shape`` is: its ``shards`` (they cover it, none is empty), each with the ranks that hold it,
    ascending."""

    shape: tuple[int, ...]
    shards: tuple[tuple[Box, tuple[int, ...]], ...]


def shards_of(shape: Sequence[int], mesh: Any, placements: Sequence[int | None]) -> Held:
    """Where a tensor is that FSDP2 has sharded.

    Args:
        mesh: int [...], the ranks of the device mesh.
        placements: for each dimension of the mesh the dimension of the tensor that it shards, in chunks as
            ``torch.chunk`` makes them, or None where it holds replicas.
    """
    ranks = np.asarray(mesh)
    holders: dict[Box, list[int]] = {}
    for place in np.ndindex(ranks.shape):
        box = tuple((0, size) for size in shape)
        for index, count, dim in zip(place, ranks.shape, placements, strict=True):
            if dim is not None:
                box = (*box[:dim], _chunk(box[dim], index, count), *box[dim + 1 :])
        if numel(box):
            holders.setdefault(box, []).append(int(ranks[place]))
    return Held(tuple(shape), tuple((box, tuple(sorted(who))) for box, who in holders.items()))


def numel(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    common = []
    for (a0, a1), (b0, b1) in zip(a, b, strict=True):
        start, stop = max(a0, b0), min(a1, b1)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The index of ``box`` in a tensor that holds ``outer``."""
    return tuple(slice(b0 - o0, b1 - o0) for (b0, b1), (o0, _) in zip(box, outer, strict=True))


def rows_of(box: Box, part: int, parts: int) -> Box:
    """Part ``part`` of ``parts`` of a box's rows."""
    if parts == 1:
        return box
    (start, stop), *rest = box
    return ((start + (stop - start) * part // parts, start + (stop - start) * (part + 1) // parts), *rest)


def _chunk(span: tuple[int, int], index: int, count: int) -> tuple[int, int]:
    start, stop = span
    size = -(-(stop - start) // count)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)
