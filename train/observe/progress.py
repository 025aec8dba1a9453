"""What a run prints as it goes: a bar on a terminal, plain lines without one; and the timer of its steps."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SHOWN: Final = {
    "reward": "reward {:.3f}",
    "loss": "loss {:.4f}",
    "margin": "margin {:.3f}",
    "accuracy": "accuracy {:.2f}",
    "kl_ref": "kl {:.4f}",
    "k2_ref": "k2 {:.4f}",
    "entropy": "entropy {:.3f}",
    "response_length": "length {:.1f}",
    "logprob_difference_mean": "|dlogp| {:.1e}",
    "held_out_at_start/loss": "held out at the start: loss {:.4f}",
    "held_out_at_start/margin": "margin {:.3f}",
    "held_out_at_start/accuracy": "accuracy {:.2f}",
    "held_out/loss": "held out: loss {:.4f}",
    "held_out/margin": "margin {:.3f}",
    "held_out/accuracy": "accuracy {:.2f}",
    "tokens_per_s": "{:.0f} tokens/s",
    "seconds": "{:.2f} s",
}


def say(text: str) -> None:
    print(text, flush=True)


def say_step(run: str, step: int, steps: int, m: dict[str, float]) -> None:
    """Print one line of a step, where there is no bar."""
    if not sys.stderr.isatty():
        numbers = " ".join(text.format(m[name]) for name, text in _SHOWN.items() if name in m)
        say(f"{run}: step {step + 1}/{steps} {numbers}")


def progress_bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


class StepTimer:
    """The seconds that the parts of a step take."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self._start = self._last = time.monotonic()
        self._parts: dict[str, float] = {}

    def record(self, name: str) -> None:
        """Add the time since the last record to a part."""
        now = time.monotonic()
        self._parts[name] = self._parts.get(name, 0.0) + now - self._last
        self._last = now

    def metrics(self, tokens: float) -> dict[str, float]:
        """What to log of the step, which computed ``tokens`` tokens."""
        total = self._last - self._start
        return {
            "time": time.time(),
            "seconds": total,
            "tokens_per_s": tokens / total,
            **{f"seconds_{name}": value for name, value in self._parts.items()},
        }


def seconds_by_part(history: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """What the parts of all steps took together, by their metrics; in seconds."""
    prefix, found = "seconds_", Counter[str]()
    for metrics in history:
        found.update({name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)})
    return dict(found)
