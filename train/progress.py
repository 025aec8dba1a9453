"""What a run tells the user as it goes: a bar on a terminal, plain lines without one; and the clock of its steps."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def say(text: str) -> None:
    print(text, flush=True)


def say_step(run: str, step: int, steps: int, m: dict[str, float]) -> None:
    if not sys.stderr.isatty():
        kl = f" kl {m['kl_ref']:.4f}" if "kl_ref" in m else ""
        say(
            f"{run}: step {step + 1}/{steps} reward {m['reward']:.3f}{kl} entropy {m['entropy']:.3f} "
            f"length {m['response_length']:.1f} |dlogp| {m['logprob_difference_mean']:.1e} "
            f"{m['tokens_per_s']:.0f} tokens/s {m['seconds']:.2f} s"
        )


def progress_bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


class Clock:
    """Laps of one step, in seconds; of one name they add up."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A step begins."""
        self._start = self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def laps(self, tokens: float) -> dict[str, float]:
        total = self._last - self._start
        return {
            "time": time.time(),
            "seconds": total,
            "tokens_per_s": tokens / total,
            **{f"seconds_{name}": value for name, value in self._laps.items()},
        }
