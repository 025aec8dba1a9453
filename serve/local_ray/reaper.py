"""Ends what is left of a local Ray whose owner has died: ``python reaper.py TOKEN_PATH``.

Its standard input is a pipe that the owner holds and that ends with it. Ray's daemons end then too, but its agents only
when they have tried for a minute to say so, and workers that are busy later still. Imports the standard library alone.
"""

from __future__ import annotations

import os
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
    mark = f"RAY_AUTH_TOKEN_PATH={token}".encode()
    for _ in range(_LOOKS):
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                is_tracker = b"multiprocessing.resource_tracker" in (folder / "cmdline").read_bytes()
                is_rays = mark in (folder / "environ").read_bytes().split(b"\0")
                if is_rays and not is_tracker and int(folder.name) != os.getpid():
                    os.kill(int(folder.name), signal.SIGKILL)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1])
