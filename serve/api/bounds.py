"""Bounds of a JSON body, and the threads that parse large ones. Imports no torch and no vLLM.

A body of a few megabytes can hold a million values. To parse and validate them, and to say what is wrong with each,
takes seconds in single calls of compiled code, through which neither the event loop nor a thread of Python gets on. So
the values are counted first, in steps of Python, and what is large is done in a thread beside the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from serve.http import Problem, parse

MESSAGES: Final = 2048  # of a chat
PARTS: Final = 2048  # of the messages of a chat together
TOOLS: Final = 128
TOOL_CALLS: Final = 128  # of one message
STOPS: Final = 16
DOCUMENTS: Final = 1024
TOKEN_IDS: Final = 1 << 20
ENTRIES: Final = 1024  # of one object
LIST: Final = 2048  # entries of any other list
DEPTH: Final = 64
VALUES: Final = 100_000  # objects, lists and texts, an object's names included

_SMALL_BYTES: Final = 32 << 10  # understood at once
_MARK: Final = re.compile(rb'["\[\]{}:]')
_TEXT: Final = re.compile(rb"(?:[^\"\\]++|\\.){0,4096}+", re.DOTALL)  # in pieces, so that other tasks get a turn
_OPENING: Final = (ord("["), ord("{"))
_CLOSING: Final = (ord("]"), ord("}"))

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")

# Two, that share the interpreter with the event loop; what they do for long, they do without it.
_workers = ThreadPoolExecutor(2, thread_name_prefix="large body")


async def aside(large: bool, work: Callable[..., Result], *arguments: Any) -> Result:
    """Return or raise what ``work`` does: in a thread if it is ``large``, else at once."""
    if not large:
        return work(*arguments)
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_workers, lambda: context.run(work, *arguments))


def is_large(content: bytes) -> bool:
    """Whether a body takes so long to parse that other requests should not wait for it."""
    return len(content) > _SMALL_BYTES


async def parse_body(content: bytes, model: type[Model]) -> Model:
    """A JSON body as a ``model``. Raises Problem 422."""
    return await aside(is_large(content), _parse, content, model)


def _parse(content: bytes, model: type[Model]) -> Model:
    check(content, 422)
    return parse(content, model)


def check(content: bytes, status: int) -> None:
    """Raises Problem ``status`` for a body of more values, or deeper ones, than any request has."""
    opened = content.count(b"[") + content.count(b"{")
    if opened <= DEPTH and content.count(b":") <= ENTRIES and opened + content.count(b'"') <= VALUES:
        return
    values = 0
    entries = [0]  # of the open objects
    position = start = end = 0  # the last two of a text
    field = "body"  # that of the body which is looked at
    while found := _MARK.search(content, position):
        position = found.end()
        mark = content[position - 1]
        if mark == ord(":"):
            entries[-1] += 1
            if len(entries) == 2:
                field = content[start:end].decode(errors="replace")
            if entries[-1] > ENTRIES:
                raise _too_much(status, field, f"an object has more than the {ENTRIES} entries that are allowed")
            continue
        if mark in _CLOSING:
            if len(entries) > 1:
                entries.pop()
            continue
        values += 1
        if values > VALUES:
            raise _too_much(status, field, f"with it there are more than the {VALUES} objects, lists and texts allowed")
        if mark in _OPENING:
            entries.append(0)
            if len(entries) > DEPTH + 1:
                raise _too_much(status, field, f"it is nested more deeply than the {DEPTH} levels that are allowed")
        else:
            start, position = position, _end_of_text(content, position)
            end = position - 1


def _end_of_text(content: bytes, position: int) -> int:
    while True:
        found = _TEXT.match(content, position)
        end = position if found is None else found.end()
        if end == position or content[end : end + 1] in (b'"', b""):
            return end + 1
        position = end


def _too_much(status: int, field: str, reason: str) -> Problem:
    named = field if field.isidentifier() and len(field) < 64 else "body"
    return Problem(status, f"{named}: {reason}", errors=[{"field": named, "reason": reason}])
