"""The process of a server's engine, forked once vLLM is imported, so that it need not import it again.

vLLM takes ten seconds to import, and starts its engine in a new interpreter, where it does so a second time. A server
forks the engine's process itself: after the imports, before there are threads. The process waits, with nothing in it,
until vLLM starts its engine, and is what vLLM starts then. Where there is a GPU, other threads or no room for it, or
vLLM starts more than one, that is a new interpreter as ever.
"""

from __future__ import annotations

import gc
import importlib
import io
import logging
import os
import pickle
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import popen_fork, process, reduction, resource_tracker, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from typing import Any, Final, NoReturn

from feedback.files import leave_locks
from feedback.processes.exit import end_with_parent
from feedback.processes.signals import stop_signals_blocked

log = logging.getLogger(__name__)

_LENGTH: Final = struct.Struct("<Q")
_POLL_S: Final = 0.05


class WaitingProcess:
    """A child of this process that does nothing until ``start`` gives it something to run. For the main thread."""

    def __init__(self, title: str = "millrace engine") -> None:
        """``title``: what it is called among processes. Raises OSError if the machine has no room for it."""
        resource_tracker.ensure_running()  # the child is to share ours
        parent = os.getpid()
        orders, self._orders = os.pipe()
        self.sentinel, alive = os.pipe()  # readable when the child has ended
        self._lock, self._taken = threading.Lock(), False
        gc.collect()
        gc.freeze()  # what was imported stays in memory that both share
        try:
            with stop_signals_blocked():  # in the child for good: it acts on its parent's signals alone
                self.pid = os.fork()
                if self.pid == 0:
                    _wait(parent, orders, alive, title)
        except OSError:
            os.close(self._orders)
            os.close(self.sentinel)
            raise
        finally:
            gc.unfreeze()
            os.close(orders)
            os.close(alive)

    def start(self, process_object: SpawnProcess) -> bool:
        """Run ``process_object`` there, in the environment that this process has now; False if it has died or is taken.

        Raises what pickling raises.
        """
        buffer = io.BytesIO()
        reduction.dump((dict(os.environ), process_object), buffer)
        with self._lock:
            if self._taken:
                return False
            try:
                with open(self._orders, "wb", closefd=False) as pipe:
                    pipe.write(_LENGTH.pack(buffer.getbuffer().nbytes) + buffer.getvalue())
            except OSError:
                self._end()
                return False
            self._taken = True
            return True

    @property
    def file_descriptors(self) -> tuple[int, int]:
        """To close when the process has ended."""
        return self.sentinel, self._orders

    def close(self) -> None:
        """End it, unless it was given something to run."""
        with self._lock:
            if not self._taken:
                self._end()

    def _end(self) -> None:
        self._taken = True
        _close(self._orders, self.sentinel)
        os.waitpid(self.pid, 0)


def prepare(modules: Callable[[], bool], stopped: Callable[[], bool]) -> WaitingProcess | None:
    """Import, and fork; None where that is not safe, or once ``stopped``, with the imports going on.

    modules: imports what the engine needs, and says whether a fork is safe then; in a thread, so that handlers of
    signals run meanwhile. Other Python threads make it unsafe too: they may hold locks. Raises what ``modules`` raises.
    For the main thread.
    """
    failed: list[Exception] = []
    safe = False

    def load() -> None:
        nonlocal safe
        try:
            safe = modules()
        except Exception as error:  # noqa: BLE001 - a thread's failure is raised below
            failed.append(error)

    thread = threading.Thread(target=load, name="imports", daemon=True)
    thread.start()
    while thread.is_alive():
        if stopped():
            return None
        thread.join(_POLL_S)
    if failed:
        raise failed[0]
    if not safe or threading.active_count() > 1:
        return None
    try:
        return WaitingProcess()
    except OSError as error:
        log.warning("the engine's process can't be forked (%s): vLLM starts an interpreter", error)
        return None


@contextmanager
def started_by(waiting: WaitingProcess) -> Iterator[None]:
    """Have the first process that vLLM starts for an engine be the waiting one."""
    from vllm.v1.engine import utils

    before = utils.get_mp_context
    utils.get_mp_context = lambda: _Context(waiting)
    try:
        yield
    finally:
        utils.get_mp_context = before


def start(
    target: Callable[..., None], arguments: tuple[Any, ...], name: str, waiting: WaitingProcess | None
) -> SpawnProcess:
    """Run a function of a module in a process: the waiting one, or a new interpreter. Raises what pickling raises."""
    process_object: SpawnProcess = _Context(waiting).Process(target=target, args=arguments, name=name)
    process_object.start()
    return process_object


class _Context(SpawnContext):
    """multiprocessing's, whose process is the waiting one."""

    def __init__(self, waiting: WaitingProcess | None) -> None:
        vars(self)["Process"] = partial(_Process, waiting)


class _Process(SpawnProcess):
    """A process as multiprocessing has it, without what it is started by where it is sent there."""

    def __init__(self, waiting: WaitingProcess | None, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._waiting = waiting

    def _Popen(self, process_object: Any) -> Any:  # type: ignore[override]  # noqa: N802
        if (waiting := self._waiting) is not None:
            with suppress(_NotWaiting):
                return _Popen(process_object, waiting)
        return SpawnProcess._Popen(process_object)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_waiting": None}


class _NotWaiting(Exception):
    """The process has died, or runs something else."""


class _Popen(popen_fork.Popen):
    """What multiprocessing asks about a child; ours is one that it did not fork."""

    method = "spawn"  # pickled for it, as for a new interpreter

    def __init__(self, process_object: SpawnProcess, waiting: WaitingProcess) -> None:
        self._waiting = waiting
        super().__init__(process_object)

    def duplicate_for_child(self, fd: int) -> int:
        """Raises ValueError: it was forked before there was such a file."""
        raise ValueError("a process that waits can't be given open files")

    def _launch(self, process_object: SpawnProcess) -> None:
        set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            if not self._waiting.start(process_object):
                raise _NotWaiting
        finally:
            set_spawning_popen(None)
        self.pid, self.sentinel = self._waiting.pid, self._waiting.sentinel
        self.finalizer = util.Finalize(self, _close, self._waiting.file_descriptors)


def _wait(parent: int, orders: int, alive: int, title: str) -> NoReturn:
    """The child: wait, run what it is given, end. It ends with its parent, and where nothing comes."""
    code = 1
    try:
        end_with_parent(parent)
        with suppress(ImportError):  # vLLM names its processes where it can, which it can't once variables have changed
            importlib.import_module("setproctitle").setproctitle(title)
        leave_locks()
        _close_others(0, 1, 2, orders, alive, resource_tracker.getfd())
        with open(orders, "rb", closefd=False) as pipe:
            if head := pipe.read(_LENGTH.size):
                process.current_process()._inheriting = True  # type: ignore[attr-defined]
                environment, process_object = pickle.loads(pipe.read(_LENGTH.unpack(head)[0]))  # noqa: S301 - from our parent
                for name in os.environ.keys() - environment.keys():
                    del os.environ[name]
                os.environ.update(environment)
                _set_threads()
                code = process_object._bootstrap(parent_sentinel=orders)
            else:
                code = 0
    finally:
        os._exit(code)


def _set_threads() -> None:
    """Apply ``OMP_NUM_THREADS``, which OpenMP has read when torch was imported: maybe before anybody had set it."""
    if (threads := os.environ.get("OMP_NUM_THREADS")) and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(threads))


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _close_others(*kept: int | None) -> None:
    """Close all other sockets and pipes: one that listens, and that the engine held, would outlive the server."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            mode = os.fstat(int(name)).st_mode
            if int(name) not in kept and (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)):
                os.close(int(name))
