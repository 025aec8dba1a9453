"""What counts as an environment's time: not the wait for its turn at what many episodes share. Imports no torch."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final


@dataclass(eq=False)
class Handed:
    """An episode. ``since``: when it was handed to its environment, by ``time.monotonic``; None: it isn't its turn."""

    since: float | None


EPISODE: Final[ContextVar[Handed | None]] = ContextVar("episode", default=None)
"""The episode of this thread."""
LIMIT: Final[ContextVar[asyncio.Timeout | None]] = ContextVar("limit", default=None)
"""That of the call of an environment that is under way."""


class Stopped:
    """The clocks of a call stand still from here until ``resume``, which may be called more than once.

    To be made and resumed in the thread of the call's event loop; elsewhere than in an episode it does nothing.
    """

    def __init__(self) -> None:
        self._episode, self._limit, self._at = EPISODE.get(), LIMIT.get(), time.monotonic()
        self._since = self._episode.since if self._episode is not None else None
        self._until = self._limit.when() if self._limit is not None else None
        self._set(None, None)

    def resume(self) -> None:
        waited = time.monotonic() - self._at
        self._set(
            None if self._since is None else self._since + waited,
            None if self._until is None else self._until + waited,
        )
        self._since = self._until = None

    def _set(self, since: float | None, until: float | None) -> None:
        if self._episode is not None and self._since is not None:
            self._episode.since = since
        if self._limit is not None and self._until is not None:
            with suppress(RuntimeError):  # the call is over
                self._limit.reschedule(until)
