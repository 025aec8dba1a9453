"""Which settings a plan chooses, and what it says where nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve.config import EngineConfig, SwapConfig
from tests.train.planner.public_configs import write
from train.batch.packed import PackedBatch, Rollout
from train.config.training import TrainConfig
from train.planner.machine import parse_gpus
from train.planner.model_shape import ModelNotPlanned, models_of, read_config
from train.planner.plan import (
    Models,
    NothingFits,
    Workload,
    candidates,
    choose,
    faster_machine,
    fitting_machines,
    micro_batches,
    plan,
    serving,
)
from train.planner.sizes import GIB, Activations, Batch

WORK = Workload(prompts=64, group_size=8, prompt_tokens=512, response_tokens=1024)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("Qwen2.5-7B", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def models(qwen: Path) -> Models:
    return models_of(read_config(qwen), TrainConfig(), "cuda")


def config(**settings: Any) -> TrainConfig:
    return TrainConfig.model_validate(settings)


def test_what_is_chosen_fits_and_what_does_not_is_left(models: Models) -> None:
    machine = parse_gpus("8x80GB")
    found = choose(config(), models, machine, WORK)
    assert found.fits
    assert found.config.ranks == 8
    assert not found.config.fsdp.cpu_offload  # it is slower, and not needed
    assert [phase.name for phase in found.phases] == ["generate", "weight sync", "reference log_probs", "actor update"]
    whole = plan(found.config.model_copy(update={"micro_batch_tokens": 65536}), models, machine, WORK)
    assert not whole.fits


@pytest.mark.parametrize("gpus", ["8x80GB", "2x40GB", "4x24GB"])
@pytest.mark.parametrize("settings", [{}, {"rollout": {"backend": "hf"}}, {"algorithm": {"name": "sft"}}])
def test_what_is_chosen_is_the_best_of_all_that_there_is_to_choose_from(
    models: Models, settings: dict[str, Any], gpus: str
) -> None:
    open_, machine = config(**settings), parse_gpus(gpus)
    work = Workload.of(open_, 512)
    plans = [plan(candidate, models, machine, work) for candidate in candidates(open_, models, machine, work)]
    fitting = [each for each in plans if each.fits]
    assert fitting
    assert choose(open_, models, machine, work) == min(fitting, key=lambda p: (round(p.seconds, 2), p.peak.bytes))


def test_only_settings_that_may_be_the_fastest_are_traced(models: Models) -> None:
    traced: set[tuple[Batch, int]] = set()

    def counted(trace: Callable[[Batch, int], Activations]) -> Callable[[Batch, int], Activations]:
        def call(batch: Batch, slices: int = 1, /) -> Activations:
            traced.add((batch, slices))
            return trace(batch, slices)

        return call

    policy = replace(models.policy, trace=counted(models.policy.trace))
    choose(config(), replace(models, policy=policy, actor=policy), parse_gpus("8x80GB"), WORK)
    assert 0 < len(traced) <= 10  # of the 26 batches and slices that there are to choose from


def test_less_memory_is_answered_by_checkpointing_or_offload(models: Models) -> None:
    found = choose(config(), models, parse_gpus("2x40GB"), WORK)
    assert found.fits
    assert found.config.fsdp.cpu_offload
    # Weights, gradients and two moments of both ranks, and the reference's weights.
    assert found.host_bytes == pytest.approx((16 + 2) * models.policy.shape.parameters, rel=1e-6)


def test_generation_by_transformers_holds_no_weights_of_its_own_and_shares_no_layer(models: Models) -> None:
    machine = parse_gpus("8x80GB")
    found = choose(config(rollout={"backend": "hf"}), models, machine, WORK)
    generate = found.phases[0]
    assert [phase.name for phase in found.phases] == ["generate", "reference log_probs", "actor update"]
    assert "rollout weights" not in generate.memory
    assert 0 < generate.memory["actor unsharded"] < 2 * models.policy.shape.parameters
    assert (found.config.fsdp.tensor_parallel, found.config.rollout.tensor_parallel_size) == (1, 1)
    by_vllm = plan(found.config.model_copy(update={"rollout": config().rollout}), models, machine, WORK)
    assert generate.cost.seconds > by_vllm.phases[0].cost.seconds


def test_what_is_set_stays(models: Models) -> None:
    settings = config(
        micro_batch_tokens=4096, activation_checkpointing=True, ranks=4, rollout={"tensor_parallel_size": 4}
    )
    found = choose(settings, models, parse_gpus("8x80GB"), WORK).config
    assert (found.micro_batch_tokens, found.activation_checkpointing) == (4096, True)
    assert (found.ranks, found.rollout.tensor_parallel_size) == (4, 4)


def test_ranks_share_sequences_where_responses_are_long(models: Models) -> None:
    machine, long = parse_gpus("8x80GB"), Workload(prompts=8, group_size=4, prompt_tokens=1024, response_tokens=8192)
    found = choose(config(), models, machine, long)
    assert found.config.fsdp.sequence_parallel == 4
    alone = choose(config(fsdp={"sequence_parallel": 1}), models, machine, long)
    assert alone.seconds > found.seconds
    longer = replace(long, response_tokens=250_000)
    assert choose(config(), models, machine, longer).config.fsdp.sequence_parallel > 1
    with pytest.raises(NothingFits, match="most of it is actor activations"):
        choose(config(fsdp={"sequence_parallel": 1}), models, machine, longer)
    assert choose(config(), models, machine, WORK).config.fsdp.sequence_parallel == 1
    TrainConfig.model_validate(found.config.model_dump())


def test_each_node_holds_the_model_where_the_network_between_them_is_slow(models: Models) -> None:
    nodes = replace(parse_gpus("32x80GB"), network=2e9)
    found = choose(config(), models, nodes, WORK)
    assert found.config.fsdp.replicas == 4
    whole = choose(config(fsdp={"replicas": 1}), models, nodes, WORK)
    assert whole.seconds > found.seconds
    sync = {p.config.fsdp.replicas: next(x for x in p.phases if x.name == "weight sync") for p in (found, whole)}
    assert sync[4].cost.moved < sync[1].cost.moved, "an engine's rank lacks less of its slice, and a neighbour has it"
    assert choose(config(), models, parse_gpus("8x80GB"), WORK).config.fsdp.replicas == 1
    assert choose(config(), models, replace(nodes, network=nodes.link), WORK).config.fsdp.replicas == 1
    TrainConfig.model_validate(found.config.model_dump())


def test_an_optimizer_that_does_not_fit_waits_in_the_hosts_memory(models: Models) -> None:
    machine = parse_gpus("8x48GB")
    found = choose(config(), models, machine, WORK)
    assert found.fits
    assert found.config.fsdp.offload_optimizer
    assert not found.config.fsdp.cpu_offload
    assert found.host_bytes >= 8 * models.policy.shape.parameters
    all_of_it = choose(config(fsdp={"offload_optimizer": False}), models, machine, WORK)
    assert all_of_it.config.fsdp.cpu_offload
    assert all_of_it.seconds > found.seconds
    assert not choose(config(), models, parse_gpus("8x141GB"), WORK).config.fsdp.offload_optimizer
    TrainConfig.model_validate(found.config.model_dump())


def test_the_next_better_machine_is_named_where_a_step_takes_less_on_it(models: Models) -> None:
    settings, found = config(ranks=8), {}
    for gpus in ("8xA100", "8xH100", "8xH200"):
        better = faster_machine(settings, models, choose(settings, models, parse_gpus(gpus), WORK), WORK)
        found[gpus] = better and better.machine.name
        assert better is None or (better.machine.devices, better.config.ranks) == (8, 8)
    assert found == {"8xA100": "H100-80", "8xH100": "H200", "8xH200": None}
    other = replace(parse_gpus("8xH100"), bandwidth=9e12)  # quicker than any preset at something
    assert faster_machine(settings, models, choose(settings, models, other, WORK), WORK) is None


def test_where_nothing_fits_it_says_by_how_much_and_what_would(models: Models) -> None:
    machine, settings = parse_gpus("1x40GB"), config(fsdp={"cpu_offload": False})
    with pytest.raises(
        NothingFits, match=r"on 1 x 40GB: .* needs \d+\.\d GiB of a device's .* too many; most of it is"
    ):
        choose(settings, models, machine, WORK)
    larger = [
        (found.machine.devices, found.machine.memory // GIB)
        for found in fitting_machines(settings, models, machine, WORK)
    ]
    assert larger[0][0] in (4, 8)
    assert larger[1][0] == 1
    assert larger[1][1] > 120  # 12 bytes a parameter are 85 GiB


def test_adapters_share_the_reference_and_need_a_fraction(tmp_path: Path) -> None:
    few_layers = read_config(write("Qwen2.5-7B", tmp_path, num_hidden_layers=2))
    plain, adapters = (config(ranks=8, **lora) for lora in ({}, {"lora": {"rank": 16}}))
    full, adapted = (plan(c, models_of(few_layers, c, "cuda"), parse_gpus("8x80GB"), WORK) for c in (plain, adapters))
    assert not any(name.startswith("reference") for phase in adapted.phases for name in phase.memory)
    held = sum(adapted.phases[-1].memory[f"actor {use}"] for use in ("weights", "optimizer"))
    assert held < 0.2 * sum(full.phases[-1].memory[f"actor {use}"] for use in ("weights", "optimizer"))


def test_adapters_alone_move_after_a_step_and_take_a_slot_beside_the_weights(tmp_path: Path) -> None:
    few_layers = read_config(write("Qwen2.5-7B", tmp_path, num_hidden_layers=2))
    found = {}
    for sync in ("merged", "adapters"):
        settings = config(ranks=8, lora={"rank": 16, "sync": sync})
        of = models_of(few_layers, settings, "cuda")
        found[sync] = next(p for p in plan(settings, of, parse_gpus("8x80GB"), WORK).phases if p.name == "weight sync")
    adapters = of.actor.shape.kinds["adapters"]
    assert found["adapters"].cost.moved == int(2 * adapters * 7 / 8)
    assert found["adapters"].cost.moved < found["merged"].cost.moved / 20
    slots = found["adapters"].memory["rollout weights"] - found["merged"].memory["rollout weights"]
    assert slots == 2 * 2 * adapters


def test_weights_of_four_bits_under_adapters_take_a_quarter_and_are_gathered_so(tmp_path: Path) -> None:
    few_layers = read_config(write("Qwen2.5-7B", tmp_path, num_hidden_layers=2))
    found = {}
    for base in (None, "nf4"):
        settings = config(ranks=8, lora={"rank": 16, "base": base})
        found[base] = plan(settings, models_of(few_layers, settings, "cuda"), parse_gpus("8x80GB"), WORK)
    of_layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944  # its seven projections, all with adapters
    saved = 2 * of_layer * (2 - (1 / 2 + 1 / 64 + 2 / (64 * 256))) / 8
    weights = [found[base].phases[-1].memory["actor weights"] for base in (None, "nf4")]
    assert weights[0] - weights[1] == pytest.approx(saved, rel=1e-3)
    assert found["nf4"].phases[-1].cost.moved < found[None].phases[-1].cost.moved, "less is gathered"


@pytest.mark.parametrize(
    "settings", [{"lora": {"rank": 16, "base": "nf4"}}, {"fp8": {"training": "rowwise"}, "dtype": "bfloat16"}]
)
def test_no_plan_is_made_that_the_settings_refuse(qwen: Path, settings: dict[str, Any]) -> None:
    given = config(**settings)
    models = models_of(read_config(qwen), given, "cuda")
    for each in candidates(given, models, parse_gpus("8x80GB"), WORK):
        TrainConfig.model_validate(each.model_dump())


def test_a_critic_is_held_beside_the_policy(qwen: Path) -> None:
    settings = config(algorithm={"name": "ppo"}, ranks=8, micro_batch_tokens=8192)
    found = plan(settings, models_of(read_config(qwen), settings, "cuda"), parse_gpus("8x80GB"), WORK)
    names = [phase.name for phase in found.phases]
    assert names[-3:] == ["critic values", "critic update", "actor update"]
    update = found.phases[-1].memory
    # The same body; a head of one output in place of one for each token.
    assert update["critic optimizer"] == pytest.approx(
        update["actor optimizer"] * (1 - 544_997_376 / 7_615_616_512), rel=1e-3
    )


def test_a_critic_of_adapters_holds_its_body_frozen_and_trains_a_fraction(tmp_path: Path) -> None:
    few_layers = read_config(write("Qwen2.5-7B", tmp_path, num_hidden_layers=2))
    models = {}
    for name, lora in {"whole": None, "adapted": {"rank": 16}}.items():
        settings = config(ranks=8, algorithm={"name": "ppo", "critic": {"lora": lora}})
        models[name] = plan(settings, models_of(few_layers, settings, "cuda"), parse_gpus("8x80GB"), WORK).phases[-1]
    whole, adapted = (models[name].memory for name in ("whole", "adapted"))
    assert adapted["critic weights"] == pytest.approx(whole["critic weights"] / 2, rel=0.05)  # bfloat16, not float32
    assert adapted["critic optimizer"] < 0.05 * whole["critic optimizer"]
    assert adapted["actor optimizer"] == whole["actor optimizer"]


def test_an_engine_in_fp8_holds_a_byte_of_each_weight_of_its_linear_layers(qwen: Path) -> None:
    models_ = {}
    for rollout in (None, "fp8_per_channel"):
        settings = config(ranks=8, fp8=rollout and {"rollout": rollout})
        found = plan(settings, models_of(read_config(qwen), settings, "cuda"), parse_gpus("8x80GB"), WORK)
        models_[rollout] = found.phases[0].memory["rollout weights"]
    embeddings = 2 * 544_997_376  # and the output layer, in bfloat16
    assert models_[None] == 2 * 7_615_616_512
    assert models_["fp8_per_channel"] == pytest.approx(2 * embeddings + 7_615_616_512 - embeddings, rel=1e-3)


def test_separate_pools_do_not_share_memory_and_must_fit_the_devices(models: Models) -> None:
    pools = {"pools": {"training": {"ranks": 6}, "sampling": {"ranks": 2}}, "rollout": "sampling"}
    on = {"actor": "training", "reference": "training"}
    settings = config(placement={**pools, **on})
    found = choose(settings, models, parse_gpus("8x80GB"), WORK)
    by_pool = {
        pool: {name.split()[0] for p in found.phases if p.pool == pool for name in p.memory} for pool in pools["pools"]
    }
    assert by_pool == {"training": {"actor", "reference"}, "sampling": {"rollout"}}
    with pytest.raises(NothingFits, match=r"want 8 devices \(sampling: 2, training: 6\), and there are 4"):
        choose(settings, models, parse_gpus("4x80GB"), WORK)


def test_micro_batches_are_as_packing_makes_them() -> None:
    work = Workload(prompts=12, group_size=4, prompt_tokens=10, response_tokens=20)
    count, usual, full = micro_batches(work, 2, 200)  # a prompt and its responses are 90
    assert (count, usual.rows, usual.scored) == (3, 2 * (10 + 4 * 19), 2 * 80)
    assert full.rows == round(usual.rows * 200 / 180)
    count, usual, _ = micro_batches(work, 2, 50)  # two responses at a time
    assert (count, usual.rows) == (12, 10 + 2 * 19)


@pytest.mark.parametrize(("prompts", "ranks"), [(32, 64), (3, 2), (5, 4), (32, 8), (7, 3)])
def test_a_rank_has_as_many_responses_as_a_batch_is_split_into(prompts: int, ranks: int) -> None:
    work = Workload(prompts, group_size=8, prompt_tokens=10, response_tokens=20)
    rollouts = [
        Rollout(prompt=[group + 1] * 10, response=[1] * 20, log_probs=[0.0] * 20, reward=0.0, group=group)
        for group in range(prompts)
        for _ in range(8)
    ]
    parts = PackedBatch.pack(rollouts).balanced(ranks)
    most = max(len(part) for part in parts)
    _, usual, _ = micro_batches(work, ranks, 1 << 20)  # all of a rank's in one
    assert usual.scored == 20 * most
    assert micro_batches(replace(work, whole_groups=True), ranks, 1 << 20)[1].scored == -(-prompts // ranks) * 160


def test_attention_that_keeps_scores_is_not_planned_for(qwen: Path) -> None:
    with pytest.raises(ModelNotPlanned, match=r"train\.fsdp\.attention=eager keeps a score for each pair"):
        models_of(read_config(qwen), config(fsdp={"attention": "eager"}), "cuda")


def test_no_plan_offloads_more_than_the_hosts_memory(models: Models) -> None:
    machine = parse_gpus("2x40GB")
    needed = choose(config(), models, machine, WORK).host_bytes
    assert choose(config(), models, replace(machine, host_capacity=needed), WORK).fits
    with pytest.raises(NothingFits, match="nothing fits on 2 x 40GB"):
        choose(config(), models, replace(machine, host_capacity=needed // 2), WORK)
    small = replace(parse_gpus("8x80GB"), host_capacity=0)
    assert choose(config(), models, small, WORK).host_bytes == 0


def test_no_plan_has_more_ranks_than_a_step_has_responses(models: Models) -> None:
    responses = {"data": {"prompts_per_step": 32}, "algorithm": {"name": "grpo", "group_size": 8}}
    found = choose(config(**responses), models, parse_gpus("512x80GB"), WORK)
    TrainConfig.model_validate(found.config.model_dump())  # by ranks that share layers
    settings = config(**responses, fsdp={"tensor_parallel": 1, "sequence_parallel": 1})
    assert choose(settings, models, parse_gpus("256x80GB"), WORK).fits
    with pytest.raises(NothingFits, match="one of the 256 responses of a step"):
        choose(settings, models, parse_gpus("512x80GB"), WORK)


def test_a_second_set_of_weights_has_to_fit_beside_the_engine(models: Models) -> None:
    shape, machine = models.policy.shape, parse_gpus("1x80GB")
    beside = serving(shape, EngineConfig(), SwapConfig(), machine)
    assert (beside.devices, beside.weights) == (1, 2 * shape.parameters)
    assert (beside.in_place, beside.utilization) == (False, 0.788)  # in place of the nine tenths that it may take
    assert beside.kv_cache + beside.weights + beside.standby < machine.memory - machine.reserved
    in_place = serving(shape, EngineConfig(), SwapConfig(in_place=True), machine)
    assert (in_place.standby, in_place.in_place, in_place.utilization) == (0, True, 0.9)
    assert serving(shape, EngineConfig(), SwapConfig(), parse_gpus("1x24GB")).in_place
    assert serving(shape, EngineConfig(), SwapConfig(), parse_gpus("8x16GB")).devices == 2


@pytest.mark.parametrize(("generating", "engine"), [(2, 2), (4, 2), (8, 1)])
def test_weights_go_to_a_pool_that_generates_a_slice_to_a_rank(models: Models, generating: int, engine: int) -> None:
    pools = {"training": {"ranks": 4}, "generation": {"ranks": generating}}
    roles = {"actor": "training", "reference": "training", "rollout": "generation"}

    def moved(reshard: str) -> float:
        rollout = {"tensor_parallel_size": engine, "reshard": reshard}
        settings = config(ranks=4, placement={"pools": pools, **roles}, rollout=rollout)
        found = plan(settings, models, parse_gpus("16x80GB"), WORK)
        [sync] = [phase for phase in found.phases if phase.name == "weight sync"]
        return sync.cost.moved

    whole = 2 * models.policy.shape.parameters
    assert moved("gather") == whole
    assert moved("plan") == pytest.approx(max(whole / engine, generating // engine * whole / 4), abs=1)
