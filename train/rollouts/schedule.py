"""Which groups may begin, and which of those that have ended a step learns from. Pure.

The policy's version is the number of steps that its weights have behind them. A group that begins under version v has
no token of an older one, so the last step that may learn from it is v + staleness: its deadline. Every step takes the
same number of groups. So that all can be taken in time, of those that are under way no more have their deadline at a
step, or before it, than the steps until then take. A group has the latest deadline of all when it begins, so that this
holds for all if it holds for their number; and a step waits rather than takes groups that would break it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """``per_step``: groups that each step takes. ``staleness``: the most steps that a token may be behind."""

    per_step: int
    staleness: int
    steps: int

    def may_begin(self, number: int, under_way: int, *, version: int, step: int) -> bool:
        """Whether group ``number``, from 0, may begin beside ``under_way`` groups that no step has taken.

        Args:
            version: of the weights that sample.
            step: the next one that takes groups.
        """
        return number < self.per_step * self.steps and under_way < self.per_step * (version + self.staleness - step + 1)

    def choose(self, step: int, began: Mapping[int, int], ended: Collection[int]) -> list[int] | None:
        """The groups that a step takes, the oldest first of those that have ended; None while it has to wait.

        Args:
            began: the version that each group under way began with, by its number.
            ended: those of them that can be taken.
        """
        chosen = sorted(ended, key=lambda number: (began[number], number))[: self.per_step]
        if len(chosen) < self.per_step:
            return None
        due = sorted(version + self.staleness for number, version in began.items() if number not in chosen)
        in_time = all(count <= self.per_step * (deadline - step) for count, deadline in enumerate(due, start=1))
        return chosen if in_time else None
