"""Proof that generation has the weights that training has: checksums of slices, compared across ranks.

The checksum of a box of a tensor is Σ bits(x) · Π_d w_d(i_d) modulo 2⁶⁴ over its elements: bits(x) the value's bits
as an integer, i_d its index in dimension d of the whole tensor, w_d a fixed odd hash of that index. So checksums of
disjoint boxes add up to that of their union, however they are cut, and values that swap places change it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from train.weight_sync.plan import Plan
from train.weight_sync.slices import Box, ReshardError, within

if TYPE_CHECKING:
    from train.weight_sync.loader_tracing import Need
    from train.weight_sync.transfer import Group
    from train.weight_sync.vllm_writer import LiveWeights

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 16  # elements at a time: the sums are in 64 bits


class Comparison:
    """Of one resharding: what the holders of some tensors say that each rank should get, against what it got."""

    def __init__(
        self,
        names: Sequence[str],
        plan: Plan,
        group: Group,
        needs: Mapping[str, Sequence[Need]],
        target: LiveWeights | None,
        dtype: torch.dtype,
    ) -> None:
        """``names``: the tensors to compare; ``needs``: this rank's, by tensor; ``target``: None where there are none;
        ``dtype``: of generation."""
        self._plan, self._group, self._needs, self._target, self._dtype = plan, group, needs, target, dtype
        self._rows = {name: row for row, name in enumerate(names)}
        self._expected = torch.zeros(len(names), plan.ranks, dtype=torch.int64)
        self._got = torch.zeros(len(names), dtype=torch.int64)

    def sent(self, name: str, shard: Tensor) -> None:
        """This rank's shard of a tensor is all handed out."""
        if name not in self._rows:
            return
        known: dict[Box, int] = {}
        for target, box in self._plan.supplied(name):
            if box not in known:
                known[box] = checksum(shard[within(box, self._plan.own[name])], box, self._dtype)
            self._expected[self._rows[name], target] += known[box]

    def arrived(self, layer: str) -> None:
        """A layer has its weights, and its kernels have not rearranged them yet."""
        for name, row in self._rows.items():
            for need in self._needs.get(name, ()):
                if need.layer == layer:
                    assert self._target is not None, "who needs a tensor generates"
                    self._got[row] += checksum(self._target.at(need, need.box), need.box, self._dtype)

    def require_equal(self) -> None:
        """Every rank must call it. Raises ReshardError with the names of the tensors that differ."""
        self._group.sum(self._expected)
        equal = self._expected[:, self._plan.rank] == self._got
        differing = [name for name, row in self._rows.items() if not equal[row]]
        if differing:
            raise ReshardError(
                f"rank {self._plan.rank} generates with other weights than are in training: {', '.join(differing)}"
            )


def checksum(values: Tensor, box: Box, dtype: torch.dtype) -> int:
    """int64, of ``values`` (of the shape of ``box``) converted to ``dtype``."""
    if not box:
        return int(values.to(dtype).view(_INTEGERS[dtype.itemsize]))
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    rows = max(1, _CHUNK // max(1, values[0].numel() if len(values) else 1))
    for first in range(0, len(values), rows):
        part = values[first : first + rows].to(dtype).contiguous().view(_INTEGERS[dtype.itemsize]).to(torch.int64)
        start = box[0][0] + first
        spans = [(start, start + len(part)), *box[1:]]
        for dim in reversed(range(len(spans))):
            part = (part * _weights(*spans[dim], dim, part.device)).sum(-1)
        total += part
    return int(total)


def sample(tensors: Sequence[str], count: int, turn: int) -> list[str]:
    """``count`` of the tensors, others at each turn, so that all had theirs after a while."""
    count = min(count, len(tensors))
    return [tensors[(turn * count + i) % len(tensors)] for i in range(count)]


def _weights(start: int, stop: int, dim: int, device: torch.device) -> Tensor:
    """int64 [stop - start], odd: a multiplicative hash, the high bits mixed into the low ones."""
    index = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device)
    mixed = index * (-7046029254386353131 + 2 * dim)  # 2⁶⁴ / golden ratio, as a signed number
    return ((mixed ^ (mixed >> 29)) * -4658895280553007687) | 1
