"""What a disk may hold after a power loss, at every I/O call of a real program.

The program runs under strace, so that every file operation is seen, whoever makes it: Python, Arrow, SQLite, or
deltalake's Rust. ``Disk`` replays the operations and tells what is left if the power fails behind any of them:

* ``nothing``: only what was fsynced. A file's content is that of its last fsync, a name is there if its folder was
  fsynced since; that is what POSIX promises, and no more.
* ``names``: folders are as they were, contents are those of the last fsync, cut to it.
* ``zeros``: the same, but files have their lengths, with zeros where nothing was fsynced.
* ``all``: everything; what a kill leaves.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Left = Literal["nothing", "names", "zeros", "all"]
LEFT: tuple[Left, ...] = ("nothing", "names", "zeros", "all")

_CALLS = (
    "open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,sync,syncfs,sync_file_range,msync,"
    "rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,rmdir,mkdir,mkdirat,"
    "truncate,ftruncate,fallocate,lseek,copy_file_range,sendfile"
)
_LINE = re.compile(r"(?P<pid>\d+) +(?P<call>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+|\?)(?P<rest>.*)", re.DOTALL)
_UNFINISHED = re.compile(r"(?P<head>\d+ +\w+\(.*) <unfinished \.\.\.>")
_RESUMED = re.compile(r"(?P<pid>\d+) +<\.\.\. \w+ resumed>(?P<tail>.*)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_FD = re.compile(r"(?P<fd>\d+)<(?P<path>(?:\\x[0-9a-f]{2})*)>")
_FD_PATH = re.compile(r"(\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>")


_BETWEEN_WRITES = 8


@dataclass(frozen=True)
class Call:
    """One finished system call that succeeded. ``paths`` and ``data`` as far as it has any."""

    name: str
    paths: tuple[str, ...] = ()
    fd: int = -1
    data: bytes = b""
    numbers: tuple[int, ...] = ()
    flags: str = ""
    result: int = 0


def record(script: Path, *arguments: str, timeout: float = 120) -> list[Call]:
    """Run a Python script and return its file operations. Raises AssertionError if it fails."""
    trace = Path(arguments[0]).with_suffix(".trace")
    command = ["strace", "-f", "-y", "-xx", "-s", "100000000", "-o", str(trace), "-e", f"trace={_CALLS}"]
    done = subprocess.run(
        [*command, sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    with trace.open() as lines:
        calls = list(_parse(lines))
    trace.unlink()
    return calls


def _parse(lines: Iterator[str]) -> Iterator[Call]:
    begun: dict[str, str] = {}
    for line in lines:
        line = line.rstrip("\n")
        if unfinished := _UNFINISHED.fullmatch(line):
            begun[line.split(" ", 1)[0]] = unfinished["head"]
            continue
        if resumed := _RESUMED.fullmatch(line):
            line = begun.pop(resumed["pid"]) + resumed["tail"]
        match = _LINE.fullmatch(line)
        if match is not None and match["result"] != "?" and int(match["result"]) >= 0:
            yield _call(match["call"], match["arguments"], int(match["result"]))


def _call(name: str, arguments: str, result: int) -> Call:
    texts = [_unhex(text) for text in _TEXT.findall(arguments)]
    first = _FD.match(arguments)
    fd = int(first["fd"]) if first else -1
    bare = _TEXT.sub("", _FD_PATH.sub("", arguments))
    numbers = tuple(int(number) for number in re.findall(r"(?<![\w.])-?\d+(?![\w.])", bare))
    if name in ("write", "pwrite64"):
        path = _unhex(first["path"]).decode() if first else ""
        return Call(name, (path,), fd, texts[0][:result], numbers, result=result)
    if name in ("fsync", "fdatasync", "ftruncate", "lseek", "fallocate", "sync_file_range", "writev", "pwritev"):
        path = _unhex(first["path"]).decode() if first else ""
        return Call(name, (path,), fd, b"", numbers, result=result)
    folders = [_unhex(folder).decode() for _, folder in _FD_PATH.findall(arguments)]
    paths = tuple(
        os.path.normpath(os.path.join(folders[min(i, len(folders) - 1)] if folders else "/", text.decode()))
        for i, text in enumerate(texts)
    )
    return Call(name, paths, fd, b"", numbers, bare, result)


def _unhex(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


@dataclass(eq=False)
class _File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass(eq=False)
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)


class Disk:
    """Everything below ``root``, a folder that was empty when the program began."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.top = _Folder()
        self._offsets: dict[int, int] = {}
        self._appending: set[int] = set()

    def apply(self, call: Call) -> bool:
        """Replay one call; whether it touched the disk. Raises NotImplementedError for one it can't replay."""
        if not any(path == self.root or path.startswith(f"{self.root}/") for path in call.paths):
            return False
        replay = getattr(self, f"_{call.name}", None)
        if replay is None:
            raise NotImplementedError(f"{call.name} of {call.paths}")
        return bool(replay(call))

    def left(self, what: Left) -> dict[str, bytes | None]:
        """Relative path -> content, None for a folder."""
        return dict(self._walk(self.top, "", what))

    def _walk(self, folder: _Folder, prefix: str, what: Left) -> Iterator[tuple[str, bytes | None]]:
        for name, entry in (folder.synced if what == "nothing" else folder.names).items():
            if isinstance(entry, _Folder):
                yield prefix + name, None
                yield from self._walk(entry, f"{prefix}{name}/", what)
            elif what == "all":
                yield prefix + name, bytes(entry.data)
            else:
                missing = max(0, len(entry.data) - len(entry.synced)) if what == "zeros" else 0
                yield prefix + name, entry.synced + bytes(missing)

    def _find(self, path: str) -> _File | _Folder | None:
        entry: _File | _Folder | None = self.top
        for name in path[len(self.root) :].split("/"):
            if name:
                entry = entry.names.get(name) if isinstance(entry, _Folder) else None
        return entry

    def _parent(self, path: str) -> tuple[_Folder, str]:
        folder, _, name = path.rpartition("/")
        parent = self._find(folder)
        assert isinstance(parent, _Folder), path
        return parent, name

    def _openat(self, call: Call) -> bool:
        self._offsets[call.result] = 0
        self._appending.discard(call.result)
        if "O_APPEND" in call.flags:
            self._appending.add(call.result)
        entry = self._find(call.paths[0])
        if entry is None and "O_CREAT" in call.flags:
            parent, name = self._parent(call.paths[0])
            parent.names[name] = _File()
            return True
        if "O_TRUNC" in call.flags and isinstance(entry, _File) and entry.data:
            entry.data.clear()
            return True
        return False

    def _write(self, call: Call) -> bool:
        file = self._find(call.paths[0])
        if not isinstance(file, _File):  # it has no name any more
            return False
        at = len(file.data) if call.fd in self._appending else self._offsets[call.fd]
        self._put(file, at, call.data)
        self._offsets[call.fd] = at + len(call.data)
        return True

    def _pwrite64(self, call: Call) -> bool:
        file = self._find(call.paths[0])
        if not isinstance(file, _File):
            return False
        self._put(file, call.numbers[-1], call.data)
        return True

    def _put(self, file: _File, at: int, data: bytes) -> None:
        file.data.extend(bytes(max(0, at - len(file.data))))
        file.data[at : at + len(data)] = data

    def _lseek(self, call: Call) -> bool:
        self._offsets[call.fd] = call.result
        return False

    def _ftruncate(self, call: Call) -> bool:
        file = self._find(call.paths[0])
        if not isinstance(file, _File):
            return False
        size = call.numbers[-1]
        file.data.extend(bytes(max(0, size - len(file.data))))
        del file.data[size:]
        return True

    def _fsync(self, call: Call) -> bool:
        entry = self._find(call.paths[0])
        if isinstance(entry, _File):
            entry.synced = bytes(entry.data)
        elif entry is not None:
            entry.synced = dict(entry.names)
        return True

    _fdatasync = _fsync

    def _mkdir(self, call: Call) -> bool:
        parent, name = self._parent(call.paths[0])
        parent.names[name] = _Folder()
        return True

    _mkdirat = _mkdir

    def _rename(self, call: Call) -> bool:
        source, old = self._parent(call.paths[0])
        target, new = self._parent(call.paths[1])
        target.names[new] = source.names.pop(old)
        return True

    _renameat = _renameat2 = _rename

    def _link(self, call: Call) -> bool:
        source, old = self._parent(call.paths[0])
        target, new = self._parent(call.paths[1])
        target.names[new] = source.names[old]
        return True

    _linkat = _link

    def _unlink(self, call: Call) -> bool:
        parent, name = self._parent(call.paths[0])
        del parent.names[name]
        return True

    _unlinkat = _rmdir = _unlink


def losses(calls: list[Call], root: Path) -> Iterator[tuple[int, Left, dict[str, bytes | None], int]]:
    """(number of the call, what is left, the files, bytes printed by then) for each different state of the disk.

    In the states that show what was written and not fsynced, a run of writes is looked at now and then only: a Parquet
    file that is half written is no different from one that is a little less than half written.
    """
    disk = Disk(root)
    seen: set[tuple[bytes, int]] = set()
    printed = 0
    for number, call in enumerate(calls):
        if call.name == "write" and call.fd == 1:
            printed += call.result
        if not disk.apply(call):
            continue
        for what in LEFT:
            if what in ("zeros", "all") and call.name in ("write", "pwrite64") and number % _BETWEEN_WRITES:
                continue
            files = disk.left(what)
            key = (_digest(files), printed)
            if key not in seen:
                seen.add(key)
                yield number, what, files, printed


def _digest(files: dict[str, bytes | None]) -> bytes:
    digest = hashlib.blake2b()
    for name in sorted(files):
        content = files[name]
        digest.update(f"{name}\0{-1 if content is None else len(content)}\0".encode() + (content or b""))
    return digest.digest()


def restore(files: dict[str, bytes | None], folder: Path) -> None:
    """Make ``folder`` hold these files and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        if content is None:
            (folder / name).mkdir(exist_ok=True)
        else:
            (folder / name).write_bytes(content)
