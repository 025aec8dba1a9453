"""Queries of the page Data that are kept by name, in one file of the home, which all admins share."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from feedback.files import locked, replace_file

_LOCK_S: Final = 5.0
_MOST: Final = 200
_NAME: Final = 100
_SQL: Final = 20_000


class SavedQueryError(Exception):
    """A query can't be kept, or what is kept can't be read; the text says why."""


class SavedQuery(BaseModel):
    """``who`` saved it last, and when, ISO 8601."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sql: str
    who: str
    at: datetime


_FILE: Final = TypeAdapter(list[SavedQuery])


class SavedQueries:
    """The queries in a file, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[SavedQuery]:
        """By name. Raises SavedQueryError if the file was damaged."""
        try:
            return _FILE.validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return []
        except ValidationError as error:
            raise SavedQueryError(f"{self.path} is no file of saved queries: mend it, or move it away") from error

    def save(self, name: str, sql: str, *, who: str) -> None:
        """Keep a query, durably, in place of one of that name. Raises SavedQueryError."""
        if not 0 < len(name) <= _NAME or not name.isprintable():
            raise SavedQueryError(f"a name is what the query is found by: 1 to {_NAME} printable characters")
        if not 0 < len(sql) <= _SQL:
            raise SavedQueryError(f"a query that is kept has 1 to {_SQL} characters, and this one {len(sql)}")
        self._change(name, SavedQuery(name=name, sql=sql, who=who, at=datetime.now(UTC)))

    def delete(self, name: str) -> None:
        """Forget a query, if there is one of that name."""
        self._change(name, None)

    def _change(self, name: str, query: SavedQuery | None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.with_name(f".{self.path.name}.lock"), _LOCK_S):
            kept = [one for one in self.all() if one.name != name] + ([query] if query else [])
            if len(kept) > _MOST:
                raise SavedQueryError(f"{_MOST} queries are kept already: delete one")
            kept.sort(key=lambda one: one.name.casefold())
            replace_file(self.path, _FILE.dump_json(kept, indent=2) + b"\n", private=True)
