"""How a process ends: with the one that started it, and without teardown where threads can't be stopped.

Arrow's threads go on reading ahead from an object store through Python for a moment, and one that comes back into an
interpreter that is being taken down ends the process by a signal. A reward function that took too long still runs, and
Python might wait for it for ever.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    import psutil

SIGNALLED: Final = 128
"""The exit code of what signal n has ended, itself or a process that it can't do without, is 128 + n."""

_PR_SET_PDEATHSIG: Final = 1
_POLL_S: Final = 0.05

_reasons: set[str] = set()


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent has ended, however that ended. Linux alone.

    parent: its process id, known before this process started: a parent that ended before the call is noticed by it.
    Raises OSError if the kernel refuses.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl: {os.strerror(error)}")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def is_resource_tracker(process: psutil.Process) -> bool:
    """Whether it is multiprocessing's, which ends with those whose shared memory it then removes.

    Raises psutil.NoSuchProcess.
    """
    return any("multiprocessing.resource_tracker" in word for word in process.cmdline())


def still_running(processes: Collection[psutil.Process], patience: float) -> list[psutil.Process]:
    """Those that have not ended after ``patience`` seconds.

    One that has ended counts as ended before whoever adopted it asks for it (a zombie): a subreaper that adopts the
    orphans of a process below it, as ``millrace`` does, may only do so when that process has ended, too.
    """
    deadline = time.monotonic() + patience
    while left := [process for process in processes if _runs(process)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    return left


def _runs(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def skip_teardown(reason: str) -> None:
    """Have ``end_process`` end this process without Python's own teardown."""
    _reasons.add(reason)


def teardown_is_skipped() -> bool:
    return bool(_reasons)


def end_process(code: int) -> NoReturn:
    """End this process with an exit code. Functions registered with ``atexit`` run only if teardown isn't skipped.

    multiprocessing's does so or so.
    """
    if not _reasons:
        sys.exit(code)
    logging.shutdown()
    if (multiprocessing := sys.modules.get("multiprocessing.util")) is not None:
        multiprocessing._exit_function()  # gives semaphores back, which the resource tracker would call leaked
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(code)
