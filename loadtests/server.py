"""``millrace`` as the load tests run it: the command, and a server in a process of its own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

MILLRACE: Final = str(Path(sys.executable).with_name("millrace"))
READY_TIMEOUT_S = 900
STOP_TIMEOUT_S = 60


class Server:
    """A server, from its start until it answers, and to its end. A context manager.

    command: serves on ``port`` of loopback, and answers GET ``ready`` with 200 when it is ready.
    variables: of its environment, beside this process's own.
    Raises SystemExit with the end of the log if it does not get ready.
    """

    def __init__(
        self,
        command: list[str],
        port: int,
        log: Path,
        ready: str = "/ready",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env=os.environ | dict(variables or {}),
                start_new_session=True,
            )
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{self.url}{ready}", timeout=5).close()
                return
            time.sleep(0.2)
        self.stop()
        raise SystemExit(f"{' '.join(command[:2])} … did not get ready:\n{log.read_text()[-3000:]}")

    def stop(self) -> int:
        """SIGTERM; the exit code, -9 if it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def run(*arguments: str, folder: Path | None = None) -> str:
    """Run ``millrace ARGUMENTS`` in a folder; what it prints. Raises SystemExit if it fails."""
    done = subprocess.run([MILLRACE, *arguments], capture_output=True, text=True, timeout=600, check=False, cwd=folder)
    if done.returncode != 0:
        raise SystemExit(f"millrace {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def free_port() -> int:
    """A free port below those that the system gives out by itself: no process of Ray takes it meanwhile."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("none of 100 ports between 20000 and 32000 is free")
