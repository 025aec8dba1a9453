"""Dispatch rules: how the argument of a call is split over the ranks of a group, and their answers joined to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from train.batch.packed import PackedBatch


@dataclass(frozen=True)
class Layout:
    """What a rule may know of a group.

    ``ranks``: how many there are. ``tensor_parallel_size``: consecutive ranks that share one generation engine.
    ``sequence_parallel_size``: consecutive ranks that share each sequence, and so one data-parallel rank. Both divide
    ``ranks``.
    """

    ranks: int
    tensor_parallel_size: int = 1
    sequence_parallel_size: int = 1


Split = tuple[list[Any], Callable[[list[Any]], Any]]
"""(the argument of each rank, what makes one answer of theirs)."""

Rule = Callable[[Layout, Any], Split]
"""Of the layout of a group and the argument of a call."""


def dispatch(rule: Rule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a worker method as callable from the driver, by ``rule``. The rule is applied to its first argument."""

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        method.__dispatch__ = rule  # type: ignore[attr-defined]
        return method

    return mark


def _first(answers: list[Any]) -> Any:
    return answers[0]


def to_all(layout: Layout, argument: Any) -> Split:
    """Every rank gets the same; rank 0's answer is the answer."""
    return [argument] * layout.ranks, _first


def to_first_engine(layout: Layout, argument: Any) -> Split:
    """The ranks of the first generation engine get the same; rank 0's answer is the answer. Not under torchrun."""
    return [argument] * layout.tensor_parallel_size, _first


def to_all_gathered(layout: Layout, argument: Any) -> Split:
    """Every rank gets the same; the answer is the list of theirs, by rank."""
    return [argument] * layout.ranks, list


def by_tokens(layout: Layout, batch: PackedBatch) -> Split:
    """A batch is split over the data-parallel ranks by sequences, balanced by tokens; the ranks agree on the answer
    among themselves."""
    return per_token(layout, batch)[0], _first


def per_token(layout: Layout, batch: PackedBatch) -> Split:
    """A batch is split as in ``by_tokens``; the answers are per-token tensors, put back in the batch's order."""
    share = layout.sequence_parallel_size
    parts = batch.balanced(layout.ranks // share)
    selected = [batch.select(part) for part in parts]

    def join(answers: list[Tensor]) -> Tensor:
        joined = torch.empty(len(batch.tokens), dtype=answers[0].dtype)
        for part, answer in zip(parts, answers[::share], strict=True):
            joined[batch.token_index(part)] = answer
        return joined

    return [selected[rank // share] for rank in range(layout.ranks)], join


def answer_and_per_token(layout: Layout, batch: PackedBatch) -> Split:
    """A batch is split as in ``by_tokens``; each answers with a pair, the first as of ``by_tokens``, the second as of
    ``per_token``."""
    parts, join = per_token(layout, batch)
    return parts, lambda answers: (answers[0][0], join([tensor for _, tensor in answers]))


def by_rank(layout: Layout, items: Sequence[Any]) -> Split:
    """A list is dealt out to the data-parallel ranks, like cards; each answers with a list as long; answers come back
    in its order."""
    return _dealt(layout.ranks, layout.sequence_parallel_size, items)


def by_engine(layout: Layout, items: Sequence[Any]) -> Split:
    """As ``by_rank``, to the generation engines: all ranks of one get the same."""
    return _dealt(layout.ranks, layout.tensor_parallel_size, items)


def _dealt(ranks: int, share: int, items: Sequence[Any]) -> Split:
    """``share``: consecutive ranks that get the same."""
    parts = ranks // share

    def join(answers: list[list[Any]]) -> list[Any]:
        joined: list[Any] = [None] * len(items)
        for part in range(parts):
            joined[part::parts] = answers[part * share]
        return joined

    return [list(items[rank // share :: parts]) for rank in range(ranks)], join
