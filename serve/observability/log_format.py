"""How log lines are written: as text, or one JSON object a line; with the ids of the request that they are about."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, Literal
from urllib.parse import quote

import orjson

request: ContextVar[MutableMapping[str, Any] | None] = ContextVar("request", default=None)
"""The ASGI scope of the request at work, with its ``request_id`` and, if it came with a trace, ``trace_id``."""

FIELDS: Final = "fields"
"""Under this name in ``extra`` a line brings a dict of further fields."""


_UNSAFE_IN_JSON: Final = re.compile("[\x7f-\x9f\u2028\u2029]")  # that JSON may have as they are, and break a line


def one_line(text: str) -> str:
    """``text`` without what ends a line, moves a cursor or can't be seen: that is written as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def path(decoded: str) -> str:
    """The path of a request, as it is in a URL: what a client sends can't look like another part of the line."""
    return quote(decoded, safe="/:@!$&'()*+,;=-._~", errors="replace")


def configure(form: Literal["text", "json"]) -> None:
    """Write all lines to stderr in this form. With ``text``, what the program has configured already stays."""
    root = logging.getLogger()
    if form == "text" and root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(Json() if form == "json" else Text())
    root.handlers[:] = [handler]
    root.setLevel(min(root.level or logging.INFO, logging.INFO))


def as_json(line: str, logger: str) -> str:
    """A line that a process prints as one of its log; one that is of a child's log already stays as it is.

    Code of others prints too: what is no whole object, or would move a cursor, is a text like any other.
    """
    if line.startswith('{"time":') and not _UNSAFE_IN_JSON.search(line):
        with suppress(orjson.JSONDecodeError):
            orjson.loads(line)
            return line
    level = logging.ERROR if line.startswith("error: ") else logging.INFO
    return Json().format(logging.LogRecord(logger, level, "", 0, line, None, None))


def adopt(name: str) -> None:
    """Write the lines of a library that has brought handlers of its own as all others are written."""
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.propagate = True


def ids() -> dict[str, str]:
    """The ids of the request at work, as fields of a line."""
    scope = request.get()
    if scope is None:
        return {}
    return {name: scope[name] for name in ("request_id", "trace_id", "span_id") if name in scope}


class Text(logging.Formatter):
    """A line for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, with an exception's text in this form, whatever form another handler has left in the record."""
        own = copy.copy(record)
        own.exc_text = None
        return super().format(own)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        text = one_line(super().formatMessage(record))
        return "".join([text, *(f" {name}={value}" for name, value in ids().items())])

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Its lines, each set in: none looks like a line of the log."""
        return "\n".join(f"    {one_line(line)}" for line in super().formatException(ei).split("\n"))


class Json(logging.Formatter):
    """One JSON object: time (UTC), level, logger, message, ids, the line's own fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **ids(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        try:
            text = orjson.dumps(line, default=str).decode()
        except (TypeError, orjson.JSONEncodeError):  # a text with half a character in it
            text = orjson.dumps({name: _whole(str(value)) for name, value in line.items()}).decode()
        return _UNSAFE_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _whole(text: str) -> str:
    return text.encode(errors="replace").decode()
