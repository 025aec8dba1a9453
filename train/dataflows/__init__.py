"""Dataflows: what one step of a run does with the worker groups. This file imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.import_object import NamesNothingError, load_named

if TYPE_CHECKING:
    from train.config.training import TrainConfig
    from train.dataflows.base import Dataflow


def load(config: TrainConfig) -> type[Dataflow]:
    """The dataflow of the config's algorithm, or the one of the user's own that it names as ``module:class``.

    Raises:
        ValueError: it names none.
    """
    module, _, name = (config.dataflow or own(config)).partition(":")
    if not name:
        raise ValueError(f"train.dataflow={config.dataflow!r} names no class; write 'module:class'")
    try:
        dataflow = load_named(module, name)
    except NamesNothingError as error:
        raise ValueError(f"train.dataflow={config.dataflow!r}: {error}") from error
    from train.dataflows.base import Dataflow

    if not (isinstance(dataflow, type) and issubclass(dataflow, Dataflow)):
        raise ValueError(f"train.dataflow={config.dataflow!r} is no subclass of train.dataflows.base.Dataflow")
    return dataflow


def own(config: TrainConfig) -> str:
    """Millrace's own dataflow for the config's algorithm, as ``module:class``."""
    if not config.algorithm.trains_policy:
        return "train.dataflows.reward_model:RewardModelTraining"
    return "train.dataflows.offline:Offline" if config.algorithm.is_offline else "train.dataflows.online:Online"
