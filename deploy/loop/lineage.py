"""Lineage: the code and configuration of a policy; the policies, reward models and runs that have read some rows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deploy.config.root import Settings
from serve.vllm.compat import installed

if TYPE_CHECKING:
    from feedback.lake.tables import Lake
    from feedback.maintenance.erasure import Found
    from serve.policies.store import PolicyStore
    from train.run.recovery.unfinished import Stores


Kind = Literal["policy", "reward model", "evaluation reward model", "unfinished run"]
Certainty = Literal["yes", "possibly"]


def current(settings: Settings) -> dict[str, Any]:
    """The lineage of what is trained now: {millrace, git_commit, config}, None without a version or a checkout.

    ``config`` is a hash; the configuration is kept as ``home/configs/<hash>.yaml``.
    """
    version = installed("millrace").get("millrace")
    return {"millrace": version, "git_commit": _git_commit(), "config": settings.snapshot().stem}


@dataclass(frozen=True)
class Trained:
    """What was trained on some rows, or descends from a policy that was; ``why`` says how that is known.

    ``name``: a policy's or a reward model's version, a run's name. ``holder``: the process at work on a run.
    """

    kind: Kind
    name: str
    certainty: Certainty
    why: str
    holder: str | None = None


@dataclass(frozen=True)
class Artifact:
    """A policy or a reward model. ``parent``: the policy that it was trained from."""

    kind: Kind
    name: str
    parent: int | None
    lake_versions: Mapping[str, int] | None
    created: datetime


def artifacts(stores: Stores) -> list[Artifact]:
    """The policies, rising, and the reward models."""
    return [one for kind, store in stores_by_kind(stores).items() for one in _artifacts(kind, store)]


def stores_by_kind(stores: Stores) -> dict[Kind, PolicyStore]:
    """The stores by what they hold, policies first."""
    return {
        "policy": stores.policies,
        "reward model": stores.reward_models,
        "evaluation reward model": stores.evaluation_reward_models,
    }


def trained_on(stores: Stores, lake: Lake, found: Found) -> list[Trained]:
    """The policies and reward models whose lineage contains some rows.

    One was trained on a row if the row was in the lake at the versions that its manifest names, or if the policy that
    it descends from was. Where such a version can't be read any more (a vacuum removed it), what was trained after the
    oldest of the rows was possibly trained on it.
    """
    return _reached(artifacts(stores), lambda one: _has_read(one.lake_versions, one.created, lake, found))


def runs_with(runs: Path, lake: Lake, found: Found) -> list[Trained]:
    """The runs of a folder that are not finished and have read some rows; also of other machines that share it."""
    from train.run.recovery.unfinished import unfinished_runs

    return [
        Trained("unfinished run", run.name, *own, holder=run.holder)
        for run in unfinished_runs(runs)
        if (own := _has_read(run.lake_versions, run.since, lake, found)) is not None
    ]


def parents_of_runs(runs: Path) -> dict[int, str]:
    """Version -> why it is needed, of the parents of a folder's runs that are at work or may go on."""
    from train.run.recovery.unfinished import START, unfinished_runs

    needed = {}
    for run in unfinished_runs(runs):
        with suppress(FileNotFoundError):  # it has ended in this moment
            needed[int(json.loads((run.folder / START).read_bytes())["parent"])] = f"the parent of run {run.name}"
    return needed


def trained_before_erasure(
    stores: Stores,
    lake: Lake,
    since: Mapping[str, int],
    *,
    besides: Collection[Artifact] = (),
    parents: Iterable[Trained] = (),
) -> list[Trained]:
    """The policies and reward models that may have read rows of files that were erased since the tables had some
    versions, and the descendants of those and of ``parents``; not those of ``besides``.
    """

    def own(artifact: Artifact) -> tuple[Certainty, str] | None:
        why = _lost(artifact.lake_versions, lake, since)
        return ("possibly", why) if why else None

    others = [artifact for artifact in artifacts(stores) if artifact not in besides]
    return _reached(others, own, [replace(parent, certainty="possibly") for parent in parents])


def _artifacts(kind: Kind, store: PolicyStore) -> Iterator[Artifact]:
    from serve.policies.store import PolicyNotFound

    for version in store.versions():
        try:
            policy = store.get(version)
        except PolicyNotFound:  # its run has just withdrawn it
            continue
        created = datetime.fromisoformat(policy.created_at)
        parent = policy.parent if kind == "policy" else policy.lineage.get("policy")
        yield Artifact(kind, str(version), parent, policy.lineage.get("lake_versions"), created)


def _reached(
    artifacts: Iterable[Artifact],
    own: Callable[[Artifact], tuple[Certainty, str] | None],
    parents: Iterable[Trained] = (),
) -> list[Trained]:
    """Of artifacts, parents before children, those that ``own`` gives a reason for, and what descends from them."""
    policies = {parent.name: parent for parent in parents if parent.kind == "policy"}
    reached = []
    for artifact in artifacts:
        reason = own(artifact)
        above = policies.get(str(artifact.parent))
        if above is not None and (reason is None or (above.certainty, reason[0]) == ("yes", "possibly")):
            reason = above.certainty, f"it descends from policy {above.name}"
        if reason is not None:
            reached.append(Trained(artifact.kind, artifact.name, *reason))
            if artifact.kind == "policy":
                policies[artifact.name] = reached[-1]
    return reached


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


def _has_read(
    versions: Mapping[str, int] | None, created: datetime, lake: Lake, found: Found
) -> tuple[Certainty, str] | None:
    """Whether what was trained at a time, from the lake at some versions, has read some rows, and how that is known."""
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
    if unknown and found.since is not None and found.since <= created:
        return "possibly", f"{', '.join(unknown)} can't be read, and it was trained after them"
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
