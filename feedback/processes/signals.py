"""Signals that reach a process but are another one's to handle.

A service manager stops a service by SIGTERM to all of its processes at once, and a terminal sends SIGINT to all in the
foreground. A process that others need until they have ended in order is ended by its parent alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_AGAIN_S: Final = 0.02  # from a destructor that has dropped Stopped to the next try
STOPPING: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that request a process to stop."""


class StopSignal(SystemExit):
    """A signal requested this process to stop. Code that takes a SystemExit for a failure lets this one pass.

    It is a SystemExit, since a wait in Ray's native code is ended by no exception of our own.
    """


class Stopped(StopSignal):
    """Not an Exception, so that nothing but an end of the process catches it. ``code``: 128 and the signal's number."""

    code: int

    def __str__(self) -> str:
        return signal.Signals(self.code - 128).name


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise Stopped in the main thread at the first SIGTERM, SIGINT or SIGHUP; further ones change nothing.

    Where it comes while a destructor or a callback of the interpreter runs, Python drops it: it is raised once more.
    """
    stopped: Stopped | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        for each in before:
            signal.signal(each, _do_nothing)  # Python reports one that is ignored before its handler has run
        stopped = Stopped(128 + number)
        raise stopped

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if stopped is None or what.exc_value is not stopped:
            return hook(what)
        signal.signal(stopped.code - 128, stop)
        threading.Timer(_AGAIN_S, os.kill, (os.getpid(), stopped.code - 128)).start()

    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOPPING}
    hook, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    except SystemExit:
        if stopped is None:
            raise
        raise stopped from None  # Ray raises a plain one, whichever signal ended its wait
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_requested() -> bool:
    """Whether ``stop_on_signals``, around this, has raised Stopped; where Ray waited a plain SystemExit comes of it."""
    return signal.getsignal(signal.SIGTERM) is _do_nothing


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def handled_signals() -> frozenset[signal.Signals]:
    """STOPPING, except for a SIGHUP that this process was started to ignore, as by nohup."""
    return STOPPING - {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else STOPPING


@contextmanager
def handled_by(handler: Any, numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Have these signals handled so in the block, and as before behind it. For the main thread."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block STOPPING in all processes and threads that this thread starts in the block, for as long as they live.

    The main thread's handlers get what arrived in between at the end of the block. This sets the signal mask, which
    children inherit and an exec keeps, and which holds in a program that installs handlers, as Ray's and vLLM's do.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        with handlers_deferred():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handlers_deferred() -> Iterator[None]:
    """Have the handlers of STOPPING run at the end of the block, in the main thread; elsewhere nothing is deferred.

    For code that an exception from a handler would leave half done; and where the signals are blocked, as other threads
    of this process may catch them then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    ours = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number in ours:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        for caught in came:
            signal.raise_signal(caught)  # to this thread, also where it is still blocked


def handle_parent_signals() -> None:
    """Handle the parent's signals, and no others, in a process that was started with signals blocked.

    Call it in the main thread. Handlers then run in a thread of this one's own.
    """
    threading.Thread(target=_handle, args=(os.getppid(),), name="parent signals", daemon=True).start()


def _handle(parent: int) -> None:
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
