"""Held-out suites: prompts with what a scorer needs to judge the responses to them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from feedback.files import replace_file
from feedback.scoring.sources.builtin import DEFAULT_REFERENCE


class SuiteError(ValueError):
    """A suite can't be used; the text names the file and the line."""


class Item(BaseModel):
    """One held-out prompt: text or chat messages, with what a scorer needs to judge the response.

    ``cluster``: items of one cluster depend on each other, and count as one voice; so do items with the same prompt.
    ``segment``: the kind of prompt or user that must lose nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(min_length=1)
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    answer: str | None = None
    metadata: dict[str, str] = {}
    cluster: str | None = Field(None, min_length=1)
    segment: str | None = Field(None, min_length=1)

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

    def as_row(self) -> dict[str, Any]:
        """The columns by which a prompt of traffic is compared with it."""
        messages = None if self.messages is None else json.dumps(self.messages)
        return {"prompt": self.prompt, "messages": messages, "prompt_token_ids": ()}

    def scorer_metadata(self) -> dict[str, str]:
        """``metadata``, with ``answer`` under that key."""
        return self.metadata if self.answer is None else {**self.metadata, DEFAULT_REFERENCE: self.answer}


@dataclass(frozen=True)
class Suite:
    """Held-out items; ``sha256`` is that of the file's content, ``lines`` the number of each item's line, by its id."""

    path: Path
    items: tuple[Item, ...]
    sha256: str = field(repr=False)
    lines: dict[str, int] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, path: Path) -> Suite:
        """Read a JSONL file, one Item a line, blank lines left out.

        Raises SuiteError naming file and line: not JSON, unknown or missing fields, an id used twice, no item at all.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            hint = "; `millrace suite sample` draws one from traffic" if isinstance(error, FileNotFoundError) else ""
            raise SuiteError(f"the suite {path} can't be read: {error.strerror}{hint}") from error
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
        return cls(path, tuple(items.values()), hashlib.sha256(content).hexdigest(), lines)

    @property
    def drawn(self) -> bool:
        """Whether all of it was drawn from traffic: nobody has added items of their own, or answers."""
        return all(item.answer is None and item.id == drawn_id(item.text_or_messages) for item in self.items)


def drawn_id(prompt: str | list[dict[str, Any]]) -> str:
    """The id that an item drawn from traffic has, whenever and from whichever request it is drawn."""
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]


def extend(path: Path, file: Path) -> Suite:
    """Add the items of a file to the suite at ``path``, which is made if it is missing; all of them, or none.

    Raises SuiteError naming file and line, also of an id that the suite has.
    """
    more = Suite.load(file)
    before = Suite.load(path) if path.exists() else None
    for item in more.items if before else ():
        if before and item.id in before.lines:
            raise SuiteError(
                f"{file}, line {more.lines[item.id]}: id {item.id!r} is that of line {before.lines[item.id]} of {path}"
            )
    parts = [source.read_bytes().rstrip() + b"\n" for source in (path, file) if source == file or before]
    replace_file(path, b"".join(parts))
    return Suite.load(path)


def _parse(line: bytes, where: str) -> Item:
    try:
        return Item.model_validate(json.loads(line))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise SuiteError(f"{where}: {name + ': ' if name else ''}{first['msg']}") from error
    except ValueError as error:
        raise SuiteError(f"{where} is not JSON: {error}") from error
