"""What every dataflow is: the data that it reads once, and what a step does with the worker groups.

A dataflow of your own is a subclass, named in the config as ``train.dataflow: my_package.mine:Mine``, of ``Dataflow``
or of one of Millrace's own (``train.dataflows.online.Online``); override ``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from feedback.lake.tables import Lake
from train import algorithms
from train.config.training import TrainConfig
from train.context import JobContext
from train.observe.hooks import Answer
from train.observe.progress import StepTimer
from train.workers.role_groups import Groups


class Data(Protocol):
    """What a run learns from: a function of the lake's versions, the config and the seed."""

    @property
    def digest(self) -> str:
        """Hash of all of it, by which a run that goes on sees that it is the same."""

    @property
    def usable(self) -> int:
        """Prompts, or items, that there are; with fewer than ``train.data.min_prompts`` nothing is trained."""

    def __str__(self) -> str:
        """What there is, and what was left out and why, for the log."""


@dataclass
class Run:
    """What a dataflow works with.

    ``timer`` measures the parts of a step. ``evaluation``: what hooks measure of answers to held-out prompts, after a
    step.
    """

    config: TrainConfig
    context: JobContext
    groups: Groups
    data: Any
    seed: int
    timer: StepTimer
    evaluation: Callable[[int, Sequence[Answer]], dict[str, float]]


class Dataflow:
    """Base of all dataflows; made in the driver, once the workers are up."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.algorithm = algorithms.load(run.config.algorithm)

    @classmethod
    def read(cls, lake: Lake, versions: Mapping[str, int], config: TrainConfig, policy: Path, seed: int) -> Data:
        """What the lake held at these versions, and the run learns from.

        A ``read`` of your own that does not build on Millrace's leaves out what ``evaluation.suites.held_out.HeldOut``
        names.

        Raises:
            feedback.lake.tables.LakeError: it can't be read any more.
        """
        raise NotImplementedError

    @classmethod
    def settled(cls, config: TrainConfig, data: Any) -> TrainConfig:
        """The config, with what is unset and follows from the data set; the run then has that."""
        return config

    def step(self, step: int) -> dict[str, float]:
        """Learn from what step ``step`` (from 0) draws; what to log, among it ``tokens``, computed in training."""
        raise NotImplementedError

    def state(self) -> Any:
        """What ``resume`` needs after a kill, beside weights, optimizers and random states: what JSON can hold."""
        return None

    def resume(self, state: Any) -> None:
        """Go on after the step that returned ``state``; the workers have the weights that they had then."""

    def close(self) -> None:
        """End what goes on beside the steps; called once, while the workers are there, however the run ends."""
