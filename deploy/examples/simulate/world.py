"""What a world gives."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """``figures`` by their place in the last line, with dots: {"null.binary": 0.02}. ``kept``: is the bar met."""

    figures: dict[str, Any]
    kept: bool
    detail: str


World = Callable[[int, int], Outcome]
"""A world, played: (histories, seed) -> outcome. The same arguments give the same figures."""


def play(world: World, histories: int, seed: int) -> tuple[Outcome, float]:
    """Its outcome, and the seconds that it took."""
    started = time.monotonic()
    return world(histories, seed), time.monotonic() - started
