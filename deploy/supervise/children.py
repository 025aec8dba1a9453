"""Child processes of Millrace: each under a subreaper, its output in a log file that can be followed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Self

from deploy import devices
from deploy.config.root import Settings, child_environment
from deploy.supervise import subreaper
from feedback.processes.fork_server import ForkedProcess, fork

NOTHING_TO_LEARN: Final = 3
"""Exit code of `millrace train` where there was nothing to learn from, and nothing went wrong."""

_SUBREAPER_MARGIN_S = 8.0  # beyond the grace, to end what the command left behind


@contextmanager
def no_leftovers(grace: float = 5.0) -> Iterator[None]:
    """End every process that the block started, directly or not, however the block ends. For a command's main()."""
    before = subreaper.descendants()
    subreaper.adopt_orphans()
    try:
        yield
    finally:
        if killed := subreaper.end_descendants(grace, spare=before, spare_trackers=True):
            print(f"killed what did not stop: {', '.join(killed)}", file=sys.stderr, flush=True)


class Child:
    """One command, run below a subreaper in a session of its own; stdout and stderr are appended to ``log``.

    Where there is a fork server, it is forked there. Start it from a thread that outlives it: Linux ties it to the
    thread that started it.

    Args:
        environment: beside ours, which it gets without the settings.
        patience: seconds to wait for a fork server that still imports; without any, only one that is ready is asked,
            and with None none, as of a program that changes modules before they are imported.
        stdin: a file of this process; by default there is nothing to read.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        grace: float,
        follow: Callable[[str], None] | None = None,
        environment: Mapping[str, str] | None = None,
        patience: float | None = 0.0,
        stdin: int | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.grace = grace
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._process = _start(command, output, child_variables(environment), grace, patience, stdin)
        self.started = time.monotonic()
        self._ended = threading.Event()
        self._follower = threading.Thread(target=self._follow, args=(follow,), name=f"follow {name}", daemon=True)
        if follow:
            self._follower.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        code = self._process.poll()
        if code is not None and self._follower.is_alive():
            self._ended.set()
            self._follower.join(5.0)
        return code

    def wait(self, timeout: float) -> int:
        """The exit code. Raises TimeoutError when it still runs after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} still runs after {timeout:.0f} s")
            # Short waits, so that a signal's handler runs at once and Stopped comes through.
            try:
                self._process.wait(min(0.2, max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                continue
        return code

    def finish(self, timeout: float) -> int:
        """``wait``; however that ends, nothing of it runs afterwards."""
        with self:
            return self.wait(timeout)

    def request_stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """Stop it and everything below it, by force after the grace; the exit code."""
        self.request_stop()
        try:
            return self.wait(self.grace + _SUBREAPER_MARGIN_S)
        except TimeoutError:
            self._process.kill()
            return self.wait(5.0)

    def ended(self, code: int) -> str:
        """What to say of its end by itself."""
        return f"{self.name} ended with code {code}; its last lines ({self.log}):\n{self.tail()}"

    def tail(self, lines: int = 20) -> str:
        """The last lines that this child wrote."""
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - 64 * 1024))
            text = file.read().decode(errors="replace")
        return "\n".join(line.rstrip().rsplit("\r", 1)[-1] for line in text.splitlines()[-lines:])

    def _follow(self, each: Callable[[str], None]) -> None:
        """Hand over the new lines of the log. A file in between, so that a child never waits for us."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            rest = b""
            while True:
                last = self._ended.is_set()
                *lines, rest = (rest + file.read()).split(b"\n")
                for line in [*lines, rest] if last and rest else lines:
                    # A progress bar redraws its line with carriage returns; only its last state is a line of a log.
                    each(line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1])
                if last:
                    return
                self._ended.wait(0.1)


def millrace(*arguments: str | Path) -> list[str]:
    """The command line that runs this installation's CLI."""
    return [sys.executable, "-P", "-m", "deploy.cli", *map(str, arguments)]


def start(
    settings: Settings,
    name: str,
    command: Sequence[str | Path],
    *,
    log: str,
    grace: float,
    follow: Callable[[str], None] | None = None,
    patience: float = 0.0,
) -> Child:
    """Start a command of the CLI with these settings; its log is among theirs, its devices are its role's.

    Raises ConfigError if it has a role, and there are no devices for it.
    """
    whole = millrace("--config", settings.snapshot(), *command)
    file = settings.path(settings.up.logs) / log
    role = devices.ROLES.get(str(command[0])) if command else None
    own = None if role is None else devices.environment(settings, role)
    return Child(name, whole, log=file, grace=grace, follow=follow, environment=own, patience=patience)


def _start(
    command: Sequence[str],
    output: IO[bytes],
    variables: dict[str, str],
    grace: float,
    patience: float | None,
    stdin: int | None,
) -> subprocess.Popen[bytes] | ForkedProcess:
    with open(os.devnull, "rb") as nothing:
        files = (nothing.fileno() if stdin is None else stdin, output.fileno(), output.fileno())
        forked = None
        if patience is not None:
            forked = fork(command, environment=variables, files=files, grace=grace, patience=patience)
    return forked or subprocess.Popen(
        [sys.executable, "-P", "-m", "deploy.supervise.subreaper", str(os.getpid()), str(grace), *command],
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=variables,
        start_new_session=True,  # Ctrl-C on the terminal reaches us alone, and we stop things in order
    )


def child_variables(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child, which finds the packages from any working directory, also where none is installed."""
    environment = child_environment(extra)
    here = Path(__file__).resolve().parents[2]
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if here.name not in ("site-packages", "dist-packages") and str(here) not in paths:
        paths.append(str(here))
    return environment | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
