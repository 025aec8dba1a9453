"""What made a policy: the code and the configuration, and which policies some rows of the lake went into."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deploy.config import Settings

if TYPE_CHECKING:
    from feedback.erasure import Found
    from feedback.lake import Lake
    from serve.policies import Policy, PolicyStore


def of(settings: Settings) -> dict[str, Any]:
    """{millrace, git_commit, config}: versions of the code (git_commit None outside a checkout) and the config's hash.

    The whole configuration of that hash is kept as ``home/configs/<hash>.yaml``.
    """
    return {"millrace": _version(), "git_commit": _git_commit(), "config": settings.snapshot().stem}


@dataclass(frozen=True)
class Trained:
    """A policy that was trained on some rows, or descends from one that was; ``why`` says how that is known."""

    version: int
    certainty: Literal["yes", "possibly"]
    why: str


def policies_with(store: PolicyStore, lake: Lake, found: Found) -> list[Trained]:
    """The policies whose lineage contains any of some rows, rising.

    A policy was trained on a row if the row was in the lake at the versions that its manifest names, or an ancestor of
    it was. Where such a version can't be read any more (a vacuum removed it), a policy that was made after the oldest
    of the rows was possibly trained on it.
    """
    trained: dict[int, Trained] = {}
    for version in store.versions():
        policy = store.get(version)
        own = _trained_on(policy, lake, found)
        above = trained.get(policy.parent) if policy.parent is not None else None
        if above is not None and (own is None or (above.certainty, own.certainty) == ("yes", "possibly")):
            own = Trained(version, above.certainty, f"it descends from policy {above.version}")
        if own is not None:
            trained[version] = own
    return list(trained.values())


def _trained_on(policy: Policy, lake: Lake, found: Found) -> Trained | None:
    from feedback.erasure import was_visible

    versions = policy.lineage.get("lake_versions")
    if versions is None:  # it was not trained from the lake
        return None
    unknown = []
    for table, ids in found.sealed.items():
        if table not in versions:
            continue
        seen = was_visible(lake, table, ids, versions[table])
        if seen:
            return Trained(policy.version, "yes", f"they were in {table} at version {versions[table]}")
        if seen is None:
            unknown.append(f"{table} at version {versions[table]}")
    made = datetime.fromisoformat(policy.created_at)
    if unknown and found.since is not None and found.since <= made:
        return Trained(policy.version, "possibly", f"{', '.join(unknown)} can't be read, and it was made after them")
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
