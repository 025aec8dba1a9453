"""The ledger: every decision in the order in which they were taken, so that none can be changed unseen.

    decisions.jsonl     one entry a line, each with the sha256 of the one before it and of itself
    evidence/<sha256>   what decisions rest on, as JSON, by the hash of its content
    .lock               held while an entry is added
    .gate.lock          held during an evaluation, so that no two use the same items or the same share of the budget

An entry is on disk when ``append`` returns. A process that is killed while it appends leaves a last line without its
end: that entry was never acknowledged, readers pass over it, and the next append cuts it off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from feedback.files import fsync_path, locked, make_folder, replace_file, write_all

FIRST: Final = "0" * 64
"""What the first entry has as the hash of the one before it."""

_LOCK_WAIT_S: Final = 30.0
_GATE_WAIT_S: Final = 0.5

Kind = Literal["verdict", "promotion", "rollback", "experiment"]


class LedgerError(RuntimeError):
    """The ledger can't be used as it is; the text says why."""


class LedgerDamaged(LedgerError):
    """A line, or a piece of evidence, is not what was written; the text names it."""


class EvaluationBusy(LedgerError):
    """Another evaluation is at work with this ledger."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class Entry(BaseModel):
    """One decision. ``number`` counts from 1; ``sha256`` is of all the rest, ``previous`` that of the entry before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    kind: Kind
    at: str
    who: str
    body: dict[str, Any]
    previous: str
    sha256: str

    def digest(self) -> str:
        """What ``sha256`` must be."""
        return hashlib.sha256(canonical(self.model_dump(exclude={"sha256"}))).hexdigest()


class Ledger:
    """The ledger in a folder, which need not exist before the first entry. Reads what is new since it last read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "decisions.jsonl"
        self._entries: list[Entry] = []
        self._read = 0  # bytes of whole lines

    def entries(self) -> list[Entry]:
        """All entries so far, oldest first. Raises LedgerDamaged naming the first line that is not as it was written.

        What this object has read before is not read again, so a change behind its back shows in another one.
        """
        try:
            with self.file.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._read:
                    raise LedgerDamaged(f"{self.file} has become shorter: its last lines were removed")
                file.seek(self._read)
                *lines, _torn = file.read().split(b"\n")
        except FileNotFoundError:
            if self._read:
                raise LedgerDamaged(f"{self.file} was removed") from None
            return []
        for line in lines:
            self._entries.append(self._parse(line, len(self._entries) + 1))
            self._read += len(line) + 1
        return list(self._entries)

    def append(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        *,
        who: str,
        unless: Callable[[list[Entry]], str | None] | None = None,
    ) -> Entry:
        """Add an entry, durable on return.

        ``unless`` gets all entries, while nobody else can add one, and says why this one must not be added. Raises
        LedgerError with that reason, LedgerDamaged, feedback.files.LockTimeoutError.
        """
        make_folder(self.folder)
        with locked(self.folder / ".lock", _LOCK_WAIT_S):
            entries = self.entries()
            if unless is not None and (why := unless(entries)):
                raise LedgerError(why)
            self._cut_torn_line()
            parts: dict[str, Any] = {
                "number": len(entries) + 1,
                "kind": kind,
                "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "who": who,
                "body": json.loads(canonical(body)),
                "previous": entries[-1].sha256 if entries else FIRST,
            }
            entry = Entry(**parts, sha256=hashlib.sha256(canonical(parts)).hexdigest())
            line = canonical(entry.model_dump()) + b"\n"
            fd = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                write_all(fd, line)
                os.fsync(fd)
            finally:
                os.close(fd)
            fsync_path(self.folder)
            self._entries.append(entry)
            self._read += len(line)
        return entry

    def keep(self, evidence: Any) -> str:
        """Keep what a decision rests on, durable on return; its sha256, by which ``evidence`` gives it back."""
        content = canonical(evidence)
        name = hashlib.sha256(content).hexdigest()
        make_folder(self.folder / "evidence")
        replace_file(self.folder / "evidence" / name, content)
        return name

    def evidence(self, sha256: str) -> Any:
        """What ``keep`` was given. Raises LedgerDamaged if it is missing, or was changed."""
        path = self.folder / "evidence" / sha256
        try:
            content = path.read_bytes()
        except OSError as error:
            raise LedgerDamaged(f"evidence {path} can't be read: {error.strerror}") from error
        if (found := hashlib.sha256(content).hexdigest()) != sha256:
            raise LedgerDamaged(f"evidence {path} was changed: it has sha256 {found[:12]}…")
        return json.loads(content)

    def evaluating(self) -> AbstractContextManager[None]:
        """Held during an evaluation. Raises EvaluationBusy if another one is at work."""
        make_folder(self.folder)
        busy = EvaluationBusy(f"another evaluation is at work with the ledger {self.folder}: try again later")
        return locked(self.folder / ".gate.lock", _GATE_WAIT_S, busy=busy)

    def _parse(self, line: bytes, number: int) -> Entry:
        where = f"{self.file}, line {number}"
        try:
            entry = Entry.model_validate(json.loads(line))
        except (ValidationError, ValueError) as error:
            raise LedgerDamaged(f"{where} is no entry: it was changed or damaged") from error
        previous = self._entries[-1].sha256 if self._entries else FIRST
        if entry.digest() != entry.sha256:
            raise LedgerDamaged(f"{where} was changed: its sha256 is not that of its content")
        if entry.number != number or entry.previous != previous:
            raise LedgerDamaged(f"{where} does not follow the one before it: a line was changed, removed or put in")
        return entry

    def _cut_torn_line(self) -> None:
        if self.file.exists() and self.file.stat().st_size > self._read:
            os.truncate(self.file, self._read)


def canonical(value: Any) -> bytes:
    """JSON of which there is one form only; floats as their shortest form, which reads back as the same float.

    Raises ValueError for a number that is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
