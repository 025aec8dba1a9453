"""Signs of life of a run's processes: a file of each, below ``alive`` in the run's folder, touched by a thread.

A process that is stopped, or whose interpreter hangs, touches its file no more. Who watches compares a file's time with
what it was, by its own clock, so that no two machines' clocks are compared. Imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from feedback.files import replace_file

FOLDER: Final = "alive"
DRIVER: Final = "driver"
_MOST_S: Final = 10.0
_LOOK_S: Final = 5.0
"""Longest time between two looks at the files that counts as silence."""
_PER_SILENCE: Final = 6
"""Touches within the silence after which a process counts as hung; at least one in 10 s."""


def interval(silence_s: float) -> float:
    """Seconds from one touch to the next."""
    return min(_MOST_S, silence_s / _PER_SILENCE)


class Heartbeat:
    """A thread that touches this process' file until ``stop``, or until somebody has removed the file.

    Args:
        folder: of the run.
        name: of the process in the run.
        every_s: seconds from one touch to the next.
    """

    def __init__(self, folder: Path, name: str, every_s: float) -> None:
        self._file, self._every_s = folder / FOLDER / name, every_s
        self._about: dict[str, Any] = {"process": os.getpid(), "host": socket.gethostname()}
        self._stopped = threading.Event()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._write()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of {name}", daemon=True)
        self._thread.start()

    def note(self, step: int) -> None:
        """Have the file say how many steps are done."""
        self._about["step"] = step
        if self._file.exists():
            self._write()

    def stop(self) -> None:
        """End the thread, and remove the file."""
        self._stopped.set()
        self._thread.join()
        self._file.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                os.utime(self._file)
            except FileNotFoundError:
                return
            except OSError:  # of a disk on the network, which may answer the next time
                continue

    def _write(self) -> None:
        replace_file(self._file, json.dumps(self._about).encode(), durable=False)


_driver: Heartbeat | None = None


@contextmanager
def driver_heartbeat(folder: Path, every_s: float) -> Iterator[None]:
    """That of the driver, while the block runs."""
    global _driver
    _driver = Heartbeat(folder, DRIVER, every_s)
    try:
        yield
    finally:
        _driver.stop()
        _driver = None


def note_step(step: int) -> None:
    """Have the driver's file say how many steps are done; nothing where it has none."""
    if _driver is not None:
        _driver.note(step)


def driver_step(folder: Path) -> int | None:
    """How many steps were done when the driver last said so; None if it has not."""
    try:
        step = json.loads((folder / FOLDER / DRIVER).read_bytes()).get("step")
    except (OSError, ValueError):
        return None
    return step if isinstance(step, int) else None


def forget_ranks(folder: Path) -> None:
    """Remove the files of all processes but the driver: they are about to end, or to rest."""
    for file in (folder / FOLDER).glob("*"):
        if file.name != DRIVER:
            file.unlink(missing_ok=True)


class Watch:
    """Whether the processes of an attempt give signs of life, seen from outside.

    Silence is counted only while somebody looks: where the watching process itself was stopped meanwhile, those that it
    watches may have been stopped with it (a container that is paused), and get as long again as they would have had.
    The same holds while the folder can't be read.

    Args:
        folder: of the run; what an earlier attempt has left there is removed.
        silence_s: from a process' last touch until it counts as hung; also from when the last file has gone until the
            attempt has ended.
        start_s: until there is the first file.
    """

    def __init__(self, folder: Path, silence_s: float, start_s: float) -> None:
        self._folder, self._silence_s, self._start_s = folder / FOLDER, silence_s, start_s
        shutil.rmtree(self._folder, ignore_errors=True)
        self._seen: dict[str, tuple[int, float]] = {}
        self._since, self._begun = time.monotonic(), False
        self._looked = self._since

    def hung(self) -> str | None:
        """Which process has been silent for too long, in words; None if none has."""
        there = dict[str, int]()
        try:
            for file in self._folder.glob("[!.]*"):
                with suppress(FileNotFoundError):
                    there[file.name] = file.stat().st_mtime_ns
        except OSError:  # of a disk on the network, which may answer the next time
            return None
        now = time.monotonic()
        unseen = max(0.0, now - self._looked - _LOOK_S)
        self._looked, self._since = now, self._since + unseen
        self._seen = {name: (touched, last + unseen) for name, (touched, last) in self._seen.items()}
        self._seen = {
            name: (touched, now if self._seen.get(name, (0,))[0] != touched else self._seen[name][1])
            for name, touched in there.items()
        }
        if there:
            self._begun, self._since = True, now
            name, (_, last) = min(self._seen.items(), key=lambda item: item[1][1])
            if now - last <= self._silence_s:
                return None
            return f"{self._named(name)} has given no sign of life for {self._silence_s:g} s (train.restarts.silence_s)"
        limit, setting = (
            (self._silence_s, "train.restarts.silence_s") if self._begun else (self._start_s, "train.start_timeout_s")
        )
        if now - self._since <= limit:
            return None
        what = "its driver has finished and does not end" if self._begun else "its driver has not started"
        return f"{what} within {limit:g} s ({setting})"

    def _named(self, name: str) -> str:
        what = "the driver" if name == DRIVER else f"rank {name.rpartition('-')[2]} of pool {name.rpartition('-')[0]}"
        try:
            about = json.loads((self._folder / name).read_bytes())
            return f"{what} (process {about['process']} on {about['host']})"
        except (OSError, ValueError, KeyError):
            return what
