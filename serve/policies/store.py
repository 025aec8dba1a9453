"""The policy store: versioned, hashed policies on disk and the pointer to the one that serves.

    policies/v000042/            a Hugging Face folder, safetensors only
    policies/v000042/policy.json the manifest: version, parent, sha256 of every file, lineage, metrics
    policies/v000042/gate.json   the gate's verdict, which comes after the policy and is not hashed
    policies/v000042/erasures.json  erasures of rows that it was trained on, which come after it too
    policies/serving.json        the pointer, moved by compare-and-swap
    policies/history.jsonl       every pointer there ever was, oldest first
    policies/outcomes.jsonl      what came of them: whether a server served the policy, or refused it

A policy is written aside, fsynced and renamed, so a reader sees all of it or nothing. Versions only grow and are never
used twice, even when the newest policy has been removed. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from feedback.files import ERASURES, try_lock
from serve.policies.folder import PolicyError, PolicyInvalid, check_folder, copy_model, regular_files, sha256_file

__all__ = [
    "Outcome",
    "Pointer",
    "Policy",
    "PolicyCorrupt",
    "PolicyError",
    "PolicyInvalid",
    "PolicyNotFound",
    "PolicyStore",
    "RecordDamaged",
    "StalePointer",
]

MANIFEST: Final = "policy.json"
GATE: Final = "gate.json"
_HISTORY: Final = "history.jsonl"
_OUTCOMES: Final = "outcomes.jsonl"
_LOST_WITH: Final = {
    _HISTORY: "A rollback without --to then passes over the policy that it named",
    _OUTCOMES: "A policy of which nothing else says that it served is then rolled back to with --override only",
}
"""By the file what is no longer known when a line of it is removed."""
_OWN: Final = frozenset({MANIFEST, GATE, f".{GATE}.new", ERASURES, f".{ERASURES}.new"})
"""The store's own files in a policy's folder."""
_FOLDER: Final = re.compile(r"v(\d{6,})")
_ASIDE: Final = ".publishing-"
_LOCK_TIMEOUT_S: Final = 60.0


class PolicyNotFound(PolicyError):
    """The store has no such version."""


class PolicyCorrupt(PolicyError):
    """A published policy differs from its manifest; the text names the file."""


class StalePointer(PolicyError):
    """The serving pointer is not what the caller expected: somebody moved it in between."""


class RecordDamaged(PolicyError):
    """A line of what is on record can't be read; the text names file and line, and says what to do."""


@dataclass(frozen=True)
class Policy:
    """One published policy. ``created_at`` is ISO 8601, UTC; ``files`` maps a name to its ``sha256`` and ``size``;
    ``probe`` has what ``serve.policies.probe`` compares a server with; ``erasures`` the erasures that reach it, oldest
    first."""

    version: int
    parent: int | None
    path: Path
    created_at: str
    files: dict[str, dict[str, Any]]
    lineage: dict[str, Any]
    metrics: dict[str, Any]
    gate: dict[str, Any] | None
    probe: dict[str, Any] | None = None
    erasures: tuple[dict[str, Any], ...] = ()

    @property
    def sha256(self) -> str:
        """One hash of the whole content (names and hashes of all files), the same whatever the version."""
        listing = "".join(f"{name}\0{self.files[name]['sha256']}\n" for name in sorted(self.files))
        return hashlib.sha256(listing.encode()).hexdigest()

    @property
    def weight_files(self) -> list[Path]:
        """The safetensors files, by name."""
        return [self.path / name for name in sorted(self.files) if name.endswith(".safetensors")]


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


class PolicyStore:
    """The policies under one folder. Safe between threads and processes that share the folder on one machine."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    # Policies

    def publish(
        self,
        source: Callable[[Path], object] | Path | str,
        *,
        parent: int | None,
        lineage: Mapping[str, Any],
        metrics: Mapping[str, Any],
        gate: Mapping[str, Any] | None = None,
        probe: Callable[[Path], dict[str, Any]] | None = None,
    ) -> Policy:
        """Make the next version of what ``source`` holds and return it.

        ``source`` is a function that writes a Hugging Face folder into the (empty) path it is given, or such a folder,
        whose top-level files are copied; pickled weights that lie beside the safetensors are left out of a copy.
        ``probe`` works out, from the folder, the numbers that a server proves itself by
        (``serve.policies.probe.measure``).

        Raises PolicyInvalid if the result is no safetensors policy, PolicyNotFound if there is no ``parent``,
        ValueError if lineage or metrics are not JSON (a NaN is not).
        """
        _require_json("lineage", lineage)
        _require_json("metrics", metrics)
        if parent is not None:
            self.get(parent)
        aside, hold = self._make_aside()
        try:
            if callable(source):
                source(aside)
            else:
                copy_model(Path(source), aside, leave_out=_OWN)
            for name in _OWN:  # a copy of another policy's folder brings these
                (aside / name).unlink(missing_ok=True)
            check_folder(aside)
            files = {
                path.relative_to(aside).as_posix(): {"sha256": sha256_file(path), "size": path.stat().st_size}
                for path in regular_files(aside)
            }
            manifest = {
                "parent": parent,
                "created_at": _now(),
                "files": files,
                "lineage": dict(lineage),
                "metrics": dict(metrics),
            }
            if probe is not None:
                manifest["probe"] = probe(aside)
            if gate is not None:
                (aside / GATE).write_bytes(_dump(dict(gate)))
            for path in aside.rglob("*"):
                _fsync(path)
            with self._locked():
                version = self._next_version()
                (aside / MANIFEST).write_bytes(_dump({"version": version, **manifest}))
                _fsync(aside / MANIFEST)
                _fsync(aside)
                os.rename(aside, self._folder(version))
                _fsync(self.root)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        finally:
            os.close(hold)
        return self.get(version)

    def get(self, version: int) -> Policy:
        """The policy of that version. Raises PolicyNotFound, PolicyCorrupt (unreadable manifest)."""
        folder = self._folder(version)
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
        except FileNotFoundError:
            have = ", ".join(map(str, self.versions())) or "none"
            raise PolicyNotFound(f"there is no policy {version} in {self.root} (there: {have})") from None
        except ValueError as error:
            raise PolicyCorrupt(f"{folder / MANIFEST} is not JSON: {error}") from error
        try:
            policy = Policy(
                version=manifest["version"],
                parent=manifest["parent"],
                path=folder,
                created_at=manifest["created_at"],
                files=manifest["files"],
                lineage=manifest["lineage"],
                metrics=manifest["metrics"],
                gate=_read_json(folder / GATE),
                probe=manifest.get("probe"),
                erasures=tuple((_read_json(folder / ERASURES) or {}).get("erasures", ())),
            )
        except (KeyError, TypeError) as error:
            raise PolicyCorrupt(f"{folder / MANIFEST} lacks {error}") from error
        if policy.version != version:
            raise PolicyCorrupt(f"{folder / MANIFEST} says version {policy.version}")
        return policy

    def versions(self) -> list[int]:
        """All published versions, rising."""
        if not self.root.is_dir():
            return []
        matches = (_FOLDER.fullmatch(entry.name) for entry in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> Policy | None:
        """The newest policy, whether it serves or not; None in an empty store."""
        versions = self.versions()
        return self.get(versions[-1]) if versions else None

    def verify(self, version: int) -> Policy:
        """Read every byte of a policy and compare it with the manifest. Raises PolicyCorrupt naming the file."""
        policy = self.get(version)
        for name, expected in policy.files.items():
            path = policy.path / name
            if not path.is_file():
                raise PolicyCorrupt(f"policy {version}: {name} is missing")
            if (size := path.stat().st_size) != expected["size"]:
                raise PolicyCorrupt(f"policy {version}: {name} has {size} bytes, its manifest says {expected['size']}")
            if (digest := sha256_file(path)) != expected["sha256"]:
                raise PolicyCorrupt(
                    f"policy {version}: {name} has sha256 {digest[:12]}…, its manifest says {expected['sha256'][:12]}…"
                )
        # A loader takes every *.safetensors that it finds, so an extra file is as bad as a changed one.
        names = {path.relative_to(policy.path).as_posix() for path in regular_files(policy.path)} - _OWN
        if surplus := sorted(names - policy.files.keys()):
            raise PolicyCorrupt(f"policy {version}: {surplus[0]} is not in its manifest")
        return policy

    def record_gate(self, version: int, verdict: Mapping[str, Any]) -> Policy:
        """Keep the gate's verdict with a policy (``Policy.gate``); a later verdict replaces it."""
        with self._locked():
            policy = self.get(version)
            _replace_file(policy.path / GATE, _dump(dict(verdict)))
            return self.get(version)

    def record_erasure(self, version: int, *, certainty: str, why: str, erasure: str | None = None) -> Policy:
        """Keep with a policy that rows which it was trained on have been erased (``Policy.erasures``).

        An ``erasure`` is recorded once. Raises PolicyNotFound, PolicyError if others hold the locks for long.
        """
        with self._locked():
            record_erasure(self.get(version).path, certainty=certainty, why=why, erasure=erasure)
            return self.get(version)

    def withdraw(self, version: int) -> None:
        """Remove a policy that must not have been published. Raises PolicyError if it serves, PolicyNotFound."""
        folder = self.get(version).path
        with self._locked():
            pointer = self.serving()
            if pointer is not None and pointer.version == version:
                raise PolicyError(f"policy {version} serves, so it can't be withdrawn: roll back first")
            aside = self.root / f"{_ASIDE}{uuid.uuid4().hex}"  # whoever publishes next removes it if we are killed
            os.rename(folder, aside)
            _fsync(self.root)
        shutil.rmtree(aside)

    # The serving pointer

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

        Promoting the version that serves already makes a new generation, which is how a replica is told to try again;
        ``previous`` stays what it was.

        Raises StalePointer if the pointer is elsewhere, PolicyNotFound if there is no such policy.
        """
        self.get(version)
        with self._locked():
            current = self.serving()
            at_version = current.version if current else None
            _require_current(current, expected)
            previous = current.previous if current and current.version == version else at_version
            pointer = Pointer(
                version=version,
                previous=previous,
                at=_now(),
                who=who,
                why=why,
                verdict=dict(verdict) if verdict is not None else None,
                generation=current.generation + 1 if current else 1,
            )
            if not (self.root / _OUTCOMES).exists():  # before there is a move that the history tells nothing of
                self._write_lines(_OUTCOMES, self.outcomes())
            self._write_lines(_HISTORY, self.history())  # what a crash tore or left out, before the pointer moves on
            _replace_file(self.root / "serving.json", _dump(asdict(pointer)))
            self._write_lines(_HISTORY, self.history())
        return pointer

    def move_back(self, refused: Pointer, to: int, *, who: str, why: str) -> Pointer:
        """Point at ``to``, which serves, again: the server, or fleet, ``who`` refused what ``refused`` named.

        Raises StalePointer if the pointer is no longer at that move.
        """
        self.record_outcome(refused, served=False, by=who)
        return self.promote(to, expected=refused, who=who, why=why, verdict={"rollback_from": refused.version})

    def history(self) -> list[Pointer]:
        """Every pointer there was, oldest first, the current one last."""
        pointers = self._read_lines(_HISTORY, Pointer) or []
        current = self.serving()
        # The pointer moves first and the history follows, so a crash in between leaves the last line out.
        if current and (not pointers or pointers[-1].generation < current.generation):
            pointers.append(current)
        return pointers

    def record_outcome(self, pointer: Pointer, *, served: bool, by: str) -> None:
        """Put on record that a server serves what ``pointer`` names, or refused it; once for each move.

        A record with a damaged line is gone on with behind it.
        """
        outcome = Outcome(pointer.generation, pointer.version, served, _now(), by)
        with self._locked():
            try:
                outcomes = self.outcomes()
            except RecordDamaged:
                self._append_line(_OUTCOMES, outcome)
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

    # Inside

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

    def _append_line(self, name: str, record: Pointer | Outcome) -> None:
        """Add a record behind whatever the file ends with."""
        path = self.root / name
        torn = b"" if path.read_bytes().endswith(b"\n") else b"\n"
        with path.open("ab") as file:
            file.write(torn + _line(record))
            file.flush()
            os.fsync(file.fileno())

    def _write_lines(self, name: str, records: Sequence[Pointer | Outcome]) -> None:
        lines = b"".join(map(_line, records))
        path = self.root / name
        old = path.read_bytes() if path.exists() else b""
        if lines.startswith(old):
            with path.open("ab") as file:
                file.write(lines[len(old) :])
                file.flush()
                os.fsync(file.fileno())
            _fsync(self.root)
        else:
            _replace_file(path, lines)

    def _folder(self, version: int) -> Path:
        return self.root / f"v{version:06d}"

    def _next_version(self) -> int:
        """Take the next version number, for good; call it under the lock."""
        counter = self.root / ".last_version"
        last = int(counter.read_text()) if counter.exists() else 0
        version = max([last, *self.versions()]) + 1
        _replace_file(counter, f"{version}\n".encode())
        return version

    def _make_aside(self) -> tuple[Path, int]:
        """A new folder to write into and an open, locked descriptor of it that marks it as in use."""
        with self._locked():
            for entry in self.root.glob(_ASIDE + "*"):
                descriptor = os.open(entry, os.O_RDONLY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(entry)  # its writer died
                except BlockingIOError:
                    pass  # its writer is at work
                finally:
                    os.close(descriptor)
            aside = self.root / f"{_ASIDE}{uuid.uuid4().hex}"
            aside.mkdir()
            hold = os.open(aside, os.O_RDONLY)
            fcntl.flock(hold, fcntl.LOCK_EX)
        return aside, hold

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        with _locked(self.root / ".lock", os.O_RDWR | os.O_CREAT):
            yield


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


def record_erasure(folder: Path, *, certainty: str, why: str, erasure: str | None = None) -> None:
    """Add to the erasures that reach what is in a folder, a policy or a reward model; each ``erasure`` once.

    Raises OSError, PolicyError.
    """
    with _locked(folder, os.O_RDONLY):
        before = (_read_json(folder / ERASURES) or {}).get("erasures", [])
        if erasure is not None and any(record.get("erasure") == erasure for record in before):
            return
        told = {"at": _now(), "certainty": certainty, "why": why} | ({"erasure": erasure} if erasure else {})
        _replace_file(folder / ERASURES, _dump({"erasures": [*before, told]}))


@contextmanager
def _locked(path: Path, flags: int) -> Iterator[None]:
    """Hold the lock on a file or folder that is opened so. Raises PolicyError if another holds it for too long."""
    descriptor = os.open(path, flags, 0o644)
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    try:
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                raise PolicyError(f"{path} was held by another for {_LOCK_TIMEOUT_S:.0f} s")
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise PolicyCorrupt(f"{path} is not JSON: {error}") from error


def _require_json(what: str, value: Mapping[str, Any]) -> None:
    for key, item in value.items():
        try:
            json.dumps(item, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{what}[{key!r}] can't be kept as JSON: {error}") from error


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False).encode() + b"\n"


def _replace_file(path: Path, content: bytes) -> None:
    aside = path.with_name(f".{path.name}.new")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (error.errno == errno.EINVAL and path.is_dir()):  # some file systems can't sync a directory
            raise
    finally:
        os.close(descriptor)


def _line(record: Pointer | Outcome) -> bytes:
    return json.dumps(asdict(record), ensure_ascii=False).encode() + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
