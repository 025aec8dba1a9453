"""What a harness is asked, where it asks, and what Millrace needs to know of one to run it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Protocol

from evaluation.harness.results import HarnessFailed, Metric

_VERSION_TIMEOUT_S: Final = 60
_VERSION: Final = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


@dataclass(frozen=True)
class HarnessRequest:
    """What to run. ``limit``, ``model_args`` (key=value,…) and ``arguments`` are the harness's own."""

    tasks: tuple[str, ...]
    limit: str | None = None
    include_path: Path | None = None
    model_args: str | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Endpoint:
    """A server with OpenAI's API. ``url``: without /v1. ``context``: in tokens; ``folder``: the policy's, which has the
    tokenizer."""

    url: str
    key: str
    model: str
    context: int
    folder: Path


class Harness(Protocol):
    """A harness as Millrace runs it."""

    name: ClassVar[str]
    distribution: ClassVar[str]
    """Its name on PyPI, as its version is asked for."""
    requirements: ClassVar[tuple[str, ...]]
    """What pip installs, in the version that was tried."""

    def check(self, request: HarnessRequest) -> None:
        """Raises ValueError for what it can't be asked."""
        ...

    def command(self, request: HarnessRequest, endpoint: Endpoint, output: Path) -> list[str]:
        """Its command line behind the interpreter. The key is not in it."""
        ...

    def environment(self, endpoint: Endpoint) -> dict[str, str]:
        """The variables that it reads, the key among them."""
        ...

    def metrics(self, output: Path) -> tuple[Metric, ...]:
        """What its files say. Raises HarnessFailed if they have no results."""
        ...


def interpreter(harness: Harness, environment: Path, setting: str) -> Path:
    """The Python of an environment: its folder, or that Python itself. Raises HarnessFailed with what makes one."""
    python = environment / "bin" / "python" if environment.is_dir() else environment
    if not python.is_file():
        install = " ".join(f"'{requirement}'" for requirement in harness.requirements)
        raise HarnessFailed(
            f"there is no environment of {harness.name} at {environment} ({setting}); it runs in one of its own. Make "
            f"it with:\n    python3 -m venv {environment} && {environment}/bin/pip install {install}\n"
            f"or set {setting} to the folder of one that has it"
        )
    return python


def version_of(harness: Harness, python: Path) -> str:
    """The harness's version in that environment. Raises HarnessFailed if it isn't there."""
    command = [str(python), "-I", "-c", _VERSION, harness.distribution]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HarnessFailed(f"{python} does not run: {error}") from error
    if done.returncode != 0:
        install = " ".join(f"'{requirement}'" for requirement in harness.requirements)
        raise HarnessFailed(f"{python} has no {harness.name}; install it with:\n    {python} -m pip install {install}")
    return done.stdout.strip()
