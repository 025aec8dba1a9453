"""Environments that the tests play, good and bad ones."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

from train.environments.environment import Environment, EpisodePrompt, Message, Step, ToolCall

CLOSED: list[int] = []
"""The numbers of the episodes whose environments were closed, in order."""


class Counting(Environment):
    """Answers with a letter, ``turns`` times; the reward of a turn is the share of its characters that are ``a``."""

    def __init__(self, turns: int = 3, jitter: float = 0.0) -> None:
        self.left, self.jitter, self.number = turns, jitter, 0

    async def reset(self, prompt: EpisodePrompt) -> Sequence[Message]:
        self.number = int(prompt.metadata.get("number", 0))
        self.delays = [self.jitter * (prompt.seed >> shift) % 7 for shift in range(8)]
        return prompt.as_messages

    async def step(self, text: str, tool_calls: Sequence[ToolCall]) -> Step:
        self.left -= 1
        if self.jitter:
            await asyncio.sleep(self.delays[self.left % 8] * time.monotonic() % self.jitter)
        return [{"role": "user", "content": "bc?"}], text.count("a") / max(1, len(text)), self.left == 0

    async def close(self) -> None:
        CLOSED.append(self.number)


class LastOne(Counting):
    """Episode 0 goes on when all others have ended; held up by it, they never would."""

    others = 0

    async def step(self, text: str, tool_calls: Sequence[ToolCall]) -> Step:
        while self.number == 0 and len(CLOSED) < type(self).others:
            await asyncio.sleep(0.01)
        return await super().step(text, tool_calls)


class Late(Counting):
    """Episode 0 holds its thread until it may go on, and then has ended."""

    may_go_on = threading.Event()

    async def step(self, text: str, tool_calls: Sequence[ToolCall]) -> Step:
        if self.number == 0 and not self.may_go_on.is_set():
            self.may_go_on.wait(60)
            return [], 99.0, True
        return await super().step(text, tool_calls)


class Exiting(Counting):
    """Ends the process that makes it, as a command that can't read its arguments does."""

    def __init__(self) -> None:
        raise SystemExit(0)


class Bad(Counting):
    """What is wrong with it is in the prompt's metadata."""

    async def reset(self, prompt: EpisodePrompt) -> Sequence[Message]:
        self.wrong = prompt.metadata.get("wrong", "")
        if self.wrong == "no messages":
            return "messages"  # type: ignore[return-value]
        if self.wrong == "no tools":
            self.tools = None  # type: ignore[assignment]
        if self.wrong == "blocks at once":
            threading.Event().wait(1000)
        if self.wrong == "long":
            return [{"role": "user", "content": "a" * 100}]
        return await super().reset(prompt)

    async def step(self, text: str, tool_calls: Sequence[ToolCall]) -> Any:
        match self.wrong:
            case "raises":
                raise RuntimeError("as it was told")
            case "times out itself":
                raise TimeoutError("its own")
            case "exits":
                raise SystemExit(0)
            case "cancels":
                raise asyncio.CancelledError
            case "large":
                return [], 1e39, True
            case "larger than any float":
                return [], 10**400, True
            case "hangs":
                await asyncio.sleep(1000)
            case "blocks":
                threading.Event().wait(1000)
            case "nan":
                return [], float("nan"), True
            case "infinite":
                return [], float("inf"), True
            case "text reward":
                return [], "1", True
            case "no tuple":
                return None
            case "no done":
                return [], 1.0, None
            case "silent":
                return [], 1.0, False
            case "speaks for the policy":
                return [{"role": "assistant", "content": "x"}], None, False
            case "no role":
                return [{"content": "x"}], None, False
            case "no reward":
                return [], None, True
            case "breaks the template":
                return [{"role": "user", "content": {"no": "text"}, "tool_calls": 5}], None, False
        return await super().step(text, tool_calls)


def half(prompt: EpisodePrompt, text: str) -> float:
    return 0.5


def look(key: str, times: int = 1) -> str:
    """Look a key up."""
    return "ab" * times


async def failing(key: str) -> str:
    raise LookupError(f"nothing for {key}")
