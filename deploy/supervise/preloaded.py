"""The fork server of a loop: a process that has imported what the stages of a cycle need, from which they are forked.

    python -P -m deploy.supervise.preloaded LISTENER_FD PARENT_PID

It ends with the process that has started it, after ten minutes in which it had nothing to do, and once another version
than it has imported is installed: what it has forked goes on, and what would be forked starts an interpreter. On a
machine with a GPU it ends at once: what asks vLLM for its platform may have begun a CUDA context there, which no fork
survives. Stages then start interpreters of their own.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from deploy.supervise import subreaper
from deploy.supervise.children import child_variables
from feedback.processes import fork_server
from feedback.processes.exit import end_with_parent
from feedback.processes.signals import stop_signals_blocked

_MODULES: Final = (
    "deploy.cli",
    "deploy.commands.loop",
    "deploy.commands.gate.suite",
    "deploy.loop.cycle",
    "train.job",
    "train.launch",
    "evaluation.decisions.judgement",
    "scipy.stats",
)
_PACKAGES: Final = ("feedback", "serve", "evaluation", "train", "deploy")
_IDLE: Final = 75
_IDLE_S: Final = 600.0
_END_S: Final = 10.0
_ENGINE: Final = (
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "train.workers.actor",
    "train.workers.rollout",
    "serve.vllm.weight_update",
)


@contextmanager
def serving(log: Path) -> Iterator[None]:
    """Have the children that this process starts in the block forked from one server, unless one above serves them.

    It starts when the first of them waits for it, and again after it has given its memory back. What goes wrong with it
    is in ``log``; children then start interpreters.
    """
    if fork_server.ADDRESS in os.environ or (listener := fork_server.listen()) is None:
        yield
        return
    activation = _Activation(listener, log)
    os.environ[fork_server.ADDRESS] = listener.address
    try:
        yield
    finally:
        del os.environ[fork_server.ADDRESS]
        activation.close()


class _Activation:
    """Starts the server once a child waits for it. In a thread, as Linux ties it to the one that has started it."""

    def __init__(self, listener: fork_server.Listener, log: Path) -> None:
        self._listener, self._log = listener, log
        self._closing, self._closed = os.pipe()
        self._thread = threading.Thread(target=self._run, name="fork server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._closed)
        self._thread.join(_END_S)

    def _run(self) -> None:
        with self._listener.socket:
            while True:
                ready, _, _ = select.select([self._listener.socket.fileno(), self._closing], [], [])
                if self._closing in ready or self._serve() != _IDLE:
                    break
        os.close(self._closing)

    def _serve(self) -> int:
        """Run the server to its end; its exit code."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        file = self._listener.socket.fileno()
        with self._log.open("ab") as output, stop_signals_blocked():  # what it has forked ends in order, and then it
            server = subprocess.Popen(
                [sys.executable, "-P", "-m", "deploy.supervise.preloaded", str(file), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_variables({fork_server.ADDRESS: self._listener.address}),
                pass_fds=[file],
                start_new_session=True,
            )
        gone = os.pidfd_open(server.pid)
        ready, _, _ = select.select([gone, self._closing], [], [])
        os.close(gone)
        if gone not in ready:
            server.kill()
        return server.wait(_END_S)


def _installed() -> tuple[tuple[str, int], ...]:
    """When each of our files, and the folder of what is installed beside them, was last changed: some milliseconds.

    Raises OSError where a folder goes meanwhile.
    """
    root = Path(__file__).parents[2]
    files = [file for package in _PACKAGES for file in (root / package).rglob("*.py")]
    files.append(Path(sysconfig.get_path("purelib")))
    return tuple((str(file), file.stat().st_mtime_ns) for file in files if file.exists())


def _still_installed(version: tuple[tuple[str, int], ...]) -> bool:
    try:
        return _installed() == version
    except OSError:  # something is being installed
        return False


def main() -> None:
    _, descriptor, parent = sys.argv
    end_with_parent(int(parent))
    listener = fork_server.Listener.inherited(int(descriptor))
    version = _installed()
    before = dict(os.environ)
    # vLLM imports Ray where it can, for executors that we don't use; and Ray reads its environment when it is imported.
    modules: dict[str, Any] = sys.modules
    modules["ray"] = None
    for name in _MODULES:
        importlib.import_module(name)
    from serve.vllm.boot import import_engine

    if not import_engine():
        return
    for name in _ENGINE:
        importlib.import_module(name)
    del modules["ray"]
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()  # what was imported stays in memory that all share
    server = fork_server.ForkServer(listener, imported, outdated=lambda: not _still_installed(version))
    busy = time.monotonic()
    while server.serves_somebody or (time.monotonic() - busy < _IDLE_S and _still_installed(version)):
        if server.serves_somebody:
            busy = time.monotonic()
        if (job := server.turn(10.0)) is not None:
            subreaper.run_forked(job, imported)
    sys.exit(_IDLE)


if __name__ == "__main__":
    main()
