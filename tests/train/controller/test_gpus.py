"""Which GPUs and how much shared memory the pools of a training get, as far as a machine without GPUs can tell."""

from __future__ import annotations

import pytest

from serve.kv_cache import machine_memory
from train.config.training import TrainConfig
from train.controller.worker_group import WorkerError
from train.launch import object_store_bytes
from train.workers.role_groups import environment, gpus_by_pool
from train.workers.rollout import all_reduce_off

APART = {"pools": {"training": {"ranks": 8}, "rewards": {"ranks": 1}}, "reward": "rewards"}
APART |= dict.fromkeys(("actor", "reference", "rollout"), "training")


def config(**pools: dict[str, int]) -> TrainConfig:
    placement = APART | {"pools": APART["pools"] | pools}  # type: ignore[operator]
    return TrainConfig.model_validate({"ranks": 8, "placement": placement})


@pytest.mark.parametrize(
    ("available", "expected"),
    [(0, {"training": 0, "rewards": 0}), (8, {"training": 1, "rewards": 0}), (9, {"training": 1, "rewards": 1})],
)
def test_what_is_trained_gets_gpus_before_rewards_do(available: int, expected: dict[str, int]) -> None:
    assert gpus_by_pool(config(), available) == expected


def test_a_pools_own_number_is_taken_as_it_is_and_counts() -> None:
    assert gpus_by_pool(config(rewards={"ranks": 1, "gpus": 1}), 9) == {"training": 1, "rewards": 1}
    assert gpus_by_pool(config(training={"ranks": 8, "gpus": 0}), 4) == {"training": 0, "rewards": 1}


def test_rays_object_store_holds_a_steps_batch_twice_and_no_more_than_a_quarter_of_the_memory() -> None:
    def of(prompts: int, tokens: int) -> int:
        return object_store_bytes(
            TrainConfig.model_validate(
                {"data": {"prompts_per_step": prompts}, "rollout": {"max_model_len": tokens, "max_tokens": tokens - 1}}
            )
        )

    assert of(32, 768) == 256 * 2**20
    assert of(256, 2048) == 2 * 64 * 256 * 8 * 2048 > 256 * 2**20
    assert of(2**20, 2**20) == machine_memory() // 4


@pytest.mark.parametrize("rewards", [{"ranks": 1}, {"ranks": 1, "gpus": 1}])
def test_too_few_gpus_are_refused_and_never_shared(rewards: dict[str, int]) -> None:
    with pytest.raises(WorkerError, match=r"the 8 ranks of pool training: lower train.ranks"):
        gpus_by_pool(config(rewards=rewards), 7 + rewards.get("gpus", 0))


def test_an_engine_sums_by_nccl_where_a_rank_does_not_see_the_devices_of_the_others() -> None:
    assert all_reduce_off("ray", 2, 1)
    assert all_reduce_off("ray", 2, 2), "two devices of a rank (train.placement's gpus) are not the other rank's"
    assert all_reduce_off("torchrun", 4, 2)
    assert not all_reduce_off("torchrun", 2, 8)
    assert not all_reduce_off("ray", 1, 1), "there is nothing to sum"


@pytest.mark.parametrize(("fsdp", "off"), [({}, True), ({"compile_layers": "aot_eager"}, False)])
def test_layers_that_are_to_be_compiled_are_compiled_beside_an_engine_that_is_not(
    fsdp: dict[str, str], off: bool
) -> None:
    config = TrainConfig.model_validate({"fsdp": fsdp, "rollout": {"enforce_eager": True}})
    assert ("TORCHDYNAMO_DISABLE" in environment(config)) == off
