"""The resident workers of a loop, owned by the process that starts its cycles.

    python -P -m deploy.supervise.resident STATE_FILE

The owner listens on the socket that its stages find in their environment, and starts this program once one of them
asks; its standard input is the socket. It ends after its idle time (``train.resident``), with the owner, however that
ends, and when a run in it fails. It runs below a subreaper, so that nothing is left of it: no Ray, no worker.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from select import select
from typing import Any, Final

import psutil

from deploy import devices
from deploy.config.root import Settings
from deploy.supervise.children import Child, child_variables, no_leftovers
from feedback.files import replace_file
from feedback.processes.freed_memory import share_freed_memory
from feedback.processes.resident_socket import ADDRESS, Listener, listen
from feedback.processes.signals import Stopped, stop_on_signals
from train.planner.assignment import Role

STATE: Final = ".resident.json"
"""In the home: since when resident workers are there, and what they do."""

SHARED: Final = ".resident-shared.json"
"""In the home, for its user alone: how commands beside a schedule reach the workers of its cycles."""

_COMPUTE: Final = (
    *("ATEN_", "CUBLAS_", "CUDA_", "CUDNN_", "DNNL_", "GLOO_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "NCCL_"),
    *("NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "RAY_", "TORCH", "TRITON_", "VLLM_"),
)
_REACH: Final = (
    *("ALL_PROXY", "all_proxy", "AWS_", "AZURE_", "COMET_", "CURL_", "GOOGLE_", "HF_", "HTTP", "http", "MLFLOW_"),
    *("NO_PROXY", "no_proxy", "SSL_", "WANDB_"),
)
_SURROUNDINGS: Final = _COMPUTE + _REACH
"""How variables begin that decide what workers compute by, and what they reach."""

_GRACE_S: Final = 20.0
_IMPORTS_S: Final = 60.0
_LOOK_S: Final = 0.5
_END_S: Final = 40.0


@contextmanager
def serving(settings: Settings, *, at_once: bool = False, shared: bool = False) -> Iterator[None]:
    """Have the stages that this process starts in the block share resident workers, unless one above owns some.

    They start when the first training asks, again when one asks after they have ended, and end with the block. None
    stay where the server has training's devices between two runs: also what sleeps keeps some of a device.
    ``at_once``: a training will ask in a moment; its process starts and imports now, and waits for it for a while.
    ``shared``: the home says how to reach them, for what others start (``joined``).
    """
    assignment = devices.assigned(settings)
    gone = assignment is not None and bool(assignment.train) and "train" in assignment.waits_for
    if gone or not settings.train.resident.enabled or ADDRESS in os.environ or (listener := listen()) is None:
        yield
        return
    activation = _Activation(listener, settings, at_once)
    os.environ[ADDRESS] = listener.address
    try:
        with _sharing(settings, listener.address) if shared else nullcontext():
            yield
    finally:
        del os.environ[ADDRESS]
        activation.close()


@contextmanager
def joined(settings: Settings, role: Role) -> Iterator[None]:
    """Have this process, and what it starts in the block, use the workers of a schedule of this home, if one is there.

    Not where those would compute on other devices than a process of ``role`` has, or by other libraries' settings, or
    import a user's modules from another folder.
    """
    found = _noted(settings.path(SHARED))
    if (
        found is None
        or ADDRESS in os.environ
        or not settings.train.resident.enabled
        or found.get("surroundings") != _surroundings(settings, role)
    ):
        yield
        return
    os.environ[ADDRESS] = found["address"]
    try:
        yield
    finally:
        del os.environ[ADDRESS]


@contextmanager
def _sharing(settings: Settings, address: str) -> Iterator[None]:
    file = settings.path(SHARED)
    note = {"process": os.getpid(), "address": address, "surroundings": _surroundings(settings, "train")}
    replace_file(file, json.dumps(note).encode(), private=True)
    try:
        yield
    finally:
        if (found := _noted(file)) is not None and found["process"] == os.getpid():  # not another schedule's
            file.unlink(missing_ok=True)


def _surroundings(settings: Settings, role: Role) -> str:
    """What workers have of the process that starts them, apart from settings: a hash, as some of it is secret."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_SURROUNDINGS)}
    variables[devices.VISIBLE] = devices.environment(settings, role).get(devices.VISIBLE, devices.seen())
    python = [sys.executable, child_variables()["PYTHONPATH"], str(Path(__file__).parent)]
    machine = []  # its processes and its sockets: containers that share a home have their own
    for place in ("/proc/self/ns/pid", "/proc/self/ns/net"):
        with suppress(OSError):
            machine.append(os.readlink(place))
    known = [os.getcwd(), python, machine, sorted(variables.items())]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


class _Activation:
    """Starts the workers once a stage asks. In a thread, as Linux ties them to the one that has started them."""

    def __init__(self, listener: Listener, settings: Settings, at_once: bool) -> None:
        self._listener, self._at_once = listener, at_once
        self._log, self._state = settings.path(settings.up.logs) / "resident.log", settings.path(STATE)
        self._devices = devices.environment(settings, "train")
        self._closing, self._closed = os.pipe()
        self._thread = threading.Thread(target=self._run, name="resident workers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._closed)
        self._thread.join(_END_S)

    def _run(self) -> None:
        with self._listener.owners:
            if self._at_once and self._work():
                self._listener.turn_away()
            while self._closing not in select([self._listener.owners.fileno(), self._closing], [], [])[0]:
                if self._work():
                    self._listener.turn_away()  # whoever waits starts workers of its own
        os.close(self._closing)

    def _work(self) -> int:
        """Run them to their end; the exit code."""
        command = [sys.executable, "-P", "-m", "deploy.supervise.resident", str(self._state)]
        own = {ADDRESS: self._listener.address, **self._devices}
        requests = self._listener.owners.fileno()
        with Child(
            "resident workers",
            command,
            log=self._log,
            grace=_GRACE_S,
            environment=own,
            patience=_IMPORTS_S,
            stdin=requests,
        ) as workers:
            while (code := workers.poll()) is None:
                if select([self._closing], [], [], _LOOK_S)[0]:
                    return workers.stop()
        return code


def residents(settings: Settings) -> dict[str, Any] | None:
    """Those of a home that are there now: since, state and bytes of memory that are theirs alone; None if none are."""
    if (found := _noted(settings.path(STATE))) is None:
        return None
    try:
        return found | {"bytes": memory_of(psutil.Process(found.pop("process")))}
    except psutil.NoSuchProcess:
        return None


def _noted(file: Path) -> dict[str, Any] | None:
    """What a process that is still there has written of itself; None if none has."""
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
        if psutil.Process(found["process"]).create_time() > file.stat().st_mtime:  # another one of that number
            return None
    except (OSError, psutil.Error, ValueError, KeyError, TypeError):
        return None
    return found


def memory_of(process: psutil.Process) -> int:
    """Bytes of memory of a process and all below it; what is shared counts in parts (PSS)."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += each.memory_full_info().pss
    return total


def main() -> None:
    share_freed_memory()  # before the imports below start threads
    from train.resident import Residence

    listener = Listener.inherited(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # what is started below is not to have the socket
    try:
        with no_leftovers(), stop_on_signals():
            Residence(listener, Path(sys.argv[1]), os.getppid()).serve()
    except Stopped as stopped:
        sys.exit(stopped.code)


if __name__ == "__main__":
    main()
