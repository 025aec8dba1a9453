"""Algorithms, one small file each; a name in the config picks one here."""

from __future__ import annotations

from train.algorithms.grpo import GRPO
from train.config import AlgorithmConfig

ALGORITHMS = {"grpo": GRPO}


def load(config: AlgorithmConfig) -> GRPO:
    """The algorithm that the config names."""
    return ALGORITHMS[config.name](config)
