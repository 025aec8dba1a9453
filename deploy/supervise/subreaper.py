"""A process that runs one command and leaves nothing of it behind.

    python -m deploy.supervise.subreaper PARENT_PID GRACE_SECONDS COMMAND...

The command runs below the subreaper, which adopts every descendant that loses its parent (Linux's child subreaper), so
that it can end them all, daemons that left the process group included, when the command has ended. SIGTERM, SIGINT
and SIGHUP, and the death of the parent, ask the command to stop (SIGTERM, to it alone: it knows in which order its
own children go) and kill it after ``grace`` seconds. The exit status is the command's; 128 + n if signal n ended it.

Imports psutil and nothing else that is large: one stands above each process of Millrace.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from feedback.process_exit import end_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_LEFTOVER_GRACE_S = 3.0
_POLL_S = 0.05


def main() -> None:
    _, parent, grace, *command = sys.argv
    stopping: list[float] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.append(time.monotonic())

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    end_with_parent(int(parent), signal.SIGTERM)
    adopt_orphans()
    sys.exit(_guard(command, float(grace), stopping))


def _guard(command: list[str], grace: float, stopping: list[float]) -> int:
    own = os.getpid()

    def tie_to_subreaper() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        end_with_parent(own, signal.SIGTERM)

    # preexec_fn is safe here: this process has one thread.
    child = subprocess.Popen(command, process_group=0, preexec_fn=tie_to_subreaper)
    terminated = killed = False
    while child.poll() is None:
        if stopping and not terminated:
            child.send_signal(signal.SIGTERM)
            terminated = True
        elif terminated and not killed and time.monotonic() - stopping[0] > grace:
            print(f"it did not stop within {grace:.0f} s of SIGTERM: killed", file=sys.stderr, flush=True)
            child.kill()
            killed = True
        try:
            child.wait(_POLL_S if stopping else 0.2)
        except subprocess.TimeoutExpired:
            continue
    end_descendants(_LEFTOVER_GRACE_S)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies. Where there is no prctl this does nothing."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl: {os.strerror(error)}")


def end_descendants(grace: float, *, spare_trackers: bool = False) -> list[str]:
    """End every process below this one, SIGTERM first and SIGKILL after ``grace`` seconds; name those killed.

    Those from which signals are held back, because their owner was to end them, get SIGKILL at once.

    spare_trackers: leave multiprocessing's resource trackers, which ignore SIGTERM, clean up and end when this process
    ends; for a process that has one of its own.
    """
    own = psutil.Process()
    deadline = time.monotonic() + grace
    signalled: set[int] = set()
    killed: set[str] = set()
    rounds = 100  # of killing: a process can fork while the list is read, so look again until none is left
    while rounds and (living := _living(own, spare_trackers)):
        late = time.monotonic() >= deadline
        rounds -= late
        for process in living:
            with suppress(psutil.NoSuchProcess):
                if late:
                    killed.add(f"{process.name()} ({process.pid})")
                    process.kill()
                elif process.pid not in signalled:
                    signalled.add(process.pid)
                    process.send_signal(signal.SIGKILL if _blocks_sigterm(process) else signal.SIGTERM)
        time.sleep(_POLL_S)
    return sorted(killed)


def _living(own: psutil.Process, spare_trackers: bool) -> list[psutil.Process]:
    """The descendants that still run; those that have ended are reaped on the way, if they are ours to reap."""
    living = []
    for process in own.children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                if not (spare_trackers and _is_tracker(process)):
                    living.append(process)
            elif process.ppid() == own.pid:
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return living


def _is_tracker(process: psutil.Process) -> bool:
    return any("multiprocessing.resource_tracker" in word for word in process.cmdline())


def _blocks_sigterm(process: psutil.Process) -> bool:
    """Whether its main thread has SIGTERM blocked. False where there is no /proc."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return False
    blocked = next((line for line in status.splitlines() if line.startswith("SigBlk:")), "SigBlk: 0")
    return bool(int(blocked.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


if __name__ == "__main__":
    main()
