"""Dataflows: what one step of a run does with the worker groups. This file imports no torch.

``base`` (what every dataflow is, and how to write your own); ``online`` (learns from responses: sample, score, learn,
reshard), ``offline`` (learns from feedback), ``reward_training`` (trains a reward model).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.import_object import import_subclass

if TYPE_CHECKING:
    from train.config.training import TrainConfig
    from train.dataflows.base import Dataflow


def load(config: TrainConfig) -> type[Dataflow]:
    """The dataflow of the config's algorithm, or the one of the user's own that it names as ``module:class``.

    Raises:
        ValueError: it names none.
    """
    from train.dataflows.base import Dataflow

    return import_subclass("train.dataflow", config.dataflow or built_in(config), Dataflow)


def built_in(config: TrainConfig) -> str:
    """Millrace's own dataflow for the config's algorithm, as ``module:class``."""
    if not config.algorithm.trains_policy:
        return "train.dataflows.reward_training:RewardModelTraining"
    return "train.dataflows.offline:Offline" if config.algorithm.is_offline else "train.dataflows.online:Online"
