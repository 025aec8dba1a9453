"""Ends a process that has threads which can't be stopped, without taking the interpreter down around them.

Arrow's threads go on reading ahead from an object store through Python for a moment, and one that comes back into an
interpreter that is being taken down ends the process by a signal. A reward function that took too long still runs, and
Python might wait for it for ever.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn

_reasons: set[str] = set()


def skip_teardown(reason: str) -> None:
    """Have ``end_process`` end this process without Python's own teardown."""
    _reasons.add(reason)


def teardown_is_skipped() -> bool:
    return bool(_reasons)


def end_process(code: int) -> NoReturn:
    """End this process with an exit code. Functions registered with ``atexit`` run only if teardown isn't skipped."""
    if not _reasons:
        sys.exit(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(code)
