"""Programs that tests start, without the ten seconds in which torch and vLLM are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from feedback.processes.fork_server import ForkedProcess, fork

_PATIENCE_S = 120.0  # until the session's fork server has imported what it imports


def start_forked(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes] | ForkedProcess:
    """``python ARGUMENTS``, forked from what the session's tests share (tests/conftest.py), or else an interpreter."""
    command, variables = [sys.executable, *arguments], dict(os.environ if environment is None else environment)
    with log.open("wb") as output, open(os.devnull) as nothing:
        files = (nothing.fileno(), output.fileno(), output.fileno())
        forked = fork(command, environment=variables, files=files, patience=_PATIENCE_S)
        return forked or subprocess.Popen(command, stdout=output, stderr=output, env=variables)
