"""Signals that reach a process and are for another one to act upon.

A service manager stops a service by SIGTERM to all of its processes at once, and a terminal sends SIGINT to all in the
foreground. What others still need to end in order is ended by the process that started it, and by nobody else.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

STOPPING: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""What asks a process to stop."""


class StopSignal(SystemExit):
    """A signal asked this process to stop. Whatever takes a SystemExit of somebody's code for a failure lets it pass.

    A SystemExit, since a wait in Ray's native code is ended by no exception of our own.
    """


def heeded() -> frozenset[signal.Signals]:
    """STOPPING, but for a SIGHUP that whoever started this process has it ignore, as nohup does."""
    return STOPPING - {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else STOPPING


@contextmanager
def held_back() -> Iterator[None]:
    """Hold STOPPING back from all processes and threads that this thread starts meanwhile, for as long as they live.

    The main thread's handlers get what came meanwhile at the end of the block. It is the signal mask that says so:
    children inherit it, an exec keeps it, and it holds in a program that installs handlers, as Ray's and vLLM's do.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        with _put_off():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _put_off() -> Iterator[None]:
    """Have what other threads of this process catch wait too: Python would run its handler in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    ours = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    for number in ours:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        for caught in came:
            signal.raise_signal(caught)  # to this thread, where it is still blocked


def heed_parent() -> None:
    """Act upon the parent's signals, and on no others, in a process started with signals held back.

    Call it in the main thread. Handlers then run in a thread of this one's own.
    """
    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=_heed, args=(os.getppid(),), name="signals of the parent", daemon=True).start()
    else:  # macOS, where nobody can tell who sent a signal
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _heed(parent: int) -> None:
    while True:
        received = signal.sigwaitinfo(STOPPING)
        if received.si_pid != parent:
            continue
        handler = signal.getsignal(received.si_signo)
        if callable(handler):
            handler(received.si_signo, None)
        elif handler is signal.SIG_DFL:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {received.si_signo})
            signal.raise_signal(received.si_signo)
