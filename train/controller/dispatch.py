"""Dispatch rules: how the argument of a call is split over the ranks of a group, and their answers joined to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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


@dataclass(frozen=True)
class Rule:
    """How one argument goes out to the ranks and how their answers come back as one.

    ``split(layout, argument)`` → (one argument per rank, whatever ``join`` needs to know);
    ``join(layout, answers, known)`` → the answer.
    """

    split: Callable[[Layout, Any], tuple[list[Any], Any]]
    join: Callable[[Layout, list[Any], Any], Any]


def dispatch(rule: Rule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a worker method as callable from the driver, by ``rule``. The rule is applied to its first argument."""

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        method.__dispatch__ = rule  # type: ignore[attr-defined]
        return method

    return mark


def _to_all(layout: Layout, argument: Any) -> tuple[list[Any], None]:
    return [argument] * layout.ranks, None


def _first_answer(_layout: Layout, answers: list[Any], _known: None) -> Any:
    return answers[0]


def _all_answers(_layout: Layout, answers: list[Any], _known: None) -> list[Any]:
    return answers


def _split_by_tokens(layout: Layout, batch: PackedBatch) -> tuple[list[PackedBatch], list[torch.Tensor]]:
    share = layout.sequence_parallel_size
    parts = batch.balanced(layout.ranks // share)
    tokens = [batch.token_index(part) for part in parts]
    selected = [batch.select(part) for part in parts]
    return [selected[rank // share] for rank in range(layout.ranks)], tokens


def _join_tokens(layout: Layout, answers: list[torch.Tensor], tokens: list[torch.Tensor]) -> torch.Tensor:
    joined = torch.empty(sum(len(t) for t in tokens), dtype=answers[0].dtype)
    for index, answer in zip(tokens, answers[:: layout.sequence_parallel_size], strict=True):
        joined[index] = answer
    return joined


def _join_answer_and_tokens(
    layout: Layout, answers: list[tuple[Any, torch.Tensor]], tokens: list[torch.Tensor]
) -> tuple[Any, torch.Tensor]:
    return answers[0][0], _join_tokens(layout, [answer[1] for answer in answers], tokens)


def _dealt(share: Callable[[Layout], int]) -> Rule:
    """A list is dealt out to the parts of ``share(layout)`` consecutive ranks each, like cards."""

    def split(layout: Layout, items: Sequence[Any]) -> tuple[list[list[Any]], int]:
        parts = layout.ranks // share(layout)
        return [list(items[rank // share(layout) :: parts]) for rank in range(layout.ranks)], len(items)

    def join(layout: Layout, answers: list[list[Any]], count: int) -> list[Any]:
        parts = layout.ranks // share(layout)
        joined: list[Any] = [None] * count
        for part in range(parts):
            joined[part::parts] = answers[part * share(layout)]
        return joined

    return Rule(split, join)


to_all = Rule(_to_all, _first_answer)
"""Every rank gets the same; rank 0's answer is the answer."""

to_all_gathered = Rule(_to_all, _all_answers)
"""Every rank gets the same; the answer is the list of theirs, by rank."""

by_tokens = Rule(_split_by_tokens, _first_answer)
"""A batch is split over the data-parallel ranks by sequences, balanced by tokens; the ranks agree on the answer among
themselves."""

answer_and_per_token = Rule(_split_by_tokens, _join_answer_and_tokens)
"""A batch is split as in ``by_tokens``; each answers with a pair, the first as of ``by_tokens``, the second as of
``per_token``."""

per_token = Rule(_split_by_tokens, _join_tokens)
"""A batch is split as in ``by_tokens``; the answers are per-token tensors, put back in the batch's order."""

by_rank = _dealt(lambda layout: layout.sequence_parallel_size)
"""A list is dealt out to the data-parallel ranks; each answers with a list as long; answers come back in its order."""

by_engine = _dealt(lambda layout: layout.tensor_parallel_size)
"""A list is dealt out to the generation engines (all ranks of one get the same); answers come back in its order."""
