"""Hooks: a user's code at the turning points of a run, named in the config.

``train.hooks: ["my_package.alerts:Alerts"]`` calls ``my_package.alerts.Alerts(run)`` once, before any worker starts,
and the methods of the ``Hook`` that it returns as the run goes. They run in the driver, between two steps, so that a
slow one makes the run slow; one that raises ends the run, with an error that names it::

    class Alerts(Hook):
        def on_step(self, step, metrics):
            if metrics["reward"] < 0.1:
                notify(f"{self.run.name}: reward {metrics['reward']:.2f} at step {step}")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config.training import TrainConfig
from train.import_object import import_object

if TYPE_CHECKING:
    from feedback.datasets import Prompt
    from train.batch.packed import Sample
    from train.context import JobResult
    from train.environments.episode import Episode


class HookError(RuntimeError):
    """A hook or tracker can't be loaded or failed; the text names the setting, the function and the moment."""


@dataclass(frozen=True)
class RunInfo:
    """The run, as trackers and hooks get it. ``first_step`` is above 0 when a killed run goes on from a checkpoint.

    ``history``: the metrics of the steps before ``first_step``.
    """

    name: str
    folder: Path
    parent: int
    first_step: int
    steps: int
    config: TrainConfig
    history: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True)
class Answer:
    """To a prompt of ``train.evaluate_suite``, by the policy in training, greedily.

    ``response``: its text and tokens; with ``train.environment``, the episode, whose rewards ``reward`` is the sum of.
    ``reward`` is None if it has none.
    """

    prompt: Prompt
    response: Sample | Episode
    reward: float | None


class Hook:
    """Base of all hooks; each method does nothing until it is overridden. Steps are counted from 0."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run

    def on_start(self) -> None:
        """The workers are up, and the checkpoint, if the run goes on from one, is loaded."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done and logged. After a kill, the steps since the last checkpoint come again."""

    def on_evaluation(self, step: int, answers: Sequence[Answer]) -> Mapping[str, float] | None:
        """The policy has answered the held-out prompts: before the first step, and after this one where it is due.

        What it returns is logged with the step, under ``held_out/`` (``held_out_at_start/`` before the first step).
        """
        return None

    def on_checkpoint(self, steps: int, folder: Path) -> None:
        """A checkpoint is whole: ``folder`` holds what ``steps`` steps made, until newer ones take its place."""

    def on_end(self, result: JobResult | None, error: BaseException | None) -> None:
        """The run ended: published (``result``), or with ``error``. Not called when the process is killed."""


def load_function(setting: str, name: str) -> Callable[[RunInfo], Any]:
    """What ``setting`` names as ``module:function``. Raises HookError if that can't be called."""
    try:
        function = import_object(setting, name, "function")
    except ValueError as error:
        raise HookError(str(error)) from error
    if not callable(function):
        raise HookError(f"{setting}={name!r} is a {type(function).__name__}, not a function or class")
    return function


@contextmanager
def named(setting: str, name: str, moment: str) -> Iterator[None]:
    """Errors inside become HookErrors that say whose they are."""
    try:
        yield
    except Exception as error:
        raise HookError(f"{setting}: {name!r} failed in {moment}: {type(error).__name__}: {error}") from error
