"""What made a policy, beyond its data: the code and the configuration."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from deploy.config import Settings


def of(settings: Settings) -> dict[str, Any]:
    """{millrace, git_commit, config}: versions of the code (git_commit None outside a checkout) and the config's hash.

    The whole configuration of that hash is kept as ``home/configs/<hash>.yaml``.
    """
    return {"millrace": _version(), "git_commit": _git_commit(), "config": settings.snapshot().stem}


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
