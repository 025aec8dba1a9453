"""The files of the code that processes have imported, and whether they are as they were then. Imports no torch.

Processes that stay between runs have a user's code as it was when it was imported, and some of it is imported in ranks
alone, as where a method of an environment imports what it needs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress

Look = tuple[int, int, int]
"""When a file was changed, and what else another file in its place has: one that was unpacked has a time of its own."""


class ImportedFiles:
    """Those of this process, and of others that began after it and say theirs."""

    def __init__(self) -> None:
        self._known: dict[str, Look] = {}
        self._began = time.time_ns()
        self._changed: str | None = None
        self.note()

    def note(self) -> None:
        """Take in what this process has imported since."""
        self.add(imported_files(self._known))

    def add(self, files: Mapping[str, Look]) -> None:
        """Take in what another process has imported, by its ``imported_files``."""
        for file in files.keys() - self._known.keys():
            self._known[file] = files[file]
            if files[file][0] > self._began:  # maybe after it was imported
                self._changed = file

    def changed(self) -> str | None:
        """Which file is another now, in words; None if none is."""
        for file, before in self._known.items():
            try:
                if _look_of(file) == before:
                    continue
            except OSError:
                pass
            self._changed = file
        return None if self._changed is None else f"{self._changed} has changed since it was imported"


def imported_files(known: Collection[str] = ()) -> dict[str, Look]:
    """The files of the modules that this process has imported, but for ``known`` ones, and how they look now.

    Without the code that compilers write and run: torch's, in part without a spec, and Triton's.
    """
    found: dict[str, Look] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is None or file in known or getattr(module, "__spec__", None) is None or _is_compiled(file):
            continue
        with suppress(OSError):
            found[file] = _look_of(file)
    return found


def _is_compiled(file: str) -> bool:
    set_ = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    caches = tuple(os.path.join(cache, "") for cache in set_ if cache)
    return "/torchinductor_" in file or "/.triton/" in file or file.startswith(caches)


def _look_of(file: str) -> Look:
    found = os.stat(file)
    return found.st_mtime_ns, found.st_size, found.st_ino
