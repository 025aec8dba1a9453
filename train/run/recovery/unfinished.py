"""Runs that have read the lake and are not finished: at work, or killed with checkpoints left. Imports no torch.

A checkpoint's ``driver.json`` has sampled texts, and its weights have learned from the rows that the run read. When
some of those are erased the run can't publish any more (train/job.py), and what it has kept goes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from feedback.files import try_lock
from feedback.lake.table_changes import ErasedSince, LogGoneError
from feedback.lake.tables import Lake
from serve.policies.store import PolicyNotFound, PolicyStore
from train.config.algorithms import REWARD_MODEL

if TYPE_CHECKING:
    from train.run.recovery.run_store import RunStore

START: Final = "start.json"
LOCK: Final = ".lock"
"""Held by the driver of a run."""
SUPERVISOR: Final = ".supervisor"
"""Held by the process that starts the drivers, one after the other."""
UPLOADING: Final = ".uploading"
_KEPT: Final = ("checkpoints/*", "checkpoints/.step-*", "candidate", "best/*", UPLOADING)
"""What a run writes before it has published."""


@dataclass(frozen=True)
class Stores:
    """What runs publish into: policies, and reward models, whose stores are as that of policies.

    ``evaluation_reward_models``: those that evaluation scores by; the same as the others if there is no such store.
    """

    policies: PolicyStore
    reward_models: PolicyStore
    evaluation_reward_models: PolicyStore = None  # type: ignore[assignment]  # __post_init__ sets it

    def __post_init__(self) -> None:
        if self.evaluation_reward_models is None:
            object.__setattr__(self, "evaluation_reward_models", self.reward_models)

    def of(self, algorithm: str, side: str = "rest") -> PolicyStore:
        """The one that a run with this algorithm and ``train.data.holdout_side`` publishes into."""
        if algorithm != REWARD_MODEL:
            return self.policies
        return self.evaluation_reward_models if side == "slice" else self.reward_models


@dataclass(frozen=True)
class UnfinishedRun:
    """``holder``: the process that is at work on it, as its lock names it; None if there is none."""

    folder: Path
    lake_versions: dict[str, int]
    since: datetime
    holder: str | None

    @property
    def name(self) -> str:
        return self.folder.name


def unfinished_runs(runs: Path) -> list[UnfinishedRun]:
    """Those under a folder, by name; of other machines that share it as well."""
    found = []
    for start in sorted(runs.glob(f"*/{START}")):
        folder, holder = start.parent, holder_of(start.parent)
        if holder is None and not any(kept(folder)):
            continue
        try:
            versions = json.loads(start.read_text())["lake_versions"]
            since = datetime.fromtimestamp(start.stat().st_mtime, UTC)
        except FileNotFoundError:  # it has ended in this moment
            continue
        found.append(UnfinishedRun(folder, versions, since, holder))
    return found


def forget_erased(lake: Lake, runs: Path, stores: Stores) -> list[str]:
    """Remove what idle runs have kept of rows that have been erased since; their names.

    So does a run whose versions of the lake can't be read any more: it can't go on, and what it holds is unknown.
    What one had published when it was killed, before it looked for erasures once more, is marked.

    Raises:
        feedback.lake.tables.LakeError: the lake can't be read.
    """
    forgotten = []
    for start in sorted(runs.glob(f"*/{START}")):
        folder = start.parent
        with _alone(folder) as alone:
            if not alone or not start.exists():
                continue
            started = json.loads(start.read_text())
            store = _target(started, stores)
            published = published_by(store, started.get("id")) if (folder / "checkpoints").exists() else None
            if (published is None and not any(kept(folder))) or not was_erased(lake, started["lake_versions"]):
                continue
            if published is not None:
                mark(store, published, _LATE)
            forget(folder)
            forgotten.append(folder.name)
    return forgotten


def forget_erased_in_store(lake: Lake, runs: RunStore, stores: Stores) -> list[str]:
    """``forget_erased`` of the runs in an object store that no machine is at work on; their names.

    So does one of which the store has not what it was started with. And what uploads have left there goes.

    Raises also serve.policies.folder.PolicyError: the store can't be reached.
    """
    forgotten = []
    for manifest in [found.manifest for found in runs.all()]:
        if not manifest.checkpoints:
            continue
        started = runs.start_of(manifest)
        if started is not None and not was_erased(lake, started["lake_versions"]):
            continue
        if not runs.drop(manifest.run, forget=True):
            continue
        forgotten.append(manifest.run)
        if started is None:
            continue
        store = _target(started, stores)
        if (published := published_by(store, started.get("id"))) is not None:
            mark(store, published, _LATE)
    runs.sweep()
    return forgotten


_LATE: Final = "rows that it had read were erased before its run had ended"


def _target(started: Mapping[str, Any], stores: Stores) -> PolicyStore:
    """What a run that was started so publishes into."""
    config = started["config"]
    return stores.of(config["algorithm"]["name"], config.get("data", {}).get("holdout_side", "rest"))


def needed_by_runs(runs: Path, store: PolicyStore, why: str) -> dict[int, str]:
    """Version -> "run NAME" and ``why``, of those that runs were started with which are at work or may go on."""
    needed: dict[int, str] = {}
    for run in unfinished_runs(runs):
        with suppress(FileNotFoundError):  # it has ended in this moment
            started = json.loads((run.folder / START).read_bytes())
            needed |= dict.fromkeys(named_versions(started, store), f"run {run.name} {why}")
    return needed


def named_versions(record: Any, store: PolicyStore) -> dict[int, str]:
    """Version -> where its folder is named, of the absolute paths in a JSON value; by whichever way they lead there."""
    named, root = {}, os.path.realpath(store.root)
    for where, text in _texts(record):
        parent, name = os.path.split(os.path.realpath(text)) if text.startswith("/") else ("", "")
        if parent == root and re.fullmatch(r"v\d{6,}", name):
            named[int(name[1:])] = where
    return named


def _texts(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """The texts in a JSON value, each with the names that lead to it."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(part, f"{where}.{key}" if where else str(key))


def mark(store: PolicyStore, published: int, why: str) -> None:
    """Record with a version that its run had read what was erased; once."""
    store.record_erasure(published, certainty="yes", why=why, erasure="in training")


def published_by(store: PolicyStore, run_id: str | None, parent: int = 0) -> int | None:
    """The version that the run of this id has published; newer than ``parent``."""
    if run_id is None:
        return None
    for version in reversed(store.versions()):
        if version <= parent:
            break
        try:
            policy = store.get(version)
        except PolicyNotFound:  # withdrawn meanwhile
            continue
        if policy.lineage.get("run_id") == run_id:
            return version
    return None


def was_erased(lake: Lake, versions: dict[str, int], *, unknown: bool = True) -> bool:
    """Whether rows that the lake had at these versions have been erased since; ``unknown`` if the log is gone."""
    try:
        return bool(ErasedSince(lake, versions).rows())
    except LogGoneError:
        return unknown


def forget(folder: Path) -> None:
    """Remove what a run has kept, and that it ever began. Its lock must be held."""
    for path in kept(folder):
        shutil.rmtree(path, ignore_errors=path.name == UPLOADING)  # a thread of this process may be removing that
    (folder / START).unlink(missing_ok=True)


def give_up(folders: Iterable[Path], shared: RunStore | None = None) -> list[str]:
    """Remove what idle runs have kept, so that they can't go on; the names of those that had something.

    What they were started with, their metrics and their results stay.

    ``shared``: the object store that has the runs, where it is removed, too.
    """
    removed = []
    for folder in folders:
        if shared is not None and not shared.drop(folder.name):
            if (found := shared.read(folder.name)) is not None and found.manifest.claim is not None:
                continue  # another machine is at work on it
        elif shared is None and not any(kept(folder)):
            continue
        with _alone(folder) as alone:
            if alone:
                for path in kept(folder):
                    shutil.rmtree(path)
                removed.append(folder.name)
    return removed


def kept(folder: Path) -> Iterator[Path]:
    return (path for pattern in _KEPT for path in sorted(folder.glob(pattern)))


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Hold a run's lock; False if another process is at work on it, be it between two drivers."""
    with (folder / LOCK).open("a") as lock:
        yield try_lock(lock.fileno()) and not _is_held(folder / SUPERVISOR)


def holder_of(folder: Path) -> str | None:
    """The process at work on a run, as its lock names it; None if there is none."""
    for lock in (folder / LOCK, folder / SUPERVISOR):
        if _is_held(lock):
            return lock.read_text().strip() or "a process"
    return None


def _is_held(lock: Path) -> bool:
    with suppress(FileNotFoundError), lock.open("r+") as file:  # NFS locks only what is open for writing
        return not try_lock(file.fileno())
    return False
