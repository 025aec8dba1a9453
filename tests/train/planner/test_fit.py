"""Whether settings are found to fit a machine that is described: what is refused, what is said, what may pass."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evaluation.config import EngineConfig as EvaluationEngineConfig
from feedback.config import ScoringConfig
from serve.config import EngineConfig, SwapConfig
from tests.train.job_home import job_context
from tests.train.planner.public_configs import CONFIGS, write
from train.config.training import TrainConfig
from train.context import JobContext
from train.planner.check import DoesNotFit, Finding, check_evaluation, check_server, check_training
from train.planner.machine import Machine, parse_gpus
from train.planner.model_shape import models_of, read_config
from train.planner.plan import Plan, Workload, plan
from train.planner.sizes import GIB


def policy(name: str, folder: Path, **other: Any) -> Path:
    """A model's folder, whose weights are a hole in a file."""
    write(name, folder, **other)
    count = CONFIGS[name][0]
    header = json.dumps({"all": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * count)
    return folder


PLAIN: dict[str, Any] = {"activation_checkpointing": False, "fsdp": {"reduce_every_micro_batch": False}}
"""What a run would choose otherwise where it doesn't fit."""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy("Qwen2.5-7B", tmp_path_factory.mktemp("qwen"))


def cpu(memory: int, ranks: int = 1) -> Machine:
    return replace(parse_gpus("1x80GB"), kind="cpu", name="this CPU", devices=ranks, memory=memory // ranks)


def training(policy: Path, machine: Machine, *, host: int = 1024 * GIB, **settings: Any) -> Finding:
    return check_training(TrainConfig.model_validate(settings), policy, machine, host=host)


def server(
    policy: Path, machine: Machine, *, in_place: bool | None = None, replicas: int = 1, **engine: Any
) -> Finding:
    return check_server(EngineConfig(**engine), SwapConfig(in_place=in_place), policy, machine, replicas=replicas)


def test_training_that_can_not_fit_is_refused_with_settings_that_do_fit(qwen: Path) -> None:
    # Weights, gradients and two moments in float32 alone: 16 bytes a parameter, 113 GiB.
    found = training(qwen, parse_gpus("1x80GB"))
    assert found.level == "refused"
    assert found.found.startswith("actor update needs 1")
    assert "and a device has 78.8 GiB, of which 73.4 GiB can be filled" in found.found
    assert "train.fsdp.cpu_offload=true" in found.advice
    assert training(qwen, parse_gpus("1x80GB"), **advised(found)).level == "fits"


def advised(found: Finding) -> dict[str, Any]:
    settings: dict[str, Any] = {"fsdp": {}, "rollout": {}}
    for one in found.advice.removeprefix("these settings would fit: ").split(", "):
        name, _, value = one.removeprefix("train.").partition("=")
        section, _, field = name.rpartition(".")
        (settings[section] if section else settings)[field] = json.loads(value)
    return settings


def test_settings_that_would_fit_are_accepted_where_a_step_has_responses_for_few_ranks(qwen: Path) -> None:
    few = {"prompts_per_step": 1}, {"group_size": 4}
    found = training(qwen, parse_gpus("8x80GB"), data=few[0], algorithm=few[1])
    settings = advised(found)
    assert (found.level, settings["ranks"]) == ("refused", 4)
    assert training(qwen, parse_gpus("8x80GB"), data=few[0], algorithm=few[1], **settings).level == "fits"


def test_adapters_are_not_advised_where_they_are_trained_already(qwen: Path) -> None:
    settings: dict[str, Any] = {"lora": {}, "rollout": {"max_tokens": 8191}, "data": {"prompts_per_step": 1}}
    found = training(qwen, cpu(12 * GIB), **settings)
    assert (found.level, "train.lora" in found.advice) == ("refused", False)
    assert found.advice.endswith("use a machine with more memory")


def test_what_only_the_longest_responses_do_not_leave_room_for_may_start(qwen: Path) -> None:
    long: dict[str, Any] = {"rollout": {"max_tokens": 32768}, "lora": {}, "dtype": "bfloat16", **PLAIN}
    found = training(qwen, parse_gpus("1x80GB"), **long)
    assert found.level == "tight"
    assert found.found.endswith("if responses have train.rollout.max_tokens=32768 tokens")
    assert training(qwen, parse_gpus("1x80GB"), rollout={"max_tokens": 32768}, lora={}).level == "fits"


def test_what_swap_holds_is_not_refused(qwen: Path) -> None:
    assert training(qwen, replace(cpu(16 * GIB, 2), swap=256 * GIB), ranks=2).level == "tight"
    assert server(qwen, cpu(8 * GIB)).level == "refused"
    assert server(qwen, replace(cpu(8 * GIB), swap=16 * GIB)).level == "tight"


def test_a_capped_models_micro_batches_of_whole_sequences_are_planned(tmp_path: Path) -> None:
    folder = policy("gemma-2-2b", tmp_path)  # whose attention is computed span by span
    assert training(folder, cpu(1024 * GIB), algorithm={"name": "ppo"}).level == "fits"


def test_what_comes_close_to_the_memory_may_start_with_a_warning(qwen: Path) -> None:
    found = training(qwen, parse_gpus("4x80GB"), ranks=4, **PLAIN)
    assert (found.level, found.advice) == ("tight", "`millrace plan` names settings that need less")
    assert training(qwen, parse_gpus("4x80GB"), ranks=4).level == "fits"  # as the run chooses
    assert training(qwen, parse_gpus("8x80GB"), ranks=8).level == "fits"


def test_ranks_share_the_memory_of_a_cpu(qwen: Path) -> None:
    assert training(qwen, cpu(360 * GIB)).level == "fits"
    assert training(qwen, cpu(360 * GIB, 4), ranks=4, **PLAIN).level == "tight"
    pools = {"pools": {"a": {"ranks": 1}, "b": {"ranks": 1}}, "actor": "a", "reference": "a", "rollout": "b"}
    assert training(qwen, cpu(256 * GIB, 2), placement=pools).level == "fits"  # a pool may take more than its share


def test_a_cache_that_stays_while_the_policy_is_trained_gets_what_training_leaves(tmp_path: Path) -> None:
    found = training(policy("gemma-2-2b", tmp_path), cpu(64 * GIB), micro_batch_tokens=8192, **PLAIN)
    assert found.level == "refused"
    assert found.advice.startswith("these settings would fit: ")


def test_what_is_offloaded_must_fit_the_host(qwen: Path) -> None:
    settings: dict[str, Any] = {"fsdp": {"cpu_offload": True}, "micro_batch_tokens": 1024}
    found = training(qwen, parse_gpus("1x80GB"), host=64 * GIB, **settings)
    # 4 + 4 + 8 bytes of a parameter in training and 2 of the reference's: 18 x 7.6e9 = 127.7 GiB.
    assert found.level == "refused"
    assert found.found == "train.fsdp.cpu_offload keeps 127.7 GiB in the host's memory, which is 64.0 GiB"
    without = training(qwen, parse_gpus("1x80GB"), host=64 * GIB)
    assert (without.level, "cpu_offload" in without.advice) == ("refused", False)
    assert "nothing fits on 1 x 80GB" in without.advice
    assert "train.lora" in without.advice


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"dataflow": "mine:Flow"}, "train.dataflow=mine:Flow may hold other models"),
        ({"algorithm": {"name": "reward_model"}}, "train.algorithm.name=reward_model trains no policy"),
        ({"placement": {"pools": {"all": {"gpus": 0}}}}, "train.placement.pools has a pool without GPUs"),
        ({"algorithm": {"name": "no_such_module:Algorithm"}}, "no_such_module"),
    ],
)
def test_settings_that_can_not_be_planned_pass_with_the_reason(settings: Any, why: str, qwen: Path) -> None:
    found = training(qwen, parse_gpus("1x24GB"), **settings)
    assert found.level == "unplanned"
    assert why in found.found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "there is no"),
        ("{", "can't read"),
        ('{"model_type": "unheard_of"}', "`unheard_of`"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}', "not in the folder: mine.py"),
    ],
)
def test_a_model_that_can_not_be_read_passes_with_the_reason_in_one_line(
    text: str | None, why: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    found = training(tmp_path, parse_gpus("1x24GB"))
    assert (found.level, why in found.found, len(found.found.splitlines())) == ("unplanned", True, 1)
    assert server(tmp_path, parse_gpus("1x24GB")).level == "unplanned"


def test_a_second_set_of_weights_is_planned_for_as_the_server_decides(qwen: Path) -> None:
    left = "a second set of weights takes 15.1 GiB of 78.8 GiB, which the engine leaves free"
    found = server(qwen, parse_gpus("1x80GB"))
    assert (found.level, found.found.endswith(left)) == ("fits", True)
    in_place = server(qwen, parse_gpus("1x80GB"), in_place=True)
    assert in_place.level == "fits"
    assert in_place.found.endswith("in place, while requests wait: serve.swap.in_place is set")
    small = server(qwen, parse_gpus("1x24GB"))
    assert small.level == "fits"
    assert "in place, while requests wait: a second set of weights takes 15.1 GiB of 23.6 GiB" in small.found
    forced = server(qwen, parse_gpus("1x24GB"), in_place=False)
    assert (forced.level, forced.advice.startswith("take serve.swap.in_place=false out")) == ("tight", True)
    assert forced.found.endswith("so that swaps will be refused")


def test_weights_beyond_the_engines_part_of_a_device_are_refused(qwen: Path) -> None:
    assert server(qwen, parse_gpus("1x24GB"), gpu_memory_utilization=0.5).level == "refused"
    found = server(qwen, parse_gpus("1x12GB"))
    assert found.level == "refused"
    assert found.found.startswith("14.2 GiB of weights and at least 16 MiB of KV cache, where there are 10.6 GiB")
    assert "serve.engine.tensor_parallel_size=1" in found.advice
    # A cache of a set size is not bounded by the share.
    sized = server(qwen, parse_gpus("1x40GB"), kv_cache_bytes=40 * GIB)
    assert (sized.level, "serve.engine.kv_cache_bytes" in sized.advice) == ("refused", True)


@pytest.mark.parametrize(("plan", "refused"), [("refuse", True), ("warn", False), ("off", False)])
def test_on_a_cluster_the_run_itself_is_refused_where_it_can_not_fit(
    plan: str,
    refused: bool,
    qwen: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from train import job

    monkeypatch.setattr(job, "gpus_of_cluster", lambda: [1])
    monkeypatch.setattr(job, "gpus_by_pool", lambda *_: {"all": 1})
    monkeypatch.setattr(job, "machine_of_run", lambda *_: parse_gpus("1x80GB"))
    config = TrainConfig.model_validate({"ray_address": "http://head:8265", "plan": plan})
    context = JobContext.model_validate(job_context(tmp_path, "run"))
    assert config.placement.actor == "all"
    if refused:
        with pytest.raises(DoesNotFit, match=r"actor update needs 1\d\d.* or start all the same with train.plan=warn"):
            job.by_plan(context, config, qwen)
    else:
        job.by_plan(context, config, qwen)
        assert ("run: warning: training does not fit" in capsys.readouterr().out) == (plan == "warn")
    here = TrainConfig.model_validate({"plan": plan})  # which has been asked before it was started
    job.by_plan(context, here, qwen)


def test_a_reward_model_takes_its_part_of_each_device_that_it_scores_on(qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    small = policy("gemma-2-2b", tmp_path / "small")

    def found(machine: Machine, pools: dict[str, Any] | None = None, where: str | None = None, **model: Any) -> Plan:
        placement = {"pools": pools or {"all": {}}, "reward": where}
        settings = {**PLAIN, "lora": {}, "rollout": {"kv_cache_bytes": GIB}, "placement": placement}
        config = TrainConfig.model_validate(settings | ({} if pools else {"ranks": machine.devices}))
        reward = ScoringConfig.model_validate({"model": {"name": str(qwen), **model}})
        models = models_of(read_config(small), config, machine.kind, reward if model else None)
        return plan(config, models, machine, Workload.of(config, 64))

    def of_rewards(found: Plan) -> dict[str, float]:
        return {phase.name: phase.memory.get("reward models", 0) for phase in found.phases}

    gpus, weights = parse_gpus("2x80GB"), 2 * CONFIGS["Qwen2.5-7B"][0]
    beside = of_rewards(found(gpus, dtype="auto"))
    pass_bytes = 2 * 16384 * (2 * 18944 + 4 * 3584)
    assert set(beside.values()) == {weights + pass_bytes}
    assert {"rewards", "generate", "actor update"} <= beside.keys()
    assert found(gpus, dtype="auto").seconds > found(gpus).seconds
    assert not any(of_rewards(found(gpus)).values()), "no reward model"
    assert not any(of_rewards(found(gpus, device="cpu")).values()), "it is beside the devices"
    own = {"all": {"ranks": 1}, "rewards": {"ranks": 1}}
    apart = of_rewards(found(gpus, own, "rewards", dtype="auto"))
    assert {name: held for name, held in apart.items() if held} == {"rewards": weights}
    none_left = of_rewards(found(parse_gpus("1x80GB"), own, "rewards", dtype="auto"))
    assert not any(none_left.values()), "it computes on a CPU"
    with_actor = of_rewards(found(gpus, None, "all", dtype="auto"))
    assert set(with_actor.values()) == {weights}, "what a pass takes is there for an update, too"
    few = found(gpus, own, "rewards", dtype="auto", batch_tokens=2**30)
    (rewards,) = (phase for phase in few.phases if phase.name == "rewards")
    assert rewards.memory["reward activations"] < 100 * GIB, "no more than a step has"
    assert few.peak is not rewards, "no setting that is chosen changes it"
    two_ranks = {"all": {"ranks": 1}, "rewards": {"ranks": 2}}
    assert not any(of_rewards(found(gpus, two_ranks, "rewards", dtype="auto")).values()), (
        "not all of its ranks have one"
    )
    shared = of_rewards(found(cpu(256 * GIB, 2), dtype="auto"))
    assert set(shared.values()) == {(weights + pass_bytes) // 2}, "two ranks share a memory with the driver"
    of = {"name": str(qwen)}
    for unread in ({"name": "org/on-the-hub"}, {"name": str(tmp_path)}, of | {"weight": 0}, of | {"device": "cuda:1"}):
        reward = ScoringConfig.model_validate({"model": unread})
        assert not models_of(read_config(small), TrainConfig(), "cuda", reward).scorers, unread
    # It is what makes a run not fit, and is named.
    reward = ScoringConfig.model_validate({"human": {"model": {"name": str(qwen), "dtype": "float32"}}})
    config = TrainConfig.model_validate({"lora": {}})
    crowded = check_training(config, small, parse_gpus("1x24GB"), host=GIB, reward=reward)
    assert (crowded.level, "are reward models" in crowded.found) == ("refused", True)
    assert check_training(config, small, parse_gpus("1x24GB"), host=GIB).level == "fits"


def test_an_engine_of_evaluation_that_can_not_fit_is_refused_by_its_settings(qwen: Path) -> None:
    gpu = parse_gpus("1x24GB")
    fits = check_evaluation(EvaluationEngineConfig(), qwen, gpu)
    assert (fits.level, fits.advice) == ("fits", "")
    assert fits.found.startswith(
        "14.2 GiB of weights and 7.1 GiB of KV cache, where there are the 23.6 GiB of a device"
    )
    greedy = check_evaluation(EvaluationEngineConfig(kv_cache_bytes=17 * GIB), qwen, gpu)
    assert greedy.level == "refused"
    assert greedy.advice.startswith("lower evaluation.engine.kv_cache_bytes or evaluation.engine.max_model_len, or")
    split = EvaluationEngineConfig(kv_cache_bytes=17 * GIB, tensor_parallel_size=2)
    assert check_evaluation(split, qwen, gpu).level == "tight"
    assert check_evaluation(EvaluationEngineConfig(), qwen, cpu(8 * GIB)).level == "refused"
    assert check_evaluation(EvaluationEngineConfig(), qwen, replace(cpu(8 * GIB), swap=8 * GIB)).level == "tight"
    other = check_evaluation(EvaluationEngineConfig(extra={"kv_cache_dtype": "fp8"}), qwen, gpu)
    assert (other.level, other.found) == ("unplanned", "evaluation.engine.extra has kv_cache_dtype")


def test_replicas_share_the_memory_of_a_cpu(qwen: Path) -> None:
    assert server(qwen, cpu(48 * GIB)).level == "fits"
    found = server(qwen, cpu(48 * GIB), replicas=4)
    assert (found.level, "serve.fleet.replicas" in found.advice) == ("refused", True)
    assert "in place, while requests wait: a second set" in server(qwen, cpu(24 * GIB)).found
    assert server(qwen, cpu(24 * GIB), in_place=False).level == "tight"
    assert server(qwen, cpu(20 * GIB), dtype="float32").level == "refused"
    assert server(qwen, cpu(24 * GIB), enforce_eager=False).level == "fits"  # it is compiled, and loaded in place


def test_quantized_weights_count_as_they_are_stored_and_other_arguments_of_vllm_pass(tmp_path: Path) -> None:
    folder = policy("Qwen2.5-7B", tmp_path, quantization_config={"quant_method": "fp8"})
    assert "14.2 GiB of weights" in server(folder, parse_gpus("1x80GB"), dtype="float32").found
    found = server(folder, parse_gpus("1x12GB"), extra={"cpu_offload_gb": 8})
    assert (found.level, found.found) == ("unplanned", "serve.engine.extra has cpu_offload_gb")


def test_weights_that_the_index_does_not_name_are_not_counted(qwen: Path) -> None:
    twice = qwen / "consolidated.safetensors"
    index = qwen / "model.safetensors.index.json"
    twice.hardlink_to(qwen / "model.safetensors")
    index.write_text('{"weight_map": {"all": "model.safetensors"}}')
    assert "14.2 GiB of weights" in server(qwen, parse_gpus("1x24GB")).found
    twice.unlink()
    index.unlink()


def test_packed_weights_count_as_they_are_stored_whatever_names_them_quantized(tmp_path: Path) -> None:
    folder = policy("Qwen2.5-7B", tmp_path)
    file = folder / "model.safetensors"
    header = json.dumps({"all": {"dtype": "U8", "shape": [GIB], "data_offsets": [0, GIB]}}).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        out.truncate(8 + len(header) + GIB)
    assert server(folder, parse_gpus("1x24GB")).found.startswith("1.0 GiB of weights")


def test_an_engine_that_can_not_have_a_second_set_of_weights_needs_no_room_for_one(qwen: Path) -> None:
    found = server(qwen, parse_gpus("1x80GB"), extra={"enable_lora": True})
    why = "while requests wait: serve.engine.extra has enable_lora"
    assert (found.level, found.found.endswith(why)) == ("fits", True)
    assert server(qwen, parse_gpus("1x12GB"), extra={"offload_group_size": 8}).level == "unplanned"
    assert "gpu_memory_utilization" not in server(qwen, parse_gpus("1x12GB"), gpu_memory_utilization=0.5).advice
