"""Algorithms, one small file each; a name in the config picks one. This file imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from train.import_object import NamesNothingError, load_named

if TYPE_CHECKING:
    from train.algorithms.base import Algorithm
    from train.config.algorithms import AlgorithmConfig

ALGORITHMS: Final = {
    "grpo": "train.algorithms.grpo:GRPO",
    "dr_grpo": "train.algorithms.dr_grpo:DrGRPO",
    "dapo": "train.algorithms.dapo:DAPO",
    "gspo": "train.algorithms.gspo:GSPO",
    "cispo": "train.algorithms.cispo:CISPO",
    "rloo": "train.algorithms.rloo:RLOO",
    "reinforce_pp": "train.algorithms.reinforce_pp:ReinforcePlusPlus",
    "reinforce_pp_baseline": "train.algorithms.reinforce_pp:ReinforcePlusPlusBaseline",
    "remax": "train.algorithms.remax:ReMax",
    "ppo": "train.algorithms.ppo:PPO",
    "dpo": "train.algorithms.offline.dpo:DPO",
    "kto": "train.algorithms.offline.kto:KTO",
    "sft": "train.algorithms.offline.sft:SFT",
    "reward_model": "train.algorithms.offline.reward_model:RewardModel",
}


def load(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that the config names: one of ``ALGORITHMS``, or a class of the user's own as ``module:class``.

    Raises:
        ValueError: it names none, one that learns from feedback where the config has it otherwise, or one without a
            clip where the clip is to be the correction.
    """
    module, _, name = ALGORITHMS.get(config.name, config.name).partition(":")
    setting = f"train.algorithm.name={config.name!r}"
    if not name:
        raise ValueError(f"{setting} is no algorithm; use one of {', '.join(ALGORITHMS)}, or 'module:class'")
    try:
        algorithm = load_named(module, name)
    except NamesNothingError as error:
        raise ValueError(f"{setting}: {error}") from error
    from train.algorithms.base import Algorithm

    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        raise ValueError(f"{setting} is no subclass of train.algorithms.base.Algorithm")
    if algorithm.dataset is not None and not config.is_offline:
        raise ValueError(f"{setting} learns from feedback ({algorithm.dataset}); set train.algorithm.offline to true")
    config.check_proximal(clips=algorithm.clips)
    return algorithm(config)
