"""JSON records in the store's folder and in a policy's: read, written, locked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from feedback.files import ERASURES, LockTimeoutError, append_file, locked, make_folder, replace_file
from serve.policies.folder import PolicyCorrupt, PolicyError

_LOCK_TIMEOUT_S: Final = 60.0


@contextmanager
def exclusive(path: Path, *, create: bool = True) -> Iterator[None]:
    """Hold the lock on a folder or a lock file. Raises PolicyError if another process holds it for too long."""
    try:
        with locked(path, _LOCK_TIMEOUT_S, create=create):
            yield
    except LockTimeoutError as error:
        raise PolicyError(str(error)) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The record in a file, None if there is no such file. Raises PolicyCorrupt."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise PolicyCorrupt(f"{path} is not JSON: {error}") from error


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Replace the record in a file, durable on return."""
    replace_file(path, json.dumps(dict(record), ensure_ascii=False, indent=2, allow_nan=False).encode() + b"\n")


def append_json(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record to a file of lines; a crash may repeat or tear the last line."""
    make_folder(path.parent)
    append_file(path, json.dumps(dict(record)).encode() + b"\n")


def record_erasure(
    folder: Path, *, certainty: str, why: str, erasure: str | None = None, retrain: bool = False
) -> None:
    """Add to the erasures that reach what is in a folder, a policy or a reward model; each ``erasure`` once.

    ``retrain``: it is marked for retraining, that is to be replaced by what has not seen the rows; also afterwards.

    Raises OSError, PolicyError.
    """
    with exclusive(folder, create=False):  # it may have been removed meanwhile
        before = (read_json(folder / ERASURES) or {}).get("erasures", [])
        known = next((one for one in before if erasure is not None and one.get("erasure") == erasure), None)
        if known is not None:
            if retrain and not known.get("retrain"):
                known["retrain"] = True
                write_json(folder / ERASURES, {"erasures": before})
            return
        record: dict[str, Any] = {"at": now(), "certainty": certainty, "why": why}
        record |= ({"erasure": erasure} if erasure else {}) | ({"retrain": True} if retrain else {})
        write_json(folder / ERASURES, {"erasures": [*before, record]})


def now() -> str:
    """The time as the records have it: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
