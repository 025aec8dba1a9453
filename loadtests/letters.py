"""The taste of ``make bench-loop``'s users: the later in ``LETTERS`` an answer's letters are, the better.

A policy has far to go: from all letters alike, half of the way up, to the last one alone.
"""

from __future__ import annotations

from typing import Any, Final

LETTERS: Final = "abcdefghABCDEFGH"


def mean_place(text: str) -> float:
    """Of the letters of a text, from 0 (all are the first one) to 1 (all are the last one)."""
    return sum(max(LETTERS.find(c), 0) for c in text) / max(1, len(text)) / (len(LETTERS) - 1)


def reward(rows: Any) -> list[float]:
    """``mean_place`` of each response of a table."""
    return [mean_place(text) for text in rows.column("response").to_pylist()]
