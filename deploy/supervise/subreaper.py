"""A process that runs one command and leaves nothing of it behind.

    python -m deploy.supervise.subreaper PARENT_PID GRACE_SECONDS COMMAND...

or one that a fork server has forked, which is then a fork server for all below it.

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from feedback.processes.exit import end_with_parent, is_resource_tracker
from feedback.processes.fork_server import ADDRESS, ForkServer, Job, listen

_PR_SET_CHILD_SUBREAPER = 36
_LEFTOVER_GRACE_S = 3.0
_POLL_S = 0.05


def main() -> None:
    _, parent, grace, *command = sys.argv
    stopping = _stop_requests()
    end_with_parent(int(parent), signal.SIGTERM)
    adopt_orphans()
    own = os.getpid()
    # preexec_fn is safe here: this process has one thread.
    child = subprocess.Popen(command, process_group=0, preexec_fn=lambda: _tie_to(own))

    def pause(seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)

    _, code = _guard(child, float(grace), stopping, pause)
    sys.exit(code)


def run_forked(job: Job, imported: Mapping[str, str]) -> NoReturn:
    """Be what was requested of a fork server; below a subreaper if it has a grace, which this process is then.

    imported: as of ``ForkServer``.
    """
    while job.grace is not None:
        forked, code = _subreap(job.arguments, job.grace, imported)
        if forked is None:
            os._exit(code)  # what was imported would take half a second to be taken down, for nothing
        job = forked
    job.run()


def _subreap(arguments: list[str], grace: float, imported: Mapping[str, str]) -> tuple[Job | None, int]:
    """(None, the command's exit code) when it has ended; in a process that is forked meanwhile what that is to run."""
    stopping = _stop_requests()
    adopt_orphans()
    listener, own = listen(), os.getpid()
    assert listener is not None
    server = ForkServer(listener, imported)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    pid = os.fork()
    if pid == 0:
        _tie_to(own)
        os.environ[ADDRESS] = server.address
        server.close()
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # which it had requested; a signal meanwhile ends it
        return Job(arguments, None, own), 0
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return _guard(_Forked(pid), grace, stopping, server.turn)


class _Forked:
    """A child that this process has forked, with what ``subprocess.Popen`` has."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _guard(
    child: subprocess.Popen[bytes] | _Forked,
    grace: float,
    stopping: list[float],
    pause: Callable[[float], Job | None],
) -> tuple[Job | None, int]:
    """(None, the exit code) when the child has ended and nothing below is left; a job that ``pause`` returns."""
    terminated = killed = False
    while (code := child.poll()) is None:
        if stopping and not terminated:
            child.send_signal(signal.SIGTERM)
            terminated = True
        elif terminated and not killed and time.monotonic() - stopping[0] > grace:
            print(f"it did not stop within {grace:.0f} s of SIGTERM: killed", file=sys.stderr, flush=True)
            child.kill()
            killed = True
        if (forked := pause(_POLL_S if stopping else 0.2)) is not None:
            return forked, 0
    end_descendants(_LEFTOVER_GRACE_S)
    return None, code if code >= 0 else 128 - code


def _stop_requests() -> list[float]:
    """When each signal came that requests this process to stop."""
    stopping: list[float] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.append(time.monotonic())

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    return stopping


def _tie_to(subreaper: int) -> None:
    """In its child: end with it, and be stopped by signals as any program."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(subreaper, signal.SIGTERM)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies. Where there is no prctl this does nothing."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl: {os.strerror(error)}")


def descendants() -> frozenset[psutil.Process]:
    """The processes below this one."""
    return frozenset(psutil.Process().children(recursive=True))


def end_descendants(
    grace: float, *, spare: frozenset[psutil.Process] = frozenset(), spare_trackers: bool = False
) -> list[str]:
    """End every process below this one, SIGTERM first and SIGKILL after ``grace`` seconds; name those killed.

    Those from which signals are held back, because their owner was to end them, get SIGKILL at once.

    spare: leave these; not what they have started since.
    spare_trackers: leave multiprocessing's resource trackers, which ignore SIGTERM, clean up and end when this process
    ends; for a process that has one of its own.
    """
    own = psutil.Process()
    deadline = time.monotonic() + grace
    signalled: set[int] = set()
    killed: set[str] = set()
    rounds = 100  # of killing: a process can fork while the list is read, so look again until none is left
    while rounds and (living := _living(own, spare, spare_trackers)):
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


def _living(own: psutil.Process, spare: frozenset[psutil.Process], spare_trackers: bool) -> list[psutil.Process]:
    """The descendants that still run; those that have ended are reaped on the way, if they are ours to reap."""
    living = []
    for process in own.children(recursive=True):
        if process in spare:
            continue
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                if not (spare_trackers and is_resource_tracker(process)):
                    living.append(process)
            elif process.ppid() == own.pid:
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return living


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
