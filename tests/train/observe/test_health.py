"""What is watched in a step, and what ends a run."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch

from train.batch.packed import PackedBatch, Rollout
from train.config.training import TrainConfig
from train.context import JobContext, JobResult, TrainingStopped
from train.data.samples import Scored
from train.job import ended_early
from train.observe.health import Drawn, check_health, health

WELL = {"reward": 0.5, "kl_ref": 0.01, "entropy": 1.0, "response_length": 20.0, "tokens": 100.0, "seconds": 1.0}


def rollout(reward: float, length: int, *, group: int = 0, fresh: bool = True, truncated: bool = False) -> Rollout:
    return Rollout([1, 2], [3] * length, [-1.0] * length, reward, group, truncated=truncated, fresh=fresh)


def scored(*rollouts: Rollout, **components: list[float]) -> Scored:
    return Scored(list(rollouts), [r.reward for r in rollouts], components, [0.0] * len(rollouts))


def batch_of(rollouts: list[Rollout], old: float, ref: float | None = None) -> PackedBatch:
    batch = PackedBatch.pack(rollouts)
    filled = {"old_log_probs": torch.full((len(batch.tokens),), old)}
    return batch.with_(
        **filled, **({} if ref is None else {"ref_log_probs": torch.full_like(filled["old_log_probs"], ref)})
    )


# -------------------------------------------------------------------------------------------------------- numbers


def test_rewards_and_lengths_are_of_all_fresh_responses_also_of_those_that_teach_nothing() -> None:
    fresh = scored(rollout(0, 2), rollout(1, 4), rollout(1, 6, group=1, truncated=True), length=[2.0, 4.0], exact=[1.0])
    logged = [rollout(9, 3, group=2, fresh=False)]
    metrics = health(Drawn(fresh, logged, fresh.rollouts[:2], 1, 1), None, [])
    expected = {"reward": 2 / 3, "reward/length": 3.0, "reward/exact": 1.0, "reward_traffic": 9.0}
    expected |= {"response_length": 4.0, "truncated_fraction": 1 / 3, "responses": 3, "traffic_responses": 1}
    expected |= {"learned_responses": 2}
    expected |= {"uninformative_groups": 1, "uninformative_fraction": 1 / 3, "lone_left_out": 1, "tokens": 0}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert all(map(math.isfinite, metrics.values()))


def test_a_step_of_logged_responses_alone_has_their_reward_and_no_number_of_samples() -> None:
    logged = [rollout(1, 3, fresh=False), rollout(2, 5, fresh=False)]
    batch = batch_of(logged, old=-1.5, ref=-1.0)
    metrics = health(Drawn(Scored(), logged, logged), batch, [{"entropy": 1.0}])
    assert (metrics["reward"], metrics["learned_length"]) == (1.5, 4.0)
    assert metrics["kl_behaviour"] == pytest.approx(0.5)
    assert metrics["kl_ref"] == pytest.approx(1 - 1.5 * math.exp(-0.5)), "weighed: they are not the policy's samples"
    assert not {"response_length", "logprob_difference_mean", "reward_traffic"} & metrics.keys()
    assert all(map(math.isfinite, metrics.values()))


def test_kl_to_the_reference_is_measured_on_fresh_tokens_and_to_the_behaviour_on_all() -> None:
    rollouts = [rollout(1, 2), rollout(0, 2, group=1, fresh=False)]
    batch = batch_of(rollouts, old=-1.2, ref=-1.0)
    metrics = health(Drawn(scored(rollouts[0]), rollouts[1:], rollouts), batch, [{"loss": 1.0}, {"loss": 3.0}])
    assert metrics["kl_ref"] == pytest.approx(1 - 1.2 * math.exp(-0.2), rel=1e-4)
    assert metrics["kl_behaviour"] == pytest.approx(0.2, rel=1e-4)
    assert metrics["logprob_difference_mean"] == pytest.approx(0.2, rel=1e-4)
    assert (metrics["loss"], metrics["updates"], metrics["learned_responses"]) == (2.0, 2, 2)


# ---------------------------------------------------------------------------------------------------------- bounds


def check(*steps: dict[str, float], **settings: Any) -> None:
    check_health(TrainConfig.model_validate(settings), list(steps))


@pytest.mark.parametrize(
    ("last", "settings", "message"),
    [
        ({"loss": math.nan}, {}, "step 1: loss is nan; nothing is published"),
        ({"grad_norm": math.inf}, {}, "step 1: grad_norm is inf; nothing is published"),
        ({"kl_ref": 0.3}, {"max_kl": 0.2}, "step 1: KL to the parent policy 0.3000 passed train.max_kl=0.2"),
        (
            {"kl_ref_at_end": 0.3},
            {"max_kl": 0.2},
            "step 1: after the last update, KL to the parent policy 0.3000 passed train.max_kl=0.2",
        ),
        ({"k2_ref": 0.3}, {"max_kl": 0.2}, "of the tokens learned from, 0.3000 passed train.max_kl=0.2"),
        ({"entropy": 0.01}, {"min_entropy": 0.05}, "entropy 0.01 fell below train.min_entropy=0.05 nats"),
    ],
)
def test_a_number_out_of_bounds_ends_the_run_and_the_reason_names_the_setting(
    last: dict[str, float], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingStopped, match=re.escape(message)):
        check(WELL | last, **settings)
    check(WELL, **settings)


def test_responses_many_times_as_long_as_in_the_first_steps_end_the_run() -> None:
    first = [WELL | {"response_length": length} for length in (10.0, 20.0, 30.0)]
    check(*first, WELL | {"response_length": 200.0})
    with pytest.raises(
        TrainingStopped, match=r"responses of 201\.0 tokens are 10\.1 times .* train\.max_length_growth=10"
    ):
        check(*first, WELL | {"response_length": 201.0})
    check(*first, WELL | {"response_length": 900.0}, max_length_growth=None)
    check(WELL | {"response_length": 1.0}, WELL | {"response_length": 100.0})


def test_the_numbers_of_a_dataflow_that_measures_other_things_are_well() -> None:
    check({"loss": 0.3, "tokens": 9.0}, {"loss": 0.2, "tokens": 9.0}, max_kl=1.0, min_entropy=0.1)


def test_steps_without_an_update_go_on_until_there_are_too_many_in_a_row() -> None:
    idle = {"reward": 1.0, "uninformative_fraction": 1.0, "tokens": 0.0}
    check(WELL, *[idle] * 2, max_idle_steps=3)
    check(*[idle] * 2, WELL, *[idle] * 2, max_idle_steps=3)
    with pytest.raises(TrainingStopped, match=r"step 4: 3 steps in a row made no update .*same reward.*group_size"):
        check(WELL, *[idle] * 3, max_idle_steps=3)


def test_a_run_of_which_no_step_made_an_update_publishes_nothing() -> None:
    idle = {"reward": 1.0, "tokens": 0.0}
    check(idle, steps=2)
    with pytest.raises(TrainingStopped, match="2 steps in a row made no update"):
        check(idle, idle, steps=2)


def test_a_run_that_was_stopped_leaves_its_reason_and_numbers_that_json_can_hold(tmp_path: Any) -> None:
    context = JobContext(run="r", runs=tmp_path, policies=tmp_path, reward_models=tmp_path, lake_uri="", reward="a:b")

    class Parent:
        version = 4

    nan = TrainingStopped("step 1: loss is nan")
    result = ended_early(context, Parent(), [WELL, WELL | {"loss": math.nan}], nan)  # type: ignore[arg-type]
    there = JobResult.model_validate(json.loads(result.model_dump_json()))
    assert (there.candidate, there.parent, there.steps, there.reason) == (None, 4, 2, "step 1: loss is nan")
    assert there.stopped
    assert there.metrics == WELL
    assert there.seconds == 2.0
