"""The audit log: who did what to the keys, the policies and the data, when, and from where.

One line of JSON before an action is taken and one behind it, in a file that only grows; each line has the hash of the
one before, so that a line that was changed or taken out shows. There is no key: who may write to the file can cut off
its end, or write all of it anew, and neither is seen, but beside a ``head`` that was kept elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from feedback.files import append_file, locked, make_private

log = logging.getLogger(__name__)

_LOCK_S: Final = 10.0
_LONGEST: Final = 500
_PIECE: Final = 64 << 10
_START: Final = "0" * 64


class AuditLogError(RuntimeError):
    """An action can't be put on record, so it is not taken; or the record was changed."""


@dataclass(frozen=True)
class AuditEntry:
    """One action.

    ``origin``: the address of a client, or the machine of a command. ``outcome``: ``done``, ``refused`` or ``failed``
    with the reason, or None where whoever took the action was killed before it ended. ``result``: what came of it.
    """

    at: str
    action: str
    who: str
    origin: str
    subject: dict[str, Any]
    outcome: str | None = None
    result: dict[str, Any] = field(default_factory=dict)


class AuditLog:
    """The log in a file, which several processes of a machine may write to."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @contextmanager
    def entry(
        self, action: str, subject: Mapping[str, Any] | None = None, *, who: str, origin: str
    ) -> Iterator[Outcome]:
        """Have an action on record before the block takes it, and what it came to when the block ends.

        Args:
            action: what is done, such as ``keys.create``.
            subject: to what. Never a secret, nor what an erasure is to remove.
            who: a person, or the name of a key.
            origin: from where.

        Raises AuditLogError if it can't be written, before the block. Behind it the action can't be undone: then the
        process's log says that its outcome is missing, and the caller has what came of it.
        """
        outcome, number = Outcome(), secrets.token_hex(8)
        named = {name: value[:_LONGEST] if isinstance(value, str) else value for name, value in (subject or {}).items()}
        begun = {"at": _now(), "id": number, "action": action, "who": who, "origin": origin, "subject": named}
        self._append(begun)
        try:
            yield outcome
        except BaseException as error:
            outcome.text = f"failed: {type(error).__name__}: {error}"
            raise
        finally:
            try:
                self._append({"at": _now(), "id": number, "outcome": outcome.text[:_LONGEST], "result": outcome.result})
            except AuditLogError as error:
                log.error("%s: %s; the audit log does not say so: %s", action, outcome.text, error.__cause__)

    def entries(self) -> list[AuditEntry]:
        """All actions, oldest first. Raises AuditLogError if a line was changed or taken out."""
        found: dict[str, AuditEntry] = {}
        before = _START
        for number, line in enumerate(self._lines(), start=1):
            try:
                body = json.loads(line)
                if body.pop("previous") != before:
                    raise ValueError("the line before it is another one than when it was written")
                name = body.pop("id")
                if name in found:
                    found[name] = AuditEntry(
                        **asdict(found[name]) | {"outcome": body["outcome"], "result": body["result"]}
                    )
                else:
                    found[name] = AuditEntry(**body)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise AuditLogError(f"{self.path}, line {number}, is not as it was written: {error}") from None
            before = _hash(line)
        return list(found.values())

    def head(self) -> tuple[int, str]:
        """How many lines there are, and the hash of the last, which all of them are in. Raises as ``entries``."""
        self.entries()
        lines = self._lines()
        return len(lines), _hash(lines[-1]) if lines else _START

    def has_head(self, lines: int, sha256: str) -> bool:
        """Whether its first ``lines`` are those of that head. Raises as ``entries``."""
        self.entries()
        found = self._lines()
        return lines <= len(found) and (_hash(found[lines - 1]) if lines else _START) == sha256

    def _lines(self) -> list[bytes]:
        """Whole lines. What a crash tore in the middle was never followed by its action."""
        try:
            return self.path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []

    def _end(self) -> tuple[bytes | None, int]:
        """The last whole line, and the bytes up to its end; read from behind, as the file only grows."""
        with self.path.open("rb") as file:
            size, reach = file.seek(0, os.SEEK_END), _PIECE
            while True:
                start = max(0, size - reach)
                file.seek(start)
                *lines, torn = file.read(size - start).split(b"\n")
                if start == 0 or len(lines) > 1:  # the first one may be cut
                    return (lines[-1] if lines else None), size - len(torn)
                reach *= 2

    def _append(self, body: dict[str, Any]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = self.path.with_name(f"{self.path.name}.lock")
            with locked(lock, _LOCK_S):
                make_private(self.path)
                last, size = self._end()
                os.truncate(self.path, size)
                previous = _START if last is None else _hash(last)
                line = json.dumps(body | {"previous": previous}, default=str, ensure_ascii=False)
                append_file(self.path, line.encode(errors="replace") + b"\n")
        except (OSError, TimeoutError) as error:
            raise AuditLogError(f"{self.path} can't be written, and nothing is done off the record: {error}") from error


class Outcome:
    """What an action has come to, for the block that takes it to say."""

    def __init__(self) -> None:
        self.text = "done"
        self.result: dict[str, Any] = {}

    def refused(self, why: str) -> None:
        """It was not done, for this reason."""
        self.text = f"refused: {why}"


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
