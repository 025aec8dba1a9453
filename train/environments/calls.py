"""Calls of an environment's methods: each within its time, and what goes wrong as a reason to drop the episode."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from train.environments.environment import (
    Environment,
    EpisodePrompt,
    Message,
    Tool,
    ToolCall,
    checked_messages,
    checked_step,
    tool_names,
)
from train.environments.episode import EpisodeDropped
from train.environments.time_limit import LIMIT

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_GRACE_S: Final = 5.0
"""Beyond twice its time, after which an environment that holds its thread is given up."""
HELD: Final = "a call took longer than train.environment.step_seconds, and holds its thread"


@dataclass(frozen=True)
class Caller:
    """Calls of an environment's methods, each within its time."""

    runner: asyncio.Runner
    environment: Environment
    seconds: float

    def reset(self, prompt: EpisodePrompt) -> list[Message]:
        """Its first messages. Raises EpisodeDropped, as the others here."""
        return guarded("reset", lambda: checked_messages(self._run("reset", prompt), "reset"))

    def tools(self) -> tuple[list[Tool], set[str]]:
        """What the policy may call, and the names."""
        tools = guarded("tools", lambda: list(self.environment.tools))
        return tools, tool_names(tools)

    def step(self, text: str, calls: Sequence[ToolCall]) -> tuple[list[Message], float | None, bool]:
        return guarded("step", lambda: checked_step(self._run("step", text, calls)))

    def close(self) -> None:
        """Give back what it holds. If that fails, it changes nothing of what was played."""
        try:
            guarded("close", lambda: self._run("close"))
        except EpisodeDropped as error:
            log.warning("an environment's close failed: %s", error)

    def _run(self, name: str, *arguments: Any) -> Any:
        return self.runner.run(_within(getattr(self.environment, name)(*arguments), self.seconds))


class _TooLong(Exception):
    pass


async def _within(found: Awaitable[_Result], seconds: float) -> _Result:
    try:
        async with asyncio.timeout(seconds) as limit:
            LIMIT.set(limit)
            return await found
    except TimeoutError:
        if limit.expired():
            raise _TooLong from None
        raise


def guarded(what: str, call: Callable[[], _Result]) -> _Result:
    """What ``call`` returns. Raises EpisodeDropped if it raises."""
    try:
        return call()
    except _TooLong:
        raise EpisodeDropped("timeout", f"{what} took longer than train.environment.step_seconds") from None
    except EpisodeDropped:
        raise
    except BaseException as error:  # whatever a user's code raises: SystemExit, CancelledError
        raise EpisodeDropped("raised", f"{what} raised {type(error).__name__}: {error}") from error


def holds_its_thread(since: float | None, seconds: float) -> bool:
    """Whether a call that is within ``seconds`` where it is cooperative has begun longer ago than it can take.

    ``since``: when the episode was handed to its environment, by ``time.monotonic``; None while it is the policy's.
    """
    return since is not None and since < time.monotonic() - 2 * seconds - _GRACE_S
