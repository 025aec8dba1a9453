"""Resident workers: a training driver, its Ray and its pools, that stay between the cycles of one owner.

deploy/supervise/resident.py starts this process when a stage first asks, and ends it with its owner.

One request is worked on at a time (feedback/processes/resident_socket.py says which there are). Between two of them
models and optimizers are gone, and engines sleep; nothing but Ray's daemons wakes up. The process ends, and nothing of
it is left:

- when nobody has asked for ``train.resident.idle_seconds``, or the machine's memory runs short meanwhile;
- when a run or an answer fails, a rank hangs at one, or who asked has gone: the next request gets a new process;
- when code that it or a rank has imported has changed, or a run needs another Ray.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path
from select import select
from typing import Any, Final

import torch

from evaluation.config import EngineConfig
from feedback.files import replace_file
from feedback.processes.exit import SIGNALLED
from feedback.processes.freed_memory import give_freed_memory_back
from feedback.processes.resident_socket import GONE_S, SIGN_S, WORKING, Listener, hung_up
from feedback.processes.signals import stop_requested
from feedback.user_code import search_last
from serve.kv_cache import available_memory, machine_memory
from serve.policies.store import Policy
from train.config.sections import ResidentConfig
from train.config.training import TrainConfig
from train.context import JobContext
from train.controller.imported_files import ImportedFiles
from train.launch import ray_of, run_spec
from train.observe.progress import say
from train.workers.resident_pools import ResidentPools

_FIRST_S: Final = 120.0
_LOOK_S: Final = 15.0
_STOP_S: Final = 20.0
_SILENT_S: Final = 1800.0
"""Until an engine that is lent, and not asked, is taken back; an evaluation then goes on in one of its own."""


class Residence:
    """The process that stays, from its first request to its end.

    Args:
        state: the file that says, while the process lives, since when it is there and what it does.
        owner: the process of all that belongs to it, which `millrace status` looks for.
    """

    def __init__(self, listener: Listener, state: Path, owner: int) -> None:
        self._listener, self._state, self._owner = listener, state, owner
        self._since = datetime.now(UTC).isoformat(timespec="seconds")
        self._code = ImportedFiles()
        self._config = ResidentConfig()
        self._started: tuple[Any, ...] | None = None
        self._pools: ResidentPools | None = None

    def serve(self) -> None:
        """Work on one request after the other, until this process is to end. What fails in a request is raised."""
        with ExitStack() as held:
            self._held = held
            held.callback(self._state.unlink, missing_ok=True)
            self._note("starts")
            idle, patience = time.monotonic(), _FIRST_S
            while time.monotonic() - idle < patience:
                connection = self._listener.accept(min(_LOOK_S, max(0.0, idle + patience - time.monotonic())))
                if connection is None:
                    if self._started and (why := self._gives_back()):
                        return say(f"the resident workers end: {why}")
                    continue
                if not self._answer(connection):
                    return  # the connection is closed when all has ended
                idle, patience = time.monotonic(), self._config.idle_seconds
            say(f"the resident workers end: nobody has asked for {patience:g} s")

    def _gives_back(self) -> str | None:
        """Why what sleeps is to end now."""
        least = self._config.min_free_memory
        if available_memory() < least * machine_memory():
            return f"less than train.resident.min_free_memory={least:g} of the machine's memory is free"
        return self._code.changed()

    def _answer(self, connection: Connection) -> bool:
        """Work on a request; whether this process stays."""
        try:
            message = connection.recv() if connection.poll(GONE_S) else ("",)
        except (EOFError, OSError):
            message = ("",)
        if message[0] == "end":
            self._unclosed = connection
            return False
        if message[0] == "train":
            if not self._train(connection, *message[1:]):
                self._unclosed = connection
                return False
        elif message[0] == "lend":
            self._lend(connection, *message[1:])
        connection.close()
        return True

    def _train(self, connection: Connection, config: TrainConfig, context: JobContext, folder: str) -> bool:
        lost = None if self._pools is None else self._pools.lost()
        if why := self._code.changed() or self._other_ray(config, context, folder) or lost:
            say(f"{context.run}: the resident workers are started anew: {why}")
            connection.send(("restart", why))
            return False
        connection.send(("go", os.getpid()))
        files = [recv_handle(connection), recv_handle(connection)]
        self._config = config.resident
        with self._watched(connection):
            try:
                self._note(f"trains {context.run}")
                self._start(config, context, folder)
                with _writing_to(files):
                    run_spec(config, context, self._pools)
            except BaseException as error:
                traceback.print_exc()
                code = getattr(error, "exit_code", getattr(error, "code", 1))
                if isinstance(error, SystemExit) and stop_requested():
                    code = SIGNALLED + signal.SIGTERM
                answer = ("failed", code, _text(error))
                with suppress(OSError):
                    connection.send(answer)
                raise
        self._code.note()
        gc.collect()  # what of the run is in cycles, as a reward model may be
        torch.cuda.empty_cache()
        give_freed_memory_back()
        self._note("asleep")
        with suppress(OSError):
            connection.send(("done",))
        return True

    def _other_ray(self, config: TrainConfig, context: JobContext, folder: str) -> str | None:
        """Why a job can't run in this process as it is."""
        if self._started is None or self._started == _ray_of(config, context, folder):
            return None
        return "the run has other cores, or other folders for the user's modules"

    def _start(self, config: TrainConfig, context: JobContext, folder: str) -> None:
        """Start Ray, for the first job."""
        if self._started is not None:
            return
        os.chdir(folder)
        search_last(context.python_path)
        self._held.enter_context(ray_of(config))
        self._pools = self._held.enter_context(ResidentPools(self._code))
        self._started = _ray_of(config, context, folder)

    def _lend(self, connection: Connection, config: EngineConfig, policy: Policy) -> None:
        """Let an evaluation ask the engine until it closes the connection."""
        pools = self._pools
        why = "no run has started them" if pools is None else self._code.changed() or pools.refusal(config, policy)
        if why is not None or pools is None:
            connection.send(("refused", why))
            return
        self._note("answers an evaluation")
        self._do(connection, "lent", pools.load, policy)
        while (message := self._next(connection)) is not None:
            word, what = message
            self._do(connection, "value", pools.load if word == "load" else pools.lend, what)
        pools.take_back()
        self._note("asleep")

    def _next(self, connection: Connection) -> tuple[Any, ...] | None:
        """The next message of who has the engine; None if it has gone or is silent. Others are told meanwhile."""
        deadline = time.monotonic() + _SILENT_S
        while (left := deadline - time.monotonic()) > 0:
            ready = wait([connection, *self._listener.sockets], left)
            if connection in ready:
                try:
                    message: tuple[Any, ...] = connection.recv()
                except (EOFError, OSError):
                    return None
                return message
            self._turn_away()
        return None

    def _turn_away(self) -> None:
        """Tell who asks next that the workers are busy."""
        if (other := self._listener.accept(0.0)) is not None:
            with other, suppress(OSError):
                other.send(("busy",))

    def _do(self, connection: Connection, word: str, what: Callable[[Any], Any], argument: Any) -> None:
        """Answer with what a call returns. What it raises is said, and raised: the workers are of no further use."""
        try:
            with self._watched(connection, signs=True):  # and no longer: who has the answer may go
                value = what(argument)
        except BaseException as error:
            with suppress(OSError):
                connection.send(("error", _text(error)))
            raise
        with suppress(OSError):
            connection.send((word, value))

    @contextmanager
    def _watched(self, connection: Connection, *, signs: bool = False) -> Iterator[None]:
        """Stop this process if who asked goes or says so meanwhile; tell others that it is busy.

        ``signs``: tell who asked that it is at work.
        """
        done, finish = os.pipe()

        def watch() -> None:
            watched: list[Any] = [*self._listener.sockets, done, connection]
            while done not in (ready := wait(watched, SIGN_S if signs else None)):
                if signs and select([], [connection], [], 0)[1]:  # who is stopped reads none
                    with suppress(OSError):
                        connection.send((WORKING,))
                if connection in ready:
                    if not hung_up(connection):  # it waits for its next answer
                        watched.remove(connection)
                        continue
                    say("the resident workers stop: who asked has gone")
                    os.kill(os.getpid(), signal.SIGTERM)
                    if not wait([done], _STOP_S):
                        os._exit(1)
                    return
                self._turn_away()

        thread = threading.Thread(target=watch, name="watch who asked", daemon=True)
        thread.start()
        try:
            yield
        finally:
            os.write(finish, b".")
            thread.join()
            os.close(done)
            os.close(finish)

    def _note(self, state: str) -> None:
        note = {"process": self._owner, "since": self._since, "state": state}
        replace_file(self._state, json.dumps(note).encode(), private=True)


def _ray_of(config: TrainConfig, context: JobContext, folder: str) -> tuple[Any, ...]:
    """What can't change while a process and its Ray stay."""
    own = config.model.class_name  # transformers keeps one class of config for a model_type
    return config.cores, tuple(context.python_path), folder, own


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def _writing_to(files: list[int]) -> Iterator[None]:
    """Have stdout and stderr of this process be these files, which are closed afterwards."""
    streams = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.flush()
    before = [os.dup(1), os.dup(2)]
    for to, file in enumerate(files, start=1):
        os.dup2(file, to)
        os.close(file)
    try:
        yield
    finally:
        for stream in streams:
            stream.flush()
        for to, file in enumerate(before, start=1):
            os.dup2(file, to)
            os.close(file)
