"""The serving pointer: which policy is to serve, every move of it, and what came of each.

serving.json     the pointer, moved by compare-and-swap
candidate.json   the policy that the gate is at work on, if it is: a hint, by which nothing serves
history.jsonl    every pointer there ever was, oldest first
outcomes.jsonl   whether a server served the policy that a move names, or refused it
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from feedback.files import append_file, replace_file
from serve.policies.folder import PolicyError
from serve.policies.records import exclusive, now, read_json, write_json

_CANDIDATE: Final = "candidate.json"
_HISTORY: Final = "history.jsonl"
_OUTCOMES: Final = "outcomes.jsonl"
_LOST_WITH: Final = {
    _HISTORY: "A rollback without --to then passes over the policy that it named",
    _OUTCOMES: "A policy of which nothing else says that it served is then rolled back to with --override only",
}
"""By the file what is no longer known when a line of it is removed."""


class StalePointer(PolicyError):
    """The serving pointer is not what the caller expected: somebody moved it in between."""


class RecordDamaged(PolicyError):
    """A line of a record can't be read; the text names file and line, and says what to do."""


@dataclass(frozen=True)
class Pointer:
    """Which policy is to serve. ``generation`` counts the pointer's moves; ``previous`` is what it named before."""

    version: int
    previous: int | None
    at: str
    who: str
    why: str
    verdict: dict[str, Any] | None
    generation: int


@dataclass(frozen=True)
class Outcome:
    """What came of a move of the pointer, as the server ``by`` reports it: it served the policy, or refused it."""

    generation: int
    version: int
    served: bool
    at: str
    by: str


Record = TypeVar("Record", Pointer, Outcome)


class ServingPointer:
    """The pointer in a policy store's folder. Safe between threads and processes on one machine."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.place = str(root)
        """Where the policies are, for messages."""

    def require_servable(self, version: int) -> None:
        """Raises PolicyError if the store has no such version, or no weights of it."""
        raise NotImplementedError

    def serving(self) -> Pointer | None:
        """The pointer, or None before the first promotion. Raises PolicyError if serving.json is unreadable."""
        path = self.root / "serving.json"
        try:
            return Pointer(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise PolicyError(f"{path} is no serving pointer: {error}") from error

    def promote(
        self,
        version: int,
        *,
        expected: Pointer | int | None,
        who: str,
        why: str,
        verdict: Mapping[str, Any] | None = None,
    ) -> Pointer:
        """Point at ``version`` if the pointer is at ``expected`` (None: if there is no pointer yet).

        ``expected``: a version, or a Pointer for that very move: it may have come back to the version since.

        Promoting the version that serves already makes a new generation, which makes a replica try again;
        ``previous`` stays what it was.

        Raises StalePointer if the pointer is elsewhere, PolicyNotFound if there is no such policy, PolicyPruned if its
        weights were removed.
        """
        with self._locked():
            self.require_servable(version)
            current = self.serving()
            at_version = current.version if current else None
            _require_current(current, expected)
            previous = current.previous if current and current.version == version else at_version
            pointer = Pointer(
                version=version,
                previous=previous,
                at=now(),
                who=who,
                why=why,
                verdict=dict(verdict) if verdict is not None else None,
                generation=current.generation + 1 if current else 1,
            )
            if not (self.root / _OUTCOMES).exists():  # before there is a move that is not in the history
                self._write_lines(_OUTCOMES, self.outcomes())
            self._write_lines(_HISTORY, self.history())  # what a crash tore or left out, before the pointer moves on
            write_json(self.root / "serving.json", asdict(pointer))
            self._write_lines(_HISTORY, self.history())
        return pointer

    def move_back(self, refused: Pointer, to: int, *, who: str, why: str) -> Pointer:
        """Point at ``to``, which serves, again: the server, or fleet, ``who`` refused what ``refused`` named.

        Raises StalePointer if the pointer is no longer at that move.
        """
        self.record_outcome(refused, served=False, by=who)
        return self.promote(to, expected=refused, who=who, why=why, verdict={"rollback_from": refused.version})

    def announce(self, candidate: int | None) -> None:
        """Name the policy that is likely to be promoted next, so that servers may prepare it; None: there is none."""
        path = self.root / _CANDIDATE
        if candidate is None:
            path.unlink(missing_ok=True)
        else:
            write_json(path, {"version": candidate, "at": now()})

    def announced(self) -> int | None:
        """The policy that ``announce`` has named. What can't be read names none."""
        with suppress(PolicyError, OSError, KeyError, TypeError, ValueError):
            return None if (hint := read_json(self.root / _CANDIDATE)) is None else int(hint["version"])
        return None

    def history(self) -> list[Pointer]:
        """Every pointer there was, oldest first, the current one last."""
        pointers = self._read_lines(_HISTORY, Pointer) or []
        current = self.serving()
        # The pointer moves first and the history follows, so a crash in between leaves the last line out.
        if current and (not pointers or pointers[-1].generation < current.generation):
            pointers.append(current)
        return pointers

    def identity(self) -> str | None:
        """What tells this store from others, wherever it lies: the time of its first move. Raises RecordDamaged."""
        history = self.history()
        return history[0].at if history else None

    def record_outcome(self, pointer: Pointer, *, served: bool, by: str) -> None:
        """Put on record that a server serves what ``pointer`` names, or refused it; once for each move.

        If a line of the record is damaged, the outcome is added behind it.
        """
        outcome = Outcome(pointer.generation, pointer.version, served, now(), by)
        with self._locked():
            try:
                outcomes = self.outcomes()
            except RecordDamaged:
                if not (self.root / _OUTCOMES).exists():  # it is the history that is damaged
                    raise
                self._append_outcome(outcome)
                return
            known = any((o.generation, o.served) == (outcome.generation, outcome.served) for o in outcomes)
            self._write_lines(_OUTCOMES, outcomes if known else [*outcomes, outcome])

    def outcomes(self) -> list[Outcome]:
        """What came of the moves of the pointer, in the order in which it was reported. Raises RecordDamaged."""
        outcomes = self._read_lines(_OUTCOMES, Outcome)
        return outcomes if outcomes is not None else _outcomes_of(self.history())

    def served(self) -> set[int]:
        """The versions that have served. A move that any server refused is none by which a policy has.

        Raises RecordDamaged.
        """
        outcomes = self.outcomes()
        refused = {outcome.generation for outcome in outcomes if not outcome.served}
        return {outcome.version for outcome in outcomes if outcome.served and outcome.generation not in refused}

    def _read_lines(self, name: str, kind: type[Record]) -> list[Record] | None:
        """The records of a file of lines, None if there is no such file. Raises RecordDamaged."""
        path = self.root / name
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return None
        records: list[Record] = []
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                records.append(kind(**json.loads(line)))
            except (ValueError, TypeError) as error:
                if number < len(lines):  # a last line without its newline is a torn append; any other is damage
                    raise RecordDamaged(
                        f"{path}, line {number} is no {kind.__name__.lower()} ({error}): restore the file from a "
                        f"backup, or remove that line. {_LOST_WITH[name]}"
                    ) from error
        return records

    def _append_outcome(self, outcome: Outcome) -> None:
        """Add an outcome behind a damaged record, unless a line of it has that outcome."""
        path = self.root / _OUTCOMES
        content = path.read_bytes()
        for line in content.split(b"\n"):
            with suppress(ValueError, TypeError):
                known = Outcome(**json.loads(line))
                if (known.generation, known.served) == (outcome.generation, outcome.served):
                    return
        append_file(path, (b"" if content.endswith(b"\n") else b"\n") + _line(outcome))

    def _write_lines(self, name: str, records: Sequence[Pointer | Outcome]) -> None:
        lines = b"".join(map(_line, records))
        path = self.root / name
        old = path.read_bytes() if path.exists() else b""
        if lines.startswith(old):
            append_file(path, lines[len(old) :])
        else:
            replace_file(path, lines)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        with exclusive(self.root / ".lock"):
            yield


def _line(record: Pointer | Outcome) -> bytes:
    return json.dumps(asdict(record), ensure_ascii=False).encode() + b"\n"


def _require_current(current: Pointer | None, expected: Pointer | int | None) -> None:
    """Raises StalePointer unless the pointer is where it is expected."""
    version = current.version if current else None
    if isinstance(expected, Pointer):
        if current is None or current.generation != expected.generation:
            raise StalePointer(
                f"the serving pointer has moved since it named policy {expected.version} (move {expected.generation}; "
                f"now policy {version}): look again and decide"
            )
    elif version != expected:
        raise StalePointer(f"the serving pointer is at {version}, not at {expected}: look again and decide")


def _outcomes_of(history: Sequence[Pointer]) -> list[Outcome]:
    """What came of the moves of a store that is older than ``outcomes.jsonl``: what no server took back has served.

    A server or a fleet signs a move with its name, a person with user@host.
    """
    outcomes = []
    for pointer, following in zip(history, [*history[1:], None], strict=False):
        taken_back = (
            following is not None
            and "@" not in following.who
            and (following.verdict or {}).get("rollback_from") == pointer.version
        )
        outcomes.append(Outcome(pointer.generation, pointer.version, not taken_back, pointer.at, "history"))
    return outcomes
