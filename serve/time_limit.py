"""A bound for the many short waits of one task."""

from __future__ import annotations

import asyncio
from typing import Any, Self


class TimeLimit:
    """As ``asyncio.timeout_at`` around each wait, with one timer for all; each limit is no earlier than the last.

    A stream waits twice for each of its tokens, and a timer for each wait takes a tenth of a token's time::

        with limit.until(deadline):
            await ...

    One task uses it, and closes it. Raises TimeoutError.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._until = 0.0
        self._task: asyncio.Task[Any] | None = None  # while it waits
        self._cancelling = 0
        self._expired = False

    def until(self, when: float) -> Self:
        """Set the limit of the next wait, by the loop's clock."""
        self._until = when
        return self

    def __enter__(self) -> None:
        self._task = task = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()
        if self._timer is None:
            self._timer = self._loop.call_at(self._until, self._look)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task, self._task = self._task, None
        if not self._expired:
            return
        self._expired = False
        assert task is not None
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:  # else it is somebody else's, too
            raise TimeoutError

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._task is None:  # the next wait begins anew
            return
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._look)
        else:
            self._expired = True
            self._task.cancel()
