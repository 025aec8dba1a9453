"""Which responses a canary policy sampled: what their rows say as ``variant``."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass
class _Canary:
    label: str
    ended: float | None = None  # by time.monotonic


class CanaryVariants:
    """The canary policies of a replica, each from before it is served.

    What is kept: a label and a time for each, for as long as the process lives. They are as many as promotions.
    """

    def __init__(self, serving: Callable[[], int]) -> None:
        """``serving``: the version that serves at the moment."""
        self._serving = serving
        self._of: dict[int, _Canary] = {}  # by the policy's version
        self._current: int | None = None

    def set(self, version: int | None, label: str = "") -> None:
        """Make ``version``, or none, the canary from now on."""
        if version == self._current:
            return
        if self._current is not None:
            self._of[self._current].ended = time.monotonic()
        if version is not None:
            self._of[version] = _Canary(label)
        self._current = version

    @property
    def label(self) -> str | None:
        """The label of what serves at the moment."""
        version = self._current
        return self._of[version].label if version is not None and version == self._serving() else None

    def label_of(self, requested_at: float, versions: Collection[int]) -> str | None:
        """The label of a response that was requested before a canary's end and has a token of the canary.

        ``requested_at``: by time.monotonic, as the clock of the day may be set meanwhile.
        ``versions``: the policies that sampled its tokens; without a token it is taken for one of what serves.
        """
        for version in versions or (self._serving(),):
            canary = self._of.get(version)
            if canary is not None and (canary.ended is None or requested_at <= canary.ended):
                return canary.label
        return None
