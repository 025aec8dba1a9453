"""Held-out suites: prompts with what a scorer needs to judge the responses to them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from feedback.scoring.sources.builtin import DEFAULT_REFERENCE


class SuiteError(ValueError):
    """A suite can't be used; the text names the file and the line."""


class Item(BaseModel):
    """One held-out prompt: text or chat messages, with what a scorer needs to judge the response."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(min_length=1)
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    answer: str | None = None
    metadata: dict[str, str] = {}

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("an item has exactly one of prompt and messages")
        return self

    @property
    def text_or_messages(self) -> str | list[dict[str, Any]]:
        if self.prompt is not None:
            return self.prompt
        assert self.messages is not None
        return self.messages

    @property
    def shown(self) -> str:
        """The prompt as a person reads it."""
        if self.prompt is not None:
            return self.prompt
        return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in self.messages or ())

    def scorer_metadata(self) -> dict[str, str]:
        """``metadata``, with ``answer`` under that key."""
        return self.metadata if self.answer is None else {**self.metadata, DEFAULT_REFERENCE: self.answer}


@dataclass(frozen=True)
class Suite:
    """Held-out items; ``sha256`` is that of the file's content."""

    path: Path
    items: tuple[Item, ...]
    sha256: str = field(repr=False)

    @classmethod
    def load(cls, path: Path) -> Suite:
        """Read a JSONL file, one Item a line, blank lines left out.

        Raises SuiteError naming file and line: not JSON, unknown or missing fields, an id used twice, no item at all.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise SuiteError(f"the suite {path} can't be read: {error.strerror}") from error
        items: dict[str, Item] = {}
        lines: dict[str, int] = {}
        for number, line in enumerate(content.splitlines(), start=1):
            if not line.strip():
                continue
            item = _parse(line, f"{path}, line {number}")
            if item.id in items:
                raise SuiteError(f"{path}, line {number}: id {item.id!r} is that of line {lines[item.id]} too")
            items[item.id], lines[item.id] = item, number
        if not items:
            raise SuiteError(f"{path} has no item")
        return cls(path, tuple(items.values()), hashlib.sha256(content).hexdigest())


def _parse(line: bytes, where: str) -> Item:
    try:
        return Item.model_validate(json.loads(line))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise SuiteError(f"{where}: {name + ': ' if name else ''}{first['msg']}") from error
    except ValueError as error:
        raise SuiteError(f"{where} is not JSON: {error}") from error
