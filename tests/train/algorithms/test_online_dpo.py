"""Online DPO: which responses make a pair, and that its loss is DPO's on them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from train.algorithms import load
from train.batch.packed import PackedBatch, Rollout
from train.config.algorithms import AlgorithmConfig
from train.config.training import TrainConfig

ONLINE_DPO = load(AlgorithmConfig.model_validate({"name": "online_dpo", "beta": 0.5}))


def batch_of(*groups: list[float]) -> PackedBatch:
    """Groups of responses of two tokens with these rewards."""
    rollouts = [
        Rollout([3], [4, 5], [0.0, 0.0], reward, group=group)
        for group, rewards in enumerate(groups)
        for reward in rewards
    ]
    batch = PackedBatch.pack(rollouts).with_(whole_groups=True)
    return batch.with_(advantages=ONLINE_DPO.checked_advantages(batch))


def test_the_best_response_of_a_group_is_preferred_to_its_worst_and_the_first_of_equals_counts() -> None:
    batch = batch_of([0.2, 0.9, 0.1, 0.9], [0.5, 0.5], [0.0, 1.0])
    chosen, rejected = ONLINE_DPO.pairs(batch)  # type: ignore[attr-defined]
    assert chosen.tolist() == [1, 7]
    assert rejected.tolist() == [2, 6]
    assert ONLINE_DPO.count(batch) == 2


def test_the_loss_is_that_of_dpo_on_those_pairs() -> None:
    batch = batch_of([0.2, 0.9, 0.1])
    log_probs = torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5, -0.25, 0.0, -3.0, -1.0])
    reference = torch.tensor([0.0, -1.0, -1.0, 0.0, -1.0, -1.0, 0.0, -1.0, -1.0])
    loss, logged = ONLINE_DPO.loss(log_probs, batch.with_(ref_log_probs=reference))
    h = (-0.75 + 2.0) - (-4.0 + 2.0)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-0.5 * h)))
    assert logged["margin"].tolist() == pytest.approx([0.5 * h])


def test_a_pair_of_which_one_response_is_left_out_is_none() -> None:
    batch = batch_of([0.0, 1.0], [1.0, 0.0])
    kept = batch.select(torch.tensor([0, 2, 3]))
    chosen, rejected = ONLINE_DPO.pairs(kept)  # type: ignore[attr-defined]
    assert (chosen.tolist(), rejected.tolist()) == ([1], [2])


def test_groups_are_kept_whole_on_ranks_and_in_micro_batches() -> None:
    batch = batch_of(*[[float(i), 0.5, -1.0] for i in range(6)])
    for micro in batch.micro_batches(9):
        part = batch.select(micro)
        assert all(int((part.groups == group).sum()) == 3 for group in part.groups.unique())


def test_it_samples_needs_the_parent_and_leaves_out_groups_of_equal_rewards() -> None:
    config = TrainConfig.model_validate({"algorithm": {"name": "online_dpo"}, "measure_kl": False})
    assert (config.samples, config.has_reference, config.algorithm.filter_groups) == (True, True, True)
    with pytest.raises(ValueError, match=r"clip_low=0\.1: online_dpo does not read it"):
        AlgorithmConfig.model_validate({"name": "online_dpo", "clip_low": 0.1})
    with pytest.raises(ValueError, match="group_size=1"):
        TrainConfig.model_validate({"algorithm": {"name": "online_dpo", "group_size": 1}})
    assert replace(batch_of([0.0, 1.0]), whole_groups=True).whole_groups
