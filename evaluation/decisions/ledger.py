"""The ledger: every decision in the order in which they were taken, so that none can be changed unseen.

    decisions.jsonl     one entry a line, each with the sha256 of the one before it and of itself
    head.json           the number and sha256 of an entry, the last one or the one before it
    evidence/<sha256>   what decisions rest on, as JSON, by the hash of its content
    .lock               held while an entry is added
    .gate.lock          held during an evaluation, so that no two use the same items or the same share of the budget

An entry is on disk when ``append`` returns. A process that is killed while it appends leaves a last line without its
end: that entry was never acknowledged, readers pass over it, and the next append cuts it off. Or it leaves a line that
the head does not know yet, which the next append mends.

Without a key the chain finds what is not consistent: a line changed, moved, removed or put in, and an end that was cut
off without the head. Who rewrites all lines and the head is found by what refers to them from outside, the policies'
``gate.json`` and the pointer's history (``deploy.loop.promotion.missing_from``), if that was not rewritten too. With a
key each entry and the head are signed (HMAC-SHA256), and nobody without the key can write either. Whoever has the key
can, and anybody can put back an older ledger together with its head: only a copy elsewhere tells.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from feedback.files import fsync_path, locked, make_folder, replace_file, write_all

FIRST: Final = "0" * 64
"""What the first entry has as the hash of the one before it."""

_HEAD: Final = "head.json"
_UNSIGNED: Final = (
    "is not signed, and evaluation.decisions_key is set: `millrace decisions sign` signs what is there, if the key is "
    "new; else it was written without the key"
)
_LOCK_WAIT_S: Final = 30.0
_GATE_WAIT_S: Final = 0.5

Kind = Literal["budget", "intent", "verdict", "promotion", "rollback", "experiment", "shadow", "signed"]
MOVES: Final = ("promotion", "rollback")
"""Of the serving pointer; the others are the gate's, or of experiments and shadows."""


class LedgerError(RuntimeError):
    """The ledger can't be used as it is; the text says why."""


class LedgerDamaged(LedgerError):
    """A line, or a piece of evidence, is not what was written; the text names it."""


class EvaluationBusy(LedgerError):
    """Another evaluation is at work with this ledger."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class Entry(BaseModel):
    """One decision. ``number`` counts from 1; ``sha256`` is of all the rest, ``previous`` that of the entry before.
    ``mac``: the signature of ``sha256``, if there is a key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    kind: Kind
    at: str
    who: str
    body: dict[str, Any]
    previous: str
    sha256: str
    mac: str | None = None

    def digest(self) -> str:
        """What ``sha256`` must be."""
        return hashlib.sha256(canonical(self.model_dump(exclude={"sha256", "mac"}))).hexdigest()


class Head(BaseModel):
    """The last entry that is known to be there. ``mac`` is its signature as the head."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = Field(ge=1)
    sha256: str
    mac: str | None = None


class Ledger:
    """The ledger in a folder, which need not exist before the first entry. Reads what is new since it last read.

    With a ``key`` all that is read must be signed with it. A ledger that was begun without one is signed by ``sign``.
    """

    def __init__(self, folder: Path, key: bytes | None = None) -> None:
        self.folder, self.key = folder, key
        self.file = folder / "decisions.jsonl"
        self._entries: list[Entry] = []
        self._read = 0  # bytes of whole lines
        self._given = 0  # entries that ``unread`` has returned, whose bodies are not kept

    def entries(self) -> list[Entry]:
        """All entries so far, oldest first. Raises LedgerDamaged naming the first line that is not as it was written.

        Also if the last ones are gone, or are not signed with the key. What this object has read before is not read
        again, so a change behind its back shows in another one.
        """
        assert not self._given, "this ledger is read by ``unread``"
        return self._checked()

    def unread(self) -> list[Entry]:
        """The entries that it has not returned yet, oldest first; raises as ``entries``, which can't be called then.

        For who stays long: an object that is asked for all ``entries`` holds the whole history, and this one its
        hashes.
        """
        found, before = self._checked(), self._given
        self._entries[before:] = [entry.model_copy(update={"body": {}}) for entry in found[before:]]
        self._given = len(found)
        return found[before:]

    def _checked(self) -> list[Entry]:
        found = self._read_on()
        if self.key is not None and found and found[-1].mac is None:
            raise LedgerDamaged(f"{self.file}, line {len(found)} {_UNSIGNED}")
        return found

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
            if self.key is None and entries and entries[-1].mac is not None:
                raise LedgerError(f"{self.file} is signed: evaluation.decisions_key must name the file with its key")
            return self._add(kind, body, who)

    def sign(self, *, who: str) -> Entry:
        """Sign what is there with the key, by an entry that says so. Raises as ``append``; LedgerError without a key,
        or if it is signed already."""
        if self.key is None:
            raise LedgerError("evaluation.decisions_key is not set: there is no key to sign with")
        make_folder(self.folder)
        with locked(self.folder / ".lock", _LOCK_WAIT_S):
            entries = self._read_on(signing=True)
            if entries and entries[-1].mac is not None:
                raise LedgerError(f"{self.file} is signed already")
            return self._add("signed", {}, who)

    def _add(self, kind: Kind, body: Mapping[str, Any], who: str) -> Entry:
        self._cut_torn_line()
        parts: dict[str, Any] = {
            "number": len(self._entries) + 1,
            "kind": kind,
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "who": who,
            "body": json.loads(canonical(body)),
            "previous": self._entries[-1].sha256 if self._entries else FIRST,
        }
        sha256 = hashlib.sha256(canonical(parts)).hexdigest()
        entry = Entry(**parts, sha256=sha256, mac=self._mac("entry", sha256))
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
        head = Head(number=entry.number, sha256=sha256, mac=self._mac("head", sha256))
        replace_file(self.folder / _HEAD, canonical(head.model_dump()) + b"\n")
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

    def _read_on(self, *, signing: bool = False) -> list[Entry]:
        head = self._head(signing)  # before the lines: they only grow
        try:
            with self.file.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._read:
                    raise LedgerDamaged(f"{self.file} has become shorter: its last lines were removed")
                file.seek(self._read)
                *lines, _torn = file.read().split(b"\n")
        except FileNotFoundError:
            if self._read or head is not None:
                raise LedgerDamaged(f"{self.file} was removed") from None
            return []
        for line in lines:
            self._entries.append(self._parse(line, len(self._entries) + 1))
            self._read += len(line) + 1
        found = list(self._entries)
        if head is None and len(found) > 1:
            raise LedgerDamaged(f"{self.folder / _HEAD} was removed, which says where {self.file} ends")
        if head is not None and head.number > len(found):
            raise LedgerDamaged(
                f"{self.file} has {len(found)} lines, and {_HEAD} beside it knows {head.number}: its last lines were "
                "removed"
            )
        if head is not None and found[head.number - 1].sha256 != head.sha256:
            raise LedgerDamaged(f"{self.file}, line {head.number} is not the one that {_HEAD} knows: it was rewritten")
        return found

    def _head(self, signing: bool) -> Head | None:
        path = self.folder / _HEAD
        try:
            head = Head.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise LedgerDamaged(f"{path} is no head of a ledger: it was changed or damaged") from error
        if self.key is not None and head.mac is None and not signing:
            raise LedgerDamaged(f"{path} {_UNSIGNED}")
        if head.mac is not None and not self._signed("head", head.sha256, head.mac):
            raise LedgerDamaged(f"{path} is not signed with the key of evaluation.decisions_key")
        return head

    def _mac(self, of: str, sha256: str) -> str | None:
        """The signature of an entry, or of an entry as the head; None without a key."""
        return None if self.key is None else hmac.new(self.key, f"{of} {sha256}".encode(), "sha256").hexdigest()

    def _signed(self, of: str, sha256: str, mac: str | None) -> bool:
        """Whether that is its signature; without a key nothing can be said, and it is taken as it is."""
        expected = self._mac(of, sha256)
        return expected is None or hmac.compare_digest(expected, mac or "")

    def _parse(self, line: bytes, number: int) -> Entry:
        where = f"{self.file}, line {number}"
        try:
            entry = Entry.model_validate(json.loads(line))
        except (ValidationError, ValueError) as error:
            raise LedgerDamaged(f"{where} is no entry: it was changed or damaged") from error
        previous = self._entries[-1] if self._entries else None
        if entry.digest() != entry.sha256:
            raise LedgerDamaged(f"{where} was changed: its sha256 is not that of its content")
        if entry.number != number or entry.previous != (previous.sha256 if previous else FIRST):
            raise LedgerDamaged(f"{where} does not follow the one before it: a line was changed, removed or put in")
        if entry.mac is not None and not self._signed("entry", entry.sha256, entry.mac):
            raise LedgerDamaged(f"{where} is not signed with the key of evaluation.decisions_key")
        before = previous is not None and previous.mac is not None
        if before and entry.mac is None:
            raise LedgerDamaged(f"{where} is not signed, and the one before it is: it was written without the key")
        if entry.mac is not None and previous is not None and not before and entry.kind != "signed":
            raise LedgerDamaged(f"{where} is signed, and the one before it is not: nobody has signed that")
        return entry

    def _cut_torn_line(self) -> None:
        if self.file.exists() and self.file.stat().st_size > self._read:
            os.truncate(self.file, self._read)


def canonical(value: Any) -> bytes:
    """JSON of which there is one form only; floats as their shortest form, which reads back as the same float.

    Raises ValueError for a number that is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
