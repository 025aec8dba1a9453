"""Which replicas are in the fleet, and their reports: small files in one folder, a few for each name.

A name belongs to the process that holds the lock on its file, so a name can't be taken twice, is free again when its
holder dies, however that happens, and is taken by the one that replaces it.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import TypeAdapter

from feedback.files import make_folder, open_lock, replace_file, try_lock
from serve.fleet.state import FleetError

_LOCK: Final = ".lock"
_REPORT: Final = ".report.json"
_METRICS: Final = ".prom"
_MOST_REPLICAS: Final = 10_000
_TRIES: Final = 5  # at a name: ``living`` holds its lock for a moment


@dataclass(frozen=True)
class Report:
    """A replica's report.

    life: one process's; the next with the same name has another.
    version, generation: the policy that it serves, and the move of the pointer that it followed to it.
    content: hash of that policy's files, or of the prepared one's while there is one.
    prepared: the generation that it is ready for. failed: (generation, why) of what it could not prepare or serve.
    unready: why it does not answer requests. requests, failures: since its start, those that it let in and answered, or
    failed, on the two APIs, and of them those that failed.
    at: when this was written, seconds since 1970.
    """

    name: str
    life: str
    state: Literal["starting", "ready", "stopping"]
    version: int = 0
    generation: int = 0
    content: str | None = None
    prepared: int | None = None
    failed: tuple[int, str] | None = None
    unready: str | None = None
    variant: str | None = None
    requests: int = 0
    failures: int = 0
    at: float = 0.0


_JSON: Final = TypeAdapter(Report)


class Name:
    """A replica's name, held until ``release`` or the end of the process."""

    def __init__(self, folder: Path, base: str) -> None:
        """Take the first free one of ``<base>-0``, ``<base>-1`` … Raises FleetError if there is none."""
        make_folder(folder)
        for number in range(_MOST_REPLICAS):
            self.name = f"{base}-{number}"
            self._descriptor = open_lock(folder / f"{self.name}{_LOCK}")
            for _ in range(_TRIES):
                if try_lock(self._descriptor):
                    (folder / f"{self.name}{_REPORT}").unlink(missing_ok=True)
                    return
                time.sleep(random.uniform(0.002, 0.02))
            os.close(self._descriptor)
        raise FleetError(f"all {_MOST_REPLICAS} names below {base} are taken in {folder}")

    def release(self) -> None:
        """Give it up; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def living(folder: Path) -> list[str]:
    """The names that are held."""
    found = []
    for path in sorted(folder.glob(f"*{_LOCK}")):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            if not try_lock(descriptor, shared=True):
                found.append(path.name.removesuffix(_LOCK))
        finally:
            os.close(descriptor)
    return found


def reports(folder: Path) -> list[Report]:
    """The living replicas' reports; one without a report is starting."""
    found = []
    for name in living(folder):
        try:
            found.append(_JSON.validate_json((folder / f"{name}{_REPORT}").read_bytes()))
        except FileNotFoundError:
            found.append(Report(name, "", "starting"))
    return found


def write_report(folder: Path, report: Report) -> None:
    """Replace a replica's report, whole or not at all. It need not outlive a crash of the machine."""
    replace_file(folder / f"{report.name}{_REPORT}", _JSON.dump_json(report), durable=False)


def write_metrics(folder: Path, name: str, text: bytes) -> None:
    """Leave a replica's Prometheus text for the one that serves all of them."""
    replace_file(folder / f"{name}{_METRICS}", text, durable=False)


def read_metrics(folder: Path) -> dict[str, bytes]:
    """The living replicas' Prometheus texts, by name."""
    found = {}
    for name in living(folder):
        try:
            found[name] = (folder / f"{name}{_METRICS}").read_bytes()
        except FileNotFoundError:
            continue
    return found
