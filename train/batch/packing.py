"""Which sequences go together: to a rank, into a micro-batch. Plain arithmetic on lengths, the same on every rank."""

from __future__ import annotations

import heapq
from typing import Final

EVEN: Final = 1.02
"""The most that one rank computes over the mean of all with which more even is not looked for."""


def balance(lengths: list[int], parts: int) -> list[list[int]]:
    """Split sequences into ``parts`` parts of about as many tokens, by the largest differencing method.

    Karmarkar and Karp, "The differencing method of set partitioning", UCB/CSD 82/113 (1982): the two partitions whose
    parts differ most are made one, the largest part of the one with the smallest of the other, until one is left.

    Args:
        lengths: tokens of each sequence, more than 0; at least ``parts`` of them.

    Returns:
        Indices, ascending in each part, the parts with the most tokens first. No part is empty, and two parts differ by
        no more tokens than the longest sequence has.
    """
    # (minus the largest difference between two parts, a number that breaks ties, the parts from most to fewest tokens)
    partitions = [(-length, s, [(length, [s])] + [(0, list[int]())] * (parts - 1)) for s, length in enumerate(lengths)]
    if parts == 1:
        return [list(range(len(lengths)))]
    heapq.heapify(partitions)
    while len(partitions) > 1:
        _, tie, first = heapq.heappop(partitions)
        _, _, second = heapq.heappop(partitions)
        merged = [(a + b, s + t) for (a, s), (b, t) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(partitions, (merged[-1][0] - merged[0][0], tie, merged))
    return [sorted(part) for _, part in partitions[0][2]]


def fill(lengths: list[int], budget: int, at_least: int = 1) -> list[list[int]]:
    """Group sequences to at most ``budget`` tokens per group, in as few groups as best fit finds, of about equal size.

    The longest sequence that is left goes where it leaves least room (best fit decreasing, which needs at most 11/9 of
    the fewest groups there can be, and 4 more: Johnson et al., SIAM J. Comput. 3, 1974). As many groups are then
    balanced, so that none is larger than need be.

    Args:
        lengths: tokens of each sequence; one that is longer than the budget goes alone.
        at_least: groups that are wanted even if fewer would do.

    Returns:
        Indices, ascending in each group, the groups with the most tokens first. There are ``at_least`` groups or the
        number needed, whichever is more, but no more than sequences.
    """
    groups: list[list[int]] = []
    rooms: list[int] = []
    for s in sorted(range(len(lengths)), key=lambda s: (-lengths[s], s)):
        fits = [g for g, room in enumerate(rooms) if room >= lengths[s]]
        if fits:
            tightest = min(fits, key=lambda g: (rooms[g], g))
            groups[tightest].append(s)
            rooms[tightest] -= lengths[s]
        else:
            groups.append([s])
            rooms.append(budget - lengths[s])
    count = min(max(len(groups), at_least), len(lengths))
    balanced = balance(lengths, count)
    if all(len(group) == 1 or sum(lengths[s] for s in group) <= budget for group in balanced):
        return balanced
    while len(groups) < count:
        most = max(groups, key=lambda group: (len(group) > 1, sum(lengths[s] for s in group)))
        groups.remove(most)
        groups += [most[::2], most[1::2]]
    groups.sort(key=lambda group: (-sum(lengths[s] for s in group), group))
    return [sorted(group) for group in groups]
