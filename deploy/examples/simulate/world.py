"""What a world gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """``figures`` by their place in the last line, with dots: {"null.binary": 0.02}. ``kept``: if bars were met."""

    figures: dict[str, Any]
    kept: bool
    detail: str


World = Callable[[int, int], Outcome]
"""A world, played: (histories, seed) -> outcome. The same arguments give the same figures."""
