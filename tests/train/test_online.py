"""The parts of the online dataflow that need no worker: what a step draws, leaves out, and splits."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from feedback.datasets import Prompt
from train.batch.packed import PackedBatch, Rollout
from train.config.training import TrainConfig
from train.context import JobContext
from train.data.prompts import Cycled, TrainingData
from train.data.rewards import Rewards
from train.data.samples import Scored
from train.dataflows.base import Run
from train.dataflows.online import Online
from train.observe.progress import StepTimer

CONTEXT = JobContext(run="r", runs=Path(), policies=Path(), reward_models=Path(), lake_uri="")


def online(prompts: int = 12, logged: list[list[Rollout]] | None = None, **settings: Any) -> Online:
    config = TrainConfig.model_validate({"data": {"prompts_per_step": 4}, **settings})
    asked = Cycled([Prompt(None, None, [i]) for i in range(prompts)], config.data.fresh_prompts_per_step, "1")
    traffic = Cycled(logged or [], config.data.traffic_prompts_per_step, "1")
    return Online(
        Run(config, CONTEXT, None, TrainingData(asked, traffic, "", 0, ""), 1, StepTimer(), lambda step, answers: {})
    )  # type: ignore[arg-type]


def groups(*rewards: list[float], fresh: bool = True) -> list[Rollout]:
    return [Rollout([1], [2], [0.0], r, i, fresh=fresh) for i, of_group in enumerate(rewards) for r in of_group]


def numbers(prompts: list[Prompt]) -> list[int]:
    return [prompt.prompt_token_ids[0] for prompt in prompts]


def test_further_rounds_of_a_step_ask_other_prompts_and_the_same_ones_when_the_run_goes_on() -> None:
    flow = online(algorithm={"resample_rounds": 2})
    rounds = [numbers(flow.prompts_of(5, again)) for again in range(3)]
    assert sorted(chain(*rounds)) == list(range(12))
    assert rounds == [numbers(online(algorithm={"resample_rounds": 2}).prompts_of(5, again)) for again in range(3)]


def test_with_no_further_rounds_every_prompt_is_asked_before_any_comes_again() -> None:
    flow = online()
    assert sorted(chain(*(numbers(flow.prompts_of(step, 0)) for step in range(3)))) == list(range(12))


def test_groups_that_teach_nothing_and_those_beyond_the_wanted_are_left_out() -> None:
    fresh = groups([1, 1], [0, 1], [0, 1], [1, 0], [0, 0], [0, 1], [0, 1])
    drawn = online(algorithm={"resample_rounds": 1}).select(Scored(fresh), [])
    assert sorted({r.group for r in drawn.rollouts}) == [1, 2, 3, 5]
    assert drawn.uninformative_groups == 2
    assert "of 7 groups, 2 have equal rewards" in str(drawn)


def test_groups_of_equal_rewards_stay_where_the_paper_has_them() -> None:
    fresh = groups([1, 1], [0, 1], [0, 0])
    for name in ("grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp_baseline"):
        drawn = online(algorithm={"name": name}).select(Scored(fresh), [])
        assert (drawn.rollouts, drawn.uninformative_groups) == (fresh, 2), name
    drawn = online(algorithm={"name": "dapo"}).select(Scored(fresh), [])
    assert {r.group for r in drawn.rollouts} == {1}
    assert online().select(Scored(groups([1, 1], [0, 0])), []).rollouts == [], "nothing to learn is no update"


def test_an_algorithm_that_compares_no_groups_learns_from_all() -> None:
    fresh = groups([1, 1], [0], [1])
    drawn = online(algorithm={"name": "reinforce_pp"}).select(Scored(fresh), [])
    assert drawn.rollouts == fresh


def test_logged_groups_are_numbered_on_from_the_fresh_ones() -> None:
    lone = groups([0.5], fresh=False)
    flow = online(logged=[lone], data={"prompts_per_step": 4, "traffic_share": 0.25})
    assert [(r.group, r.fresh) for r in flow.logged(0, Scored(groups([0, 1], [1, 0])))] == [(2, False)]


@pytest.mark.parametrize(("left", "parts"), [(4, 4), (3, 3), (2, 2), (1, 1)])
def test_a_step_with_few_groups_left_makes_as_many_updates_as_all_ranks_can_share(left: int, parts: int) -> None:
    flow = online(ranks=2, minibatches=4)
    batch = PackedBatch.pack(groups(*[[0.0, 1.0]] * left))
    made = flow.minibatches(batch, 0, 0)
    assert len(made) == parts
    assert all(len(minibatch) >= 2 for minibatch in made)
    assert sum(map(len, made)) == len(batch)


def test_a_minibatch_is_never_too_small_for_the_ranks() -> None:
    flow = online(ranks=4, minibatches=4, algorithm={"group_size": 4})
    batch = PackedBatch.pack(groups([0, 1, 1], [0, 1, 1], [0, 1, 1]))
    assert [len(minibatch) for minibatch in flow.minibatches(batch, 0, 0)] == [9]


class Recorder:
    """An actor whose logprobs are as many nats as it has made updates."""

    def __init__(self) -> None:
        self.updates: list[PackedBatch] = []

    def log_probs(self, batch: PackedBatch) -> torch.Tensor:
        return torch.full((len(batch.tokens),), float(len(self.updates)))

    def update(self, batch: PackedBatch, *, kl_coefficient: float) -> dict[str, float]:
        self.updates.append(batch)
        return {"loss": float(len(self.updates))}


def test_every_epoch_is_of_all_minibatches_and_measured_from_the_policy_before_the_first() -> None:
    flow, actor = online(minibatches=2, epochs=3), Recorder()
    flow.run.groups = SimpleNamespace(actor=actor, critic=None, reference=None)  # type: ignore[assignment]
    batch, updates = flow.learn(0, flow.log_probs(PackedBatch.pack(groups([0, 1], [0, 1], [0, 1], [0, 1]))))
    parts = [sorted(part.groups.tolist()) for part in actor.updates]
    assert [sorted(a + b) for a, b in zip(parts[::2], parts[1::2], strict=True)] == [[0, 0, 1, 1, 2, 2, 3, 3]] * 3
    assert [update["loss"] for update in updates] == [1, 2, 3, 4, 5, 6]
    assert all(part.old_log_probs is not None and not part.old_log_probs.any() for part in (batch, *actor.updates))


def test_minibatches_are_shuffled_anew_in_every_epoch_and_the_same_when_the_run_goes_on() -> None:
    batch = PackedBatch.pack(groups(*[[0.0, 1.0]] * 12))

    def parts(step: int, epoch: int) -> list[list[int]]:
        made = online(minibatches=3).minibatches(batch, step, epoch)
        return [part.groups.unique().tolist() for part in made]

    drawn = [parts(step, epoch) for step in range(2) for epoch in range(3)]
    assert drawn == [parts(step, epoch) for step in range(2) for epoch in range(3)]
    assert len({str(minibatches) for minibatches in drawn}) == 6
    assert all(sorted(chain(*minibatches)) == list(range(12)) for minibatches in drawn)
    assert [list(range(4)), list(range(4, 8)), list(range(8, 12))] not in drawn


def test_masked_truncated_responses_are_compared_with_the_others_and_not_learned_from() -> None:
    actor = Recorder()
    flow = online(minibatches=2, algorithm={"name": "dr_grpo", "mask_truncated": True})
    flow.run.groups = SimpleNamespace(actor=actor, critic=None, reference=None)  # type: ignore[assignment]
    cut = [replace(r, truncated=r.reward == 3) for r in groups([0, 3], [1, 3], [0, 1])]
    batch, _ = flow.learn(0, flow.log_probs(PackedBatch.pack(cut)))
    assert sorted(batch.rewards.tolist()) == [0, 0, 1, 1]
    assert batch.advantages is not None
    assert sorted(batch.advantages[batch.response_mask].tolist()) == [-1.5, -1.0, -0.5, 0.5]
    assert sum(len(part) for part in actor.updates) == 4
    all_cut = PackedBatch.pack([replace(r, truncated=True) for r in cut])
    assert flow.learn(0, flow.log_probs(all_cut))[1] == []
    assert len(actor.updates) == 2


@pytest.mark.parametrize(("minibatches", "epochs", "first"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_logprobs_are_asked_for_before_learning_where_there_is_more_than_one_update(
    minibatches: int, epochs: int, first: bool
) -> None:
    assert TrainConfig(minibatches=minibatches, epochs=epochs).old_log_probs_first == first


def test_the_weight_of_the_kl_follows_the_kl_and_waits_where_it_was_not_measured() -> None:
    flow = online(algorithm={"kl": {"coefficient": 0.1, "target": 0.01}})
    assert flow.adapt_kl({"kl_ref": 0.02}) == {"kl_coefficient": 0.1}
    assert flow.algorithm.kl_coefficient == pytest.approx(0.102)
    flow.adapt_kl({})
    assert flow.state()["kl_coefficient"] == flow.algorithm.kl_coefficient == pytest.approx(0.102)
    assert online().adapt_kl({"kl_ref": 0.02}) == {}


def test_rewards_of_consecutive_rows_are_joined_by_component() -> None:
    parts = [
        Rewards([1.0, None], {"a": [1.0, None]}, {"a": [None, "why"]}),
        Rewards([2.0], {"a": [2.0]}, {"a": [None]}, [[0.5, 1.5]]),
    ]
    joined = Rewards([1.0, None, 2.0], {"a": [1.0, None, 2.0]}, {"a": [None, "why", None]}, [None, None, [0.5, 1.5]])
    assert Rewards.joined(parts) == joined
    assert Rewards.joined(parts[:1]) == parts[0]
    assert Rewards.joined([joined.row(number) for number in range(3)]) == joined
