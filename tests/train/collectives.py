"""Counts what a rank sends in collectives, whoever calls them: FSDP2, DTensor's tensor parallelism, or Millrace."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("allreduce", "allgather", "reducescatter", "alltoall")
SMALL = 4096
"""Bytes of a collective below which it is a count, a norm or a metric, which no plan has."""


class Collectives(TorchDispatchMode):
    """Within, bytes that this rank sends to others, by collective and the number of ranks in it.

    A ring over w ranks sends (w - 1)/w of what all-gather ends with, reduce-scatter begins with and all-to-all
    exchanges, and twice that of what all-reduce adds up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._opname, [*args, *(kwargs or {}).values()], result)
        return result

    def _count(self, name: str, given: list[Any], result: Any) -> None:
        plain = name.replace("_", "")
        kind = next((of for of in KINDS if plain.startswith(of)), None)
        largest = max((leaf.nbytes for leaf in tree_leaves([given, result]) if isinstance(leaf, Tensor)), default=0)
        if kind is None or largest < SMALL:
            return
        ranks = group_size(given)
        times = 2 if kind == "allreduce" else 1
        self.sent[kind, ranks] += times * largest * (ranks - 1) // ranks


def group_size(given: list[Any]) -> int:
    """Of the group that a collective is called with, as an object or by its name."""
    for value in given:
        if isinstance(value, torch.ScriptObject):
            try:
                return torch.distributed.ProcessGroup.unbox(value).size()
            except (RuntimeError, TypeError):
                continue
        if isinstance(value, str):
            try:
                return torch.distributed.distributed_c10d._resolve_process_group(value).size()
            except (RuntimeError, ValueError, LookupError):  # a reduction's name
                continue
    raise AssertionError(f"no group among {given}")
