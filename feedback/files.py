"""What a file needs to outlive a power loss, and locks between processes. Every wait has a deadline."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK_POLL_S = 0.01


class LockTimeoutError(TimeoutError):
    """Another process held a lock for longer than the deadline allows."""


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of ``data``; a short write is continued. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def fsync_path(path: Path) -> None:
    """Make a file's content, or a folder's list of names, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, each one's name durable in the one above it."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)


def prove_disk(path: Path, size: int) -> None:
    """Write ``size`` bytes to a file beside ``path``, make them and its name durable, read them back, remove it.

    Raises OSError if the disk can't do any of that.
    """
    aside = path.with_name(f"{path.name}.aside")
    data = os.urandom(size)
    try:
        fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(aside, path)
        fsync_path(path.parent)
        if path.read_bytes() != data:
            raise OSError(errno.EIO, "what was written is not what is read back", str(path))
    finally:
        aside.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    fsync_path(path.parent)


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Take the lock on an open file if nobody has it, or a share in it if nobody has it alone."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, timeout_s: float, *, shared: bool = False) -> Iterator[None]:
    """Hold an exclusive lock, between processes and threads, on a lock file that stays where it is.

    ``shared``: hold it with all others who share it, and with nobody who holds it alone.

    Raises LockTimeoutError if another holds it for all of ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not try_lock(fd, shared=shared):
            if time.monotonic() >= deadline:
                raise LockTimeoutError(f"{path}: another process has held this lock for {timeout_s:g} s")
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(fd)
