"""Templates, and how they write times, numbers and durations."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

STATIC: Final = Path(__file__).with_name("static")
_TEMPLATES: Final = Path(__file__).with_name("templates")

NAVIGATION: Final = (
    ("now", "Now", "/console/", "n"),
    ("policies", "Policies", "/console/policies", "p"),
    ("playground", "Playground", "/console/playground", "g"),
    ("traffic", "Traffic", "/console/traffic", "t"),
    ("labels", "Label queue", "/console/labels", "l"),
    ("compare", "Compare", "/console/compare", "c"),
    ("data", "Data", "/console/data", "d"),
    ("keys", "Keys", "/console/keys", "k"),
)
"""(page, title, path, the key that opens it after g)."""

OF_ADMINS: Final = {"compare_suites": "Answers to a suite", "data": "Data", "keys": "Keys"}
"""Pages that show what is of all tenants, with their titles."""


def render(template: str, **values: Any) -> str:
    """A template's text. Whatever is put into it is escaped."""
    shared = {"navigation": NAVIGATION, "of_admins": OF_ADMINS}
    return environment().get_template(f"{template}.html.jinja").render(**shared, **values)


@cache
def environment() -> Environment:
    """Where the templates are, and what they may call."""
    found = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "at": at,
        "iso": iso,
        "duration": duration,
        "number": number,
        "signed": signed,
        "short": short,
        "with_code": with_code,
        "as_json": json.dumps,
    }
    return found


def moment(value: Any) -> datetime:
    """A time, of ISO 8601, of Unix seconds, or one already."""
    if isinstance(value, int | float):
        return datetime.fromtimestamp(value, UTC)
    found = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def at(value: Any) -> str:
    """A time for people, UTC."""
    return "–" if value is None else f"{moment(value).astimezone(UTC):%Y-%m-%d %H:%M}"


def iso(value: Any) -> str:
    """A time for the page's script, which writes how long ago it was."""
    return "" if value is None else moment(value).astimezone(UTC).isoformat(timespec="seconds")


def duration(seconds: float | None) -> str:
    """Seconds, as the two largest units."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest} s" if minutes < 10 else f"{minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min"


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits; a count with its thousands apart."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return f"{value:.{digits}g}"


def signed(value: float | None) -> str:
    """A difference."""
    return "–" if value is None else f"{value:+.3f}".replace("-", "\N{MINUS SIGN}")


def short(text: str | None, characters: int = 120) -> str:
    """The beginning of a text, on one line."""
    line = " ".join((text or "").split())
    return line if len(line) <= characters else f"{line[: characters - 1].rstrip()}…"


def with_code(text: str) -> Markup:
    """A text, escaped, in which what stands between backquotes is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
