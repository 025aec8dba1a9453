"""Where a run's metrics go: ``metrics.jsonl``, a line per step; TensorBoard; and what ``train.trackers`` names.

``train.trackers: [wandb, mlflow]`` are ready (``wandb_tracker``, ``mlflow_tracker``), and need their packages.
``train.trackers: ["my_package.tracking:Board"]`` calls ``my_package.tracking.Board(run)`` once, before any worker
starts; it returns a ``Tracker``.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

from feedback.files import replace_file
from feedback.processes.signals import handlers_deferred
from train.observe.hooks import Answer, Hook, HookError, RunInfo, load_function, named

if TYPE_CHECKING:
    from train.context import JobResult


class Tracker:
    """Base of all trackers. A killed run goes on from ``run.first_step``, and logs the steps from there on again: a
    tracker that sends them elsewhere should let the later numbers of a step win, or begin anew with ``run.history``."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of a step, counted from 0."""

    def fail(self, error: BaseException) -> None:
        """The run ends with an error; ``close`` follows."""

    def close(self) -> None:
        """The run ended, well or not."""


class JsonLines(Tracker):
    """``metrics.jsonl``: every step once, in order. What a killed run logged after its last checkpoint is dropped."""

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        path = run.folder / "metrics.jsonl"
        replace_file(path, "".join(_line(step, metrics) for step, metrics in enumerate(run.history)).encode())
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(_line(step, metrics))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard(Tracker):
    """``tensorboard/``: what a killed run logged after its last checkpoint is hidden."""

    def __init__(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(run)
        self._board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step or None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with handlers_deferred():  # an exception in the midst of its queue would leave that with a wrong count
            for name, value in metrics.items():
                self._board.add_scalar(f"train/{name}", value, step)

    def close(self) -> None:
        self._board.close()


READY: Final = {
    "wandb": "train.observe.wandb_tracker:Wandb",
    "mlflow": "train.observe.mlflow_tracker:Mlflow",
}
"""Trackers that ``train.trackers`` may call by these names."""


MEASURED: Final = ("reward", "response_length", "unrewarded")
"""What is measured of answers whatever the hooks do."""


class Watchers:
    """All trackers and hooks of a run, called as one. A context manager: leaving it closes and ends them."""

    def __init__(self, run: RunInfo) -> None:
        """Load what the config names. Raises HookError."""
        config = run.config
        self._result: JobResult | None = None
        self._hooks: list[tuple[str, Hook]] = [(n, _load("train.hooks", n, Hook, run)) for n in config.hooks]
        self._trackers: list[tuple[str, Tracker]] = [
            ("metrics.jsonl", JsonLines(run)),
            ("tensorboard", TensorBoard(run)),
        ]
        for name in config.trackers:
            try:
                self._trackers.append((name, _load("train.trackers", name, Tracker, run)))
            except BaseException as error:  # those before it have begun a run somewhere
                self._close(error)
                raise

    def start(self) -> None:
        for name, hook in self._hooks:
            with named("train.hooks", name, "on_start"):
                hook.on_start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, tracker in self._trackers:
            with named("train.trackers", name, f"log, step {step}"):
                tracker.log(step, metrics)
        for name, hook in self._hooks:
            with named("train.hooks", name, f"on_step, step {step}"):
                hook.on_step(step, metrics)

    def evaluation(self, step: int, answers: Sequence[Answer]) -> dict[str, float]:
        """What hooks measure of the answers. Raises HookError for what is no finite number by a name of its own."""
        found: dict[str, float] = {}
        for name, hook in self._hooks:
            with named("train.hooks", name, f"on_evaluation, step {step}"):
                for key, value in (hook.on_evaluation(step, answers) or {}).items():
                    if not isinstance(key, str) or key in (*MEASURED, *found):
                        raise ValueError(f"a metric can't be called {key!r}: it has to be text, and not there yet")
                    if not isinstance(value, numbers.Real) or not math.isfinite(value):
                        raise ValueError(f"the metric {key!r} is {value!r}, which is no finite number")
                    found[key] = float(value)
        return found

    def checkpoint(self, steps: int, folder: Path) -> None:
        for name, hook in self._hooks:
            with named("train.hooks", name, f"on_checkpoint, after {steps} steps"):
                hook.on_checkpoint(steps, folder)

    def end(self, result: JobResult) -> None:
        """The run published; hooks get the result when the context is left."""
        self._result = result

    def __enter__(self) -> Watchers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        problems = self._close(error)
        for name, hook in self._hooks:
            try:
                with named("train.hooks", name, "on_end"):
                    hook.on_end(self._result, error)
            except HookError as problem:
                problems.append(problem)
        if problems and error is None:
            raise problems[0] if len(problems) == 1 else HookError("; ".join(map(str, problems)))
        if error is not None:  # the run's own error is the one to raise
            for note in problems:
                error.add_note(str(note))

    def _close(self, error: BaseException | None) -> list[HookError]:
        """Close the trackers; what failed in them."""
        problems = []
        for name, tracker in self._trackers:
            try:
                if error is not None:
                    with named("train.trackers", name, "fail"):
                        tracker.fail(error)
            except HookError as problem:
                problems.append(problem)
            try:
                with named("train.trackers", name, "close"):
                    tracker.close()
            except HookError as problem:
                problems.append(problem)
        return problems


_Observer = TypeVar("_Observer", Hook, Tracker)


def _load(setting: str, name: str, kind: type[_Observer], run: RunInfo) -> _Observer:
    function = load_function(setting, READY.get(name, name) if kind is Tracker else name)
    with named(setting, name, "its constructor"):
        observer = function(run)
    if not isinstance(observer, kind):
        raise HookError(
            f"{setting}: {name!r} returned a {type(observer).__name__}, not a {kind.__module__}.{kind.__name__}"
        )
    return observer


def _line(step: int, metrics: Mapping[str, float]) -> str:
    return json.dumps({"step": step, **metrics}) + "\n"
