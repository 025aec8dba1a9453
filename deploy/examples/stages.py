"""Long work in named stages, and what the user sees of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from train.observe.progress import progress_bar


class Stages:
    """Stages with their seconds; a progress bar on a terminal, and plain lines."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self.seconds: dict[str, float] = {}
        self._started = time.monotonic()
        self._bar = progress_bar()
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Stages:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        self._bar.update(self._task, description=name)
        self.say(f"{self._what}: {name} …")
        yield
        self.seconds[name] = time.monotonic() - started
        self._bar.advance(self._task)
        self.say(f"{self._what}: {name} took {self.seconds[name]:.1f} s")

    def say(self, line: str) -> None:
        print(f"{self.elapsed:6.1f} s  {line}", flush=True)
