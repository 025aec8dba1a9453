"""Best of n and rejection sampling: which responses are learned, and that their loss is SFT's."""

from __future__ import annotations

import pytest
import torch

from train.algorithms import load
from train.batch.packed import PackedBatch, Rollout
from train.config.algorithms import AlgorithmConfig
from train.config.training import TrainConfig
from train.data.samples import Informative


def algorithm(name: str, **settings: float | bool) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"name": name, **settings})


def rollouts(*groups: list[float], equal: bool = False) -> list[Rollout]:
    """Groups of responses with these rewards, each of other tokens unless they are ``equal``."""
    return [
        Rollout([3], [4 if equal else 4 + i, 5], [0.0, 0.0], reward, group)
        for group, rewards in enumerate(groups)
        for i, reward in enumerate(rewards)
    ]


def kept(config: AlgorithmConfig, of: list[Rollout]) -> list[tuple[int, int, float]]:
    return [(r.group, r.response[0] - 4, r.reward) for r in load(config).kept(of)]


def test_the_first_of_the_best_of_each_group_is_learned() -> None:
    drawn = rollouts([0.2, 0.9, 0.9], [0.0, -1.0], [0.5])
    assert kept(algorithm("best_of_n"), drawn) == [(0, 1, 0.9), (1, 0, 0.0), (2, 0, 0.5)]
    assert kept(algorithm("best_of_n", min_reward=0.6), drawn) == [(0, 1, 0.9)]


def test_what_is_good_enough_is_learned_and_of_equal_responses_to_a_prompt_one() -> None:
    drawn = rollouts([0.2, 1.0, 1.0, 2.0], [0.0, 0.99], [1.0])
    assert kept(algorithm("rejection_sampling"), drawn) == [(0, 1, 1.0), (0, 2, 1.0), (0, 3, 2.0), (2, 0, 1.0)]
    assert len(load(algorithm("rejection_sampling", min_reward=0.1)).kept(drawn)) == 6
    equal = rollouts([1.0, 1.0], [1.0, 0.0], equal=True)
    assert load(algorithm("rejection_sampling")).kept(equal) == [equal[0], equal[2]]


def test_episodes_that_end_alike_are_equal_only_if_they_went_alike() -> None:
    """As where a template takes what was thought out of the turns before the last."""
    thoughts = [Rollout([3], [thought, 5], [0.0, 0.0], 1.0, 0) for thought in (7, 8, 7)]
    episodes = [Rollout([3, 5], [4, 5], [0.0, 0.0], 1.0, 0, earlier=(thought,)) for thought in thoughts]
    assert load(algorithm("rejection_sampling")).kept(episodes) == episodes[:2]


def test_a_group_of_equal_rewards_has_no_best_one_unless_all_are_kept() -> None:
    groups = rollouts([1.0, 1.0], [0.0, 1.0])
    for config, count in ((algorithm("best_of_n"), 1), (algorithm("best_of_n", filter_groups=False), 2)):
        found = Informative.of(groups, config.lone_baseline, filter_groups=config.filter_groups)
        assert len(load(config).kept(found.rollouts)) == count


@pytest.mark.parametrize("name", ["best_of_n", "rejection_sampling"])
def test_the_loss_is_that_of_sft(name: str) -> None:
    batch = PackedBatch.pack(rollouts([1.0], [1.0]))
    learned, sft = load(algorithm(name)), load(algorithm("sft"))
    batch = batch.with_(advantages=learned.checked_advantages(batch))
    log_probs = torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5, -0.25])
    assert float(learned.loss(log_probs, batch)[0]) == float(sft.loss(log_probs, batch)[0]) == 3.75
    assert learned.count(batch) == sft.count(batch) == 4


def test_settings_that_mean_nothing_to_them_are_refused() -> None:
    for settings, message in (
        ({"name": "best_of_n", "group_size": 1}, r"group_size=1 gives best_of_n nothing to compare"),
        ({"name": "best_of_n", "lone_baseline": "batch"}, r"lone_baseline=batch: best_of_n learns the best of several"),
        ({"name": "rejection_sampling", "min_reward": None}, r"min_reward=null: rejection_sampling learns what has"),
        ({"name": "rejection_sampling", "resample_rounds": 1}, r"resample_rounds=1: rejection_sampling does not read"),
        ({"name": "best_of_n", "clip_low": 0.1}, r"clip_low=0\.1: best_of_n does not read it"),
        (
            {"name": "grpo", "min_reward": 0.5},
            r"min_reward=0\.5: grpo does not read it \(best_of_n, ",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            TrainConfig.model_validate({"algorithm": settings})
    few = {"ranks": 4, "data": {"prompts_per_step": 3}, "algorithm": {"name": "best_of_n"}}
    with pytest.raises(ValueError, match=r"prompts_per_step=3 is too little .* use at least 4 prompts"):
        TrainConfig.model_validate(few)
    cut = {"rollout": {"top_p": 0.9}, "algorithm": {"name": "rejection_sampling", "group_size": 1}}
    assert TrainConfig.model_validate(cut).rollout.top_p == 0.9
