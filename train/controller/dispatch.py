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

    ``ranks``: how many there are. ``tensor_parallel_size``: consecutive ranks that share one generation engine; it
    divides ``ranks``. ``parts``: the data-parallel part of each rank, as ``train.model.mesh.batch_parts`` numbers them;
    if empty, each rank is one.
    """

    ranks: int
    tensor_parallel_size: int = 1
    parts: tuple[int, ...] = ()

    @property
    def part_of(self) -> tuple[int, ...]:
        """The data-parallel part of each rank."""
        return self.parts or tuple(range(self.ranks))

    @property
    def engine_of(self) -> tuple[int, ...]:
        """The generation engine of each rank."""
        return tuple(rank // self.tensor_parallel_size for rank in range(self.ranks))


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


def to_all_gathered(layout: Layout, argument: Any) -> Split:
    """Every rank gets the same; the answer is the list of theirs, by rank."""
    return [argument] * layout.ranks, list


def by_tokens(layout: Layout, batch: PackedBatch) -> Split:
    """A batch is split over the data-parallel ranks by sequences, balanced by tokens; the ranks agree on the answer
    among themselves."""
    return per_token(layout, batch)[0], _first


def per_token(layout: Layout, batch: PackedBatch) -> Split:
    """A batch is split as in ``by_tokens``; the answers are per-token tensors, put back in the batch's order."""
    part_of = layout.part_of
    if max(part_of) == 0:
        return [batch] * len(part_of), _first
    parts = batch.balanced(max(part_of) + 1)
    selected = [batch.select(part) for part in parts]

    def join(answers: list[Tensor]) -> Tensor:
        joined = torch.empty(len(batch.tokens), dtype=answers[0].dtype)
        for i, part in enumerate(parts):
            joined[batch.token_index(part)] = answers[part_of.index(i)]
        return joined

    return [selected[part] for part in part_of], join


def answer_and_per_token(layout: Layout, batch: PackedBatch) -> Split:
    """A batch is split as in ``by_tokens``; each answers with a pair, the first as of ``by_tokens``, the second as of
    ``per_token``."""
    parts, join = per_token(layout, batch)
    return parts, lambda answers: (answers[0][0], join([tensor for _, tensor in answers]))


def by_rank(layout: Layout, items: Sequence[Any]) -> Split:
    """A list is dealt out to the data-parallel ranks, like cards; each answers with a list as long; answers come back
    in its order."""
    return _dealt(layout.part_of, items)


def by_engine(layout: Layout, items: Sequence[Any]) -> Split:
    """As ``by_rank``, to the generation engines: all ranks of one get the same."""
    return _dealt(layout.engine_of, items)


def to_engines(layout: Layout, items: Sequence[Any]) -> Split:
    """A list of one item for each generation engine, all ranks of which get the same; the answers likewise."""
    engine_of = layout.engine_of
    first = [engine_of.index(engine) for engine in range(len(items))]
    return [items[engine] for engine in engine_of], lambda answers: [answers[rank] for rank in first]


def _dealt(part_of: Sequence[int], items: Sequence[Any]) -> Split:
    """``part_of``: each rank's; those of one part get the same."""
    parts = max(part_of) + 1

    def join(answers: list[list[Any]]) -> list[Any]:
        joined: list[Any] = [None] * len(items)
        for part in range(parts):
            joined[part::parts] = answers[part_of.index(part)]
        return joined

    return [list(items[part::parts]) for part in part_of], join
