"""Ends what is left of a local Ray whose owner has died: ``python reaper.py TOKEN_PATH``.

Its standard input is a pipe that the owner holds and that ends with it. Ray's daemons end then too, but its agents only
when they have tried for a minute to say so, and workers that are busy later still. Imports the standard library alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_LOOKS = 3  # a process can fork while the others are looked at
_PAUSE_S = 0.2


def main(token: str) -> None:
    """Wait until the owner has ended, and kill all processes that were started with this file of a token."""
    sys.stdin.buffer.read()
    for _ in range(_LOOKS):
        kill_marked(f"RAY_AUTH_TOKEN_PATH={token}")
        time.sleep(_PAUSE_S)
    shutil.rmtree(Path(token).parent, ignore_errors=True)  # the owner's, which it could not remove


def end_marked(variable: str, timeout_s: float) -> bool:
    """Kill all processes that were started with ``NAME=value`` in their environment; whether they have gone in time.

    A reaper among them, whose owner has ended, has half of that time to end when it has cleaned up.
    """
    started = time.monotonic()
    while kill_marked(variable, spare_reapers=time.monotonic() - started < timeout_s / 2):
        if time.monotonic() - started > timeout_s:
            return False
        time.sleep(_PAUSE_S)
    return True


def kill_marked(variable: str, *, spare_reapers: bool = False) -> list[int]:
    """Kill those that there are, but for this process and multiprocessing's trackers, which clean up and end."""
    mark, found = variable.encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            words = (folder / "cmdline").read_bytes()
            is_tracker = b"multiprocessing.resource_tracker" in words
            is_marked = mark in (folder / "environ").read_bytes().split(b"\0")
            if is_marked and not is_tracker and int(folder.name) != os.getpid():
                found.append(int(folder.name))
                if not (spare_reapers and os.fsencode(__file__) in words):
                    os.kill(int(folder.name), signal.SIGKILL)
    return found


if __name__ == "__main__":
    main(sys.argv[1])
