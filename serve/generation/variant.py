"""Which responses were made by a policy on trial: what their rows say as ``variant``."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass
class _Trial:
    label: str
    ended: float | None = None  # by time.monotonic


class Trials:
    """The policies that a replica has tried out, beginning before it serves them.

    What is kept: a label and a time for each, for as long as the process lives. They are as many as promotions.
    """

    def __init__(self, serving: Callable[[], int]) -> None:
        """``serving``: the version that serves at the moment."""
        self._serving = serving
        self._of: dict[int, _Trial] = {}  # by the policy's version
        self._under_way: int | None = None

    def set(self, version: int | None, label: str = "") -> None:
        """Have ``version``, or none, be on trial from now on."""
        if version == self._under_way:
            return
        if self._under_way is not None:
            self._of[self._under_way].ended = time.monotonic()
        if version is not None:
            self._of[version] = _Trial(label)
        self._under_way = version

    @property
    def label(self) -> str | None:
        """The label of what serves at the moment."""
        version = self._under_way
        return self._of[version].label if version is not None and version == self._serving() else None

    def label_of(self, asked_at: float, versions: Collection[int]) -> str | None:
        """The label of a response that was asked for before a trial's end and has a token of the policy on trial.

        ``asked_at``: by time.monotonic, as the clock of the day may be set meanwhile.
        ``versions``: the policies that sampled its tokens; without a token it is taken for one of what serves.
        """
        for version in versions or (self._serving(),):
            trial = self._of.get(version)
            if trial is not None and (trial.ended is None or asked_at <= trial.ended):
                return trial.label
        return None
