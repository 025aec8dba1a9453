"""Algorithms, one small file each; a name in the config picks one. This file imports no torch.

Read ``base`` (what every algorithm is, and how to write your own) and ``grpo`` (advantages within a prompt's group).
The others, by what sets them apart: ``dr_grpo`` (without GRPO's two biases), ``dapo`` (two clip bounds, dynamic
sampling, a cost of length), ``gspo`` (the ratio of a whole response is clipped), ``cispo`` (the weight is clipped, not
the update), ``rloo`` (baseline: the other responses), ``remax`` (baseline: the greedy response), ``reinforce_pp``
(normalised over the whole batch; also with a baseline), ``ppo`` (the one with a critic), ``online_dpo`` (pairs of fresh
responses), ``selection`` (SFT on the best of them, or on those that are good enough),
``distill`` (from a teacher's logprobs). ``offline`` (from feedback: DPO, KTO, SFT, reward models).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from train.import_object import import_subclass

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
    "distill": "train.algorithms.distill:Distill",
    "online_dpo": "train.algorithms.online_dpo:OnlineDPO",
    "best_of_n": "train.algorithms.selection.best_of_n:BestOfN",
    "rejection_sampling": "train.algorithms.selection.rejection_sampling:RejectionSampling",
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
    from train.algorithms.base import Algorithm

    algorithm = import_subclass("train.algorithm.name", ALGORITHMS.get(config.name, config.name), Algorithm)
    if algorithm.dataset is not None and not config.is_offline:
        raise ValueError(
            f"train.algorithm.name={config.name!r} learns from feedback ({algorithm.dataset}); set "
            "train.algorithm.offline to true"
        )
    config.check_proximal(clips=algorithm.clips)
    return algorithm(config)
