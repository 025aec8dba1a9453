"""What a run prints as it goes: a bar on a terminal, plain lines without one; and the timer of its steps."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
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
    "held_out_at_start/reward": "held out at the start: reward {:.3f}",
    "held_out/reward": "held out: reward {:.3f}",
    "held_out/loss": "held out: loss {:.4f}",
    "held_out/margin": "margin {:.3f}",
    "held_out/accuracy": "accuracy {:.2f}",
    "tokens_per_s": "{:.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "seconds": "{:.2f} s",
}
_ON_BAR: Final = ("reward", "loss", "tokens_per_s", "mfu")
_RECENT: Final = 20
"""Steps whose seconds say how long the others will take."""


def say(text: str) -> None:
    print(text, flush=True)


def progress_bar(*more: str) -> Progress:
    """``more``: texts behind the bar, as of rich's ``TextColumn``."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        *map(TextColumn, more),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


class StepProgress:
    """The steps of a run as they are done: a bar with the newest numbers on a terminal, a line each without one.

    A context manager. ``done``: steps that were done before, by a run that goes on.
    """

    def __init__(self, run: str, done: int, steps: int) -> None:
        self._run, self._steps = run, steps
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._bar = progress_bar("{task.fields[numbers]}")
        self._task = self._bar.add_task(run, total=steps, completed=done, numbers="")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step ``step``, from 0, is done."""
        self._seconds.append(metrics["seconds"])
        if self._bar.disable:
            left = time_left(self._seconds, self._steps - step - 1)
            say(f"{self._run}: step {step + 1}/{self._steps} {_numbers(metrics, _SHOWN)}{left}")
        else:
            self._bar.update(self._task, completed=step + 1, numbers=_numbers(metrics, _ON_BAR))

    def __enter__(self) -> StepProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def time_left(seconds: Sequence[float], steps: int) -> str:
    """How long ``steps`` more take, if as long each as the last ones (``seconds``): ", 3 min left"; empty for none."""
    return f", {duration(steps * sum(seconds) / len(seconds))} left" if steps > 0 else ""


def duration(seconds: float) -> str:
    """Rounded, for people: "8 s", "3 min 20 s", "2 h 5 min"."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours:
        return f"{hours} h {m} min"
    return f"{m} min {s} s" if m else f"{s} s"


def _numbers(metrics: Mapping[str, float], names: Iterable[str]) -> str:
    return " ".join(_SHOWN[name].format(metrics[name]) for name in names if name in metrics)


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
