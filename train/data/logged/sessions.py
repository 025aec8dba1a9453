"""Logged sessions as conversations: which response continues which.

A response continues another one of its session if the chat messages that it answers begin with those that the other
answered and with what it said; without messages, or with others, if its prompt begins with the other's prompt and
response, token by token. Of several that continue the same one, the one with the longest line of others behind it,
the last one of such, carries on the conversation; the others begin conversations of their own, with those before as
context. So each response belongs to one conversation.

An assistant's message in a prompt that no response of the session has made is of a turn that is missing: erased,
redacted, not stored, cut off, or said elsewhere. Prompts of text or of token ids don't say who has said what, so that
there it can't be seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

REWRITTEN: Final = "the prompt has earlier turns otherwise than they were sampled"
NOTHING_BETWEEN: Final = "nothing was said in between"
OTHER_TEMPERATURE: Final = "sampled at another temperature"
"""Why a turn begins a sequence of its own."""


@dataclass(frozen=True)
class Turn:
    """A response of a session, with the row that it comes from, as ``feedback.datasets.logged_turns`` gives it."""

    row: dict[str, Any]

    @property
    def prompt(self) -> list[int]:
        return self.row["prompt_token_ids"]

    @property
    def tokens(self) -> list[int]:
        """Prompt and response."""
        return self.prompt + self.row["response_token_ids"]

    @property
    def messages(self) -> list[Any] | None:
        return None if self.row["messages"] is None else json.loads(self.row["messages"])


@dataclass(frozen=True)
class Conversation:
    """Turns, each of which continues the one before. ``missing``: a turn before the last one is not there.

    ``splits``: of each turn why it begins a sequence of its own, None where it does not; the first one has "".
    """

    turns: list[Turn]
    missing: bool

    @cached_property
    def splits(self) -> list[str | None]:
        return ["", *(_split(before, after) for before, after in zip(self.turns, self.turns[1:], strict=False))]


def conversations(turns: Sequence[Turn]) -> list[Conversation]:
    """Those of a session, whose ``turns`` are in the order of time."""
    found = _Links()
    for turn in turns:
        found.add(turn)
    parents, depths = found.parents, [1] * len(turns)
    for number, parent in reversed(list(enumerate(parents))):
        if parent is not None:
            depths[parent] = max(depths[parent], depths[number] + 1)
    heirs: dict[int, int] = {}
    for number, parent in enumerate(parents):
        if parent is not None and (parent not in heirs or depths[number] >= depths[heirs[parent]]):
            heirs[parent] = number
    made = []
    for number, parent in enumerate(parents):
        if parent is None or heirs[parent] != number:
            chain = [number]
            while (heir := heirs.get(chain[-1])) is not None:
                chain.append(heir)
            made.append(Conversation([turns[i] for i in chain], found.missing[chain[-1]]))
    return made


def assistants(messages: Sequence[Any] | None) -> int | None:
    """How many of the messages are the assistant's; None if there are none at all."""
    return None if messages is None else sum(_is_assistant(message) for message in messages)


class _Links:
    """Of the responses of a session so far, which one each continues, and whether a turn is missing before it."""

    def __init__(self) -> None:
        self.parents: list[int | None] = []
        self.missing: list[bool] = []
        self._said: list[int | None] = []
        self._by_messages: dict[bytes, dict[int, str]] = {}
        self._by_tokens: dict[tuple[int, ...], dict[int, dict[tuple[int, ...], int]]] = {}

    def add(self, turn: Turn) -> None:
        number, messages = len(self.parents), turn.messages
        beginnings = _beginnings(messages or ())
        parent = self._parent(messages or (), beginnings, turn.prompt)
        said, before = assistants(messages), 0 if parent is None else self._said[parent]
        if parent is None:
            missing = (said or 0) > number
        else:
            unknown = said is None or before is None
            missing = self.missing[parent] or (not unknown and said != before + 1)  # type: ignore[operator]
        self.parents.append(parent)
        self.missing.append(missing)
        self._said.append(said)
        if messages is not None:
            self._by_messages.setdefault(beginnings[-1], {})[number] = turn.row["response"]
        tokens = tuple(turn.tokens)
        self._by_tokens.setdefault(tokens[:2], {}).setdefault(len(tokens), {})[tokens] = number

    def _parent(self, messages: Sequence[Any], beginnings: Sequence[bytes], prompt: list[int]) -> int | None:
        """By messages and by tokens; where the two differ the later one, as the other is before it."""
        by_tokens, same = self._extended(prompt), self._continued(messages, beginnings)
        if by_tokens in same:
            return by_tokens
        return max((number for number in (by_tokens, *same) if number is not None), default=None)

    def _continued(self, messages: Sequence[Any], beginnings: Sequence[bytes]) -> list[int]:
        """The answers to the most of the messages that were answered, of those that have said what follows them."""
        for at in reversed(range(1, len(messages))):
            if _is_assistant(messages[at]) and (same := self._by_messages.get(beginnings[at])):
                content = messages[at].get("content")
                said = content if isinstance(content, str) else ""
                return [number for number, response in same.items() if said in response]
        return []

    def _extended(self, prompt: list[int]) -> int | None:
        """By the tokens: the longest that the prompt begins with."""
        tokens = tuple(prompt)
        by_length = self._by_tokens.get(tokens[:2], {})
        for length in sorted(by_length, reverse=True):
            if length <= len(tokens) and (number := by_length[length].get(tokens[:length])) is not None:
                return number
        return None


def _is_assistant(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _beginnings(messages: Sequence[Any]) -> list[bytes]:
    """A hash of no messages, of the first, of the first two, …: each message is written once, whatever their number."""
    hashed = hashlib.blake2b(digest_size=16)
    found = [hashed.digest()]
    for message in messages:
        hashed.update(json.dumps(message, sort_keys=True).encode() + b"\n")
        found.append(hashed.digest())
    return found


def _split(before: Turn, after: Turn) -> str | None:
    tokens = before.tokens
    if after.prompt[: len(tokens)] != tokens:
        return REWRITTEN
    if len(after.prompt) == len(tokens):
        return NOTHING_BETWEEN
    if after.row["sampling"]["temperature"] != before.row["sampling"]["temperature"]:
        return OTHER_TEMPERATURE
    return None
