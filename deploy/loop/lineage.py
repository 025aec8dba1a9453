"""What made a policy: the code and the configuration, and into which policies, reward models and runs rows went."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deploy.config.root import Settings

if TYPE_CHECKING:
    from feedback.lake.tables import Lake
    from feedback.maintenance.erasure import Found
    from serve.policies.store import Policy, PolicyStore


Certainty = Literal["yes", "possibly"]


def of(settings: Settings) -> dict[str, Any]:
    """{millrace, git_commit, config}: versions of the code (git_commit None outside a checkout) and the config's hash.

    The whole configuration of that hash is kept as ``home/configs/<hash>.yaml``.
    """
    return {"millrace": _version(), "git_commit": _git_commit(), "config": settings.snapshot().stem}


@dataclass(frozen=True)
class Trained:
    """A policy that was trained on some rows, or descends from one that was; ``why`` says how that is known."""

    version: int
    certainty: Certainty
    why: str


@dataclass(frozen=True)
class TrainedModel:
    """A reward model that was trained on some rows, or whose policy was."""

    folder: str
    certainty: Certainty
    why: str


@dataclass(frozen=True)
class TrainedRun:
    """A run that is not finished and has read some rows; ``holder``: the process at work on it, if there is one."""

    name: str
    holder: str | None
    certainty: Certainty
    why: str


def policies_with(store: PolicyStore, lake: Lake, found: Found) -> list[Trained]:
    """The policies whose lineage contains any of some rows, rising.

    A policy was trained on a row if the row was in the lake at the versions that its manifest names, or an ancestor of
    it was. Where such a version can't be read any more (a vacuum removed it), a policy that was made after the oldest
    of the rows was possibly trained on it.
    """
    trained: dict[int, Trained] = {}
    for policy in _policies(store):
        version = policy.version
        own = _trained_on(policy.lineage.get("lake_versions"), datetime.fromisoformat(policy.created_at), lake, found)
        above = trained.get(policy.parent) if policy.parent is not None else None
        if above is not None and (own is None or (above.certainty, own[0]) == ("yes", "possibly")):
            own = above.certainty, f"it descends from policy {above.version}"
        if own is not None:
            trained[version] = Trained(version, *own)
    return list(trained.values())


def models_with(runs: Path, policies: Iterable[Trained], lake: Lake, found: Found) -> list[TrainedModel]:
    """The reward models of a folder of runs that were trained on some rows, or from one of ``policies``."""
    parents = {policy.version: policy for policy in policies}
    trained = []
    for model in _models(runs):
        own = _trained_on(model.lake_versions, model.made, lake, found)
        above = parents.get(model.parent)
        if above is not None and (own is None or (above.certainty, own[0]) == ("yes", "possibly")):
            own = above.certainty, f"it descends from policy {above.version}"
        if own is not None:
            trained.append(TrainedModel(str(model.folder), *own))
    return trained


def runs_with(runs: Path, lake: Lake, found: Found) -> list[TrainedRun]:
    """The runs of a folder that are not finished and have read some rows; also of other machines that share it."""
    from train.run.unfinished import unfinished_runs

    trained = []
    for run in unfinished_runs(runs):
        if (own := _trained_on(run.lake_versions, run.since, lake, found)) is not None:
            trained.append(TrainedRun(run.name, run.holder, *own))
    return trained


def that_lost(
    store: PolicyStore,
    runs: Path,
    lake: Lake,
    since: Mapping[str, int],
    *,
    besides: Collection[str] = (),
    parents: Iterable[Trained] = (),
) -> tuple[list[Trained], list[TrainedModel]]:
    """The policies and reward models that could read rows of files that were erased from since the tables had some
    versions, and their descendants, as those of ``parents``; not those of ``besides``, names that ``all_names`` gave.
    """
    trained, reached = {policy.version: policy for policy in parents}, []
    for policy in _policies(store):
        if _name_of(policy) in besides:
            continue
        why = _lost(policy.lineage.get("lake_versions"), lake, since)
        if why is None and policy.parent in trained:
            why = f"it descends from policy {policy.parent}"
        if why is not None:
            trained[policy.version] = Trained(policy.version, "possibly", why)
            reached.append(trained[policy.version])
    models = []
    for model in _models(runs):
        if _name_of(model) in besides:
            continue
        why = _lost(model.lake_versions, lake, since)
        if why is None and model.parent in trained:
            why = f"it descends from policy {model.parent}"
        if why is not None:
            models.append(TrainedModel(str(model.folder), "possibly", why))
    return reached, models


def all_names(store: PolicyStore, runs: Path) -> set[str]:
    """A name for every policy and reward model that there is; a later one in the same folder has another."""
    return {*map(_name_of, _policies(store)), *map(_name_of, _models(runs))}


@dataclass(frozen=True)
class _Model:
    folder: Path
    parent: int
    lake_versions: Mapping[str, int]
    made: datetime


def _models(runs: Path) -> Iterator[_Model]:
    for file in sorted(runs.glob("*/reward_model/training.json")):
        try:
            manifest, made = json.loads(file.read_bytes()), datetime.fromtimestamp(file.stat().st_mtime, UTC)
        except FileNotFoundError:  # its run has just withdrawn it
            continue
        yield _Model(file.parent, manifest["parent"], manifest["lineage"]["lake_versions"], made)


def _policies(store: PolicyStore) -> Iterator[Policy]:
    from serve.policies.store import PolicyNotFound

    for version in store.versions():
        try:
            yield store.get(version)
        except PolicyNotFound:  # its run has just withdrawn it
            continue


def _name_of(made: Policy | _Model) -> str:
    return f"{made.folder} {made.made}" if isinstance(made, _Model) else str(made.version)


def _lost(versions: Mapping[str, int] | None, lake: Lake, since: Mapping[str, int]) -> str | None:
    """Why what read the lake at some versions may have read what was erased since other versions; None: it has not."""
    from feedback.lake.table_changes import ErasedSince, LogGoneError

    if versions is None:
        return None
    try:
        rows = ErasedSince(lake, versions, after=since).rows()
    except LogGoneError:
        try:  # what it read and went since was there at the later of both
            rows = ErasedSince(lake, {table: max(at, since.get(table, -1)) for table, at in versions.items()}).rows()
        except LogGoneError:
            return "the lake's log does not reach back to when it was trained"
    gone = ", ".join(f"{count} {table}" for table, count in rows.items())
    return f"{gone} that may have been there when it was trained" if gone else None


def _trained_on(
    versions: Mapping[str, int] | None, made: datetime, lake: Lake, found: Found
) -> tuple[Certainty, str] | None:
    """Whether what was made at a time, from the lake at these versions, has seen some rows, and how that is known."""
    from feedback.maintenance.erasure import was_visible

    if versions is None:  # it was not trained from the lake
        return None
    unknown = []
    for table, ids in found.sealed.items():
        if table not in versions:
            continue
        seen = was_visible(lake, table, ids, versions[table])
        if seen:
            return "yes", f"they were in {table} at version {versions[table]}"
        if seen is None:
            unknown.append(f"{table} at version {versions[table]}")
    if unknown and found.since is not None and found.since <= made:
        return "possibly", f"{', '.join(unknown)} can't be read, and it was made after them"
    return None


def _version() -> str | None:
    try:
        return metadata.version("millrace")
    except metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return None


def _git_commit() -> str | None:
    """The commit of the checkout that this code runs from, with ``+`` for uncommitted changes."""
    folder = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude", "*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    return described.stdout.strip() or None if described.returncode == 0 else None
