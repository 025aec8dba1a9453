"""Durable and atomic writes, and locks between processes: the only implementation. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

KEY_BYTES: Final = 32
ERASURES: Final = "erasures.json"
"""In a policy's or a reward model's folder the erasures that reach it; it comes later and is no part of the model."""

TEMPORARY: Final = ".tmp"
"""The suffix of a file that is written beside the one that it is to replace; a killed process may leave one behind."""

_LOCK_POLL_S: Final = 0.01


class LockTimeoutError(TimeoutError):
    """Another process held a lock for longer than the deadline allows."""


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of ``data``; a short write is continued. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def private(path: str, flags: int) -> int:
    """An ``opener`` for ``open``: only its user may read the file, also one that existed and others could read."""
    fd = os.open(path, flags, 0o600)
    os.fchmod(fd, 0o600)
    return fd


def fsync_path(path: Path) -> None:
    """Make a file's content, or a folder's list of names, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(folder: Path) -> None:
    """Make a folder durable with all that is below it."""
    for path in (*folder.rglob("*"), folder):
        fsync_path(path)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, each one's name durable in the one above it."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)


def make_private(path: Path) -> None:
    """Make a file readable by its owner only, and create it if it is missing. Raises OSError."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:  # not opened: to close a database's file would give up this process's locks on it
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)


def replace_file(
    path: Path, data: bytes, *, private: bool = False, durable: bool = True, modified_ns: int | None = None
) -> None:
    """Write a file, or replace it, so that a reader, also one after a crash, finds the old content or the new.

    The content and its name are on disk on return, unless not ``durable``. ``private``: only its owner may read it.
    ``modified_ns``: the time of modification that the file gets. Raises OSError.
    """
    with _temporary(path, data, 0o600 if private else 0o644, durable, modified_ns) as temporary:
        os.replace(temporary, path)
    if durable:
        fsync_path(path.parent)


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Files by when they were written. One that is gone by now is left out."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def write_once(path: Path, data: bytes) -> None:
    """Write a private file, durable and whole, unless there is one: of several writers the first one's stands."""
    if not path.exists():
        make_folder(path.parent)
        with _temporary(path, data, 0o600, True, None) as temporary, contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    fsync_path(path.parent)  # also of one that another process has just made


def link_or_copy(source: str, to: str) -> None:
    """A hard link, or a copy where the file system has none, or ``to`` is on another one; for ``shutil.copytree``.

    Neither file may be written to in place from then on. Raises FileNotFoundError if there is no ``source``.
    """
    try:
        os.link(source, to)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, to)


@contextmanager
def _temporary(path: Path, data: bytes, mode: int, durable: bool, modified_ns: int | None) -> Iterator[Path]:
    """A new file beside ``path`` with this content, which is removed if it has not been renamed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        try:
            write_all(fd, data)
            if modified_ns is not None:
                os.utime(fd, ns=(modified_ns, modified_ns))
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def append_file(path: Path, data: bytes) -> None:
    """Add to the end of a file, which is made if it is missing; durable on return. A crash may tear what it adds."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fsync_path(path.parent)


def read_key(path: Path) -> bytes:
    """The secret key in a file, which has it as 64 hexadecimal digits. Raises OSError, ValueError for what is none."""
    text = path.read_text(errors="replace").strip()
    if not re.fullmatch(f"[0-9a-f]{{{2 * KEY_BYTES}}}", text):
        raise ValueError(f"{path} is no key: it must hold {2 * KEY_BYTES} hexadecimal digits")
    return bytes.fromhex(text)


def make_key(path: Path) -> bytes:
    """The secret key in a file, durable; a new one if there is none. Raises what ``read_key`` raises."""
    write_once(path, f"{secrets.token_hex(KEY_BYTES)}\n".encode())
    return read_key(path)


def prove_disk(path: Path, size: int) -> None:
    """Write ``size`` bytes to a file, make them and its name durable, read them back, remove it.

    Raises OSError if the disk can't do any of that.
    """
    data = os.urandom(size)
    try:
        replace_file(path, data)
        if path.read_bytes() != data:
            raise OSError(errno.EIO, "what was written is not what is read back", str(path))
    finally:
        path.unlink(missing_ok=True)
    fsync_path(path.parent)


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Take the lock on an open file if it is free, or a share in it if it is not held exclusively."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_held: set[int] = set()
"""Descriptors of the locks that ``locked`` holds."""


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, which is made if it is missing. Who can open it can hold it: its owner alone can."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(PermissionError):  # root's, of a release in which others could open it
        os.fchmod(fd, 0o600)
    return fd


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on a file, or a share in it. It is held for an instant to find out."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(
    path: Path, timeout_s: float, *, shared: bool = False, create: bool = True, busy: Exception | None = None
) -> Iterator[None]:
    """Hold an exclusive lock, between processes and threads, on a folder or on a lock file that stays where it is.

    ``shared``: hold it together with others that share it, but with no exclusive holder. ``create``: make the lock file
    if there is nothing at ``path``.

    Raises:
        FileNotFoundError: nothing is there, and nothing is to be made.
        LockTimeoutError: another holds it for all of ``timeout_s`` seconds; ``busy`` in its place if that is given.
    """
    deadline = time.monotonic() + timeout_s
    fd = open_lock(path) if create and not path.is_dir() else os.open(path, os.O_RDONLY)
    try:
        while not try_lock(fd, shared=shared):
            if time.monotonic() >= deadline:
                raise busy or LockTimeoutError(f"{path}: another process has held this lock for {timeout_s:g} s")
            time.sleep(_LOCK_POLL_S)
        _held.add(fd)
        yield
    finally:
        _held.discard(fd)
        os.close(fd)


def leave_locks() -> None:
    """In a fork: let go of the locks of the process that it was forked from, which would outlive that one."""
    while _held:
        os.close(_held.pop())
