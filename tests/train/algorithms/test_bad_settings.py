"""Settings that can't work are refused before anything is loaded, by name, with what would do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.paths import ROOT
from train import algorithms, dataflows
from train.config.algorithms import GROUPED, NAMES, OFFLINE, ONLINE, READ_BY, AlgorithmConfig
from train.config.context_length import longest_context, longest_prompt, with_context
from train.config.sections import RolloutConfig
from train.config.training import TrainConfig

APART = {"pools": {"training": {}, "generation": {}}, "actor": "training", "reference": "training"}


def refused(message: str, **settings: Any) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 3, "rollout": {"tensor_parallel_size": 2}}, "tensor_parallel_size=2 does not divide train.ranks=3"),
        ({"minibatches": 9, "data": {"prompts_per_step": 8}}, "train.minibatches=9 is more than"),
        ({"rollout": {"staleness": -1}}, "staleness"),
        (
            {"epochs": 2, "algorithm": {"name": "dpo"}},
            r"train\.epochs=2 .*name=dpo draws all .*: use more train\.steps",
        ),
        ({"checkpoint": {"every_steps": 0}}, "every_steps"),
        ({"stepz": 3}, "stepz"),
        (
            {"ranks": 4, "minibatches": 2, "data": {"prompts_per_step": 3}, "algorithm": {"group_size": 2}},
            r"train\.data\.prompts_per_step=3 of train\.algorithm\.group_size=2 is too little for train\.minibatches=2 "
            r"that 4 data-parallel ranks share, .*; use at least 4 prompts",
        ),
        (
            {"rollout": {"max_tokens": 64, "max_model_len": 64}},
            r"train\.rollout\.max_tokens=64 leaves no room for a prompt in train\.rollout\.max_model_len=64; use less",
        ),
        (
            {"lora": {"sync": "adapters", "base": "nf4"}},
            r"train\.lora\.sync=adapters and train\.lora\.base=nf4: generation would have the weights as they are "
            r"stored; set train\.lora\.sync to merged, or train\.lora\.base to null",
        ),
        (
            {"lora": {"sync": "adapters"}, "rollout": {"backend": "hf"}},
            r"train\.lora\.sync=adapters and train\.rollout\.backend=hf: .*set train\.lora\.sync to merged, or train",
        ),
        (
            {"lora": {"sync": "adapters", "rank": 513}},
            r"train\.lora\.rank=513 is more than the 512 that vLLM computes adapters of: use less, or train",
        ),
        ({"lora": {"sync": "both"}}, r"lora\.sync[\s\S]*'merged' or 'adapters'"),
        ({"data": {"traffic_share": 0.01}}, r"train\.data\.traffic_share=0\.01 .* is 0 logged and 32 fresh ones"),
        ({"data": {"traffic_share": 0.99}}, r"train\.data\.traffic_share=0\.99 .* is 32 logged and 0 fresh ones"),
        (
            {"data": {"traffic_share": 1}, "placement": {**APART, "rollout": "generation"}},
            r"train\.data\.traffic_share=1 learns from logged .*; take out train\.placement\.rollout=generation",
        ),
        (
            {"data": {"traffic_share": 1}, "rollout": {"staleness": 1}},
            r"train\.data\.traffic_share=1 learns from logged .*; take out train\.rollout\.staleness=1",
        ),
        ({"algorithm": {"kl": {"target": 0.1}}}, r"train\.algorithm\.kl\.target=0\.1 needs a coefficient"),
        (
            {"algorithm": {"overlong_buffer": 300}},
            r"train\.algorithm\.overlong_buffer=300 is more than train\.rollout\.max_tokens=256; use at most that",
        ),
        (
            {
                "algorithm": {"resample_rounds": 1},
                "rollout": {"staleness": 1},
                "placement": {**APART, "rollout": "generation"},
            },
            r"train\.algorithm\.resample_rounds=1 .* train\.rollout\.staleness=1 .*; set either to 0",
        ),
        (
            {"algorithm": {"name": "remax"}, "data": {"traffic_share": 0.5}},
            r"train\.data\.traffic_share=0\.5: remax compares a response with the greedy one .*; set it to 0",
        ),
        ({"reward": "a:b", "reward_weights": {"exact": 2}}, r"train\.reward=a:b .* train\.reward_weights .*; set one"),
        ({"rollout": {"top_k": 5}}, r"train\.rollout\.top_k=5 cut .* grpo weighs them by its logprobs.*use online_dpo"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    refused(message, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": "maths"}, r"has no engine for turns of any number: take out train\.environment=maths"),
        ({"placement": {**APART, "rollout": "generation"}}, r"actor's own weights: .*placement\.rollout=generation"),
        ({"rollout": {"staleness": 1}}, r"not with those before: take out train\.rollout\.staleness=1"),
        ({"ranks": 2, "rollout": {"tensor_parallel_size": 2}}, r"take out train\.rollout\.tensor_parallel_size=2"),
        ({"ranks": 2, "fsdp": {"tensor_parallel": 2}}, r"shares no layer: take out train\.fsdp\.tensor_parallel=2"),
        ({"ranks": 2, "fsdp": {"sequence_parallel": 2}}, r"no sequence: .* train\.fsdp\.sequence_parallel=2"),
        ({"fsdp": {"offload_while_generating": True}}, r"take out train\.fsdp\.offload_while_generating=True"),
        ({"rollout": {"enforce_eager": False}}, r"compiles nothing: take out train\.rollout\.enforce_eager=False"),
        ({"rollout": {"reshard": "gather"}}, r"sends no weights: take out train\.rollout\.reshard=gather, or set"),
    ],
)
def test_what_transformers_generation_can_not_do_is_refused_with_the_reason(
    settings: dict[str, Any], message: str
) -> None:
    rollout = {"backend": "hf", **settings.pop("rollout", {})}
    refused(rf"train\.rollout\.backend=hf .*{message}", rollout=rollout, **settings)


@pytest.mark.parametrize("name", GROUPED)
def test_one_response_a_prompt_is_refused_where_a_response_is_compared_with_its_group(name: str) -> None:
    refused(
        rf"train\.algorithm\.group_size=1 gives {name} nothing to compare a response with; use at least 2",
        algorithm={"name": name, "group_size": 1},
    )
    assert algorithms.load(AlgorithmConfig(name=name)).compares_groups


@pytest.mark.parametrize("name", sorted(set(ONLINE) - set(GROUPED)))
def test_one_response_a_prompt_will_do_for_the_others(name: str) -> None:
    config = TrainConfig.model_validate({"algorithm": {"name": name, "group_size": 1}})
    assert not algorithms.load(config.algorithm).compares_groups


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("grpo", "beta", 0.3),
        ("dpo", "clip_low", 0.1),
        ("rloo", "clip_high", 0.28),
        ("cispo", "dual_clip", 3.0),
        ("ppo", "resample_rounds", 1),
        ("kto", "group_size", 4),
        ("sft", "label_smoothing", 0.1),
        ("grpo", "options", {"mine": 1}),
    ],
)
def test_a_setting_that_the_algorithm_does_not_read_is_refused_with_those_that_do(
    name: str, setting: str, value: Any
) -> None:
    readers = ", ".join(READ_BY[setting]) or "your own may"
    refused(
        re.escape(f"train.algorithm.{setting}={value}: {name} does not read it ({readers}"),
        algorithm={"name": name, setting: value},
    )


def test_of_a_section_that_is_not_read_what_was_set_is_named() -> None:
    refused(
        r"train\.algorithm\.critic\.lam=0\.5: grpo does not read it \(ppo does\); take it out",
        algorithm={"critic": {"lam": 0.5}},
    )


def test_a_critics_adapters_are_of_an_algorithm_with_a_critic_and_publish_nothing() -> None:
    refused(
        r"train\.algorithm\.critic\.lora=.*: grpo does not read it \(ppo does\); take it out",
        algorithm={"critic": {"lora": {"rank": 4}}},
    )
    refused("publish_adapter", algorithm={"name": "ppo", "critic": {"lora": {"publish_adapter": True}}})
    refused("rank", algorithm={"name": "ppo", "critic": {"lora": {"rank": 0}}})


@pytest.mark.parametrize("name", NAMES)
def test_the_defaults_of_every_algorithm_can_work_and_stay_the_same_when_written_out(name: str) -> None:
    teacher = {"url": "http://127.0.0.1:1/v1", "model": "large"} if name == "distill" else None
    config = TrainConfig.model_validate({"algorithm": {"name": name, "teacher": teacher}})
    assert TrainConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("name", OFFLINE)
@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"rollout": {"temperature": 0.7}}, r"train\.rollout\.temperature=0\.7"),
        ({"data": {"traffic_share": 0.5}}, r"train\.data\.traffic_share=0\.5"),
        ({"ranks": 2, "rollout": {"tensor_parallel_size": 2}}, r"train\.rollout\.tensor_parallel_size=2"),
    ],
)
def test_settings_of_sampling_are_refused_where_nothing_is_sampled(
    name: str, settings: dict[str, Any], what: str
) -> None:
    refused(rf"train\.algorithm\.name={name} .*samples nothing; take out {what}", algorithm={"name": name}, **settings)


def test_a_kl_coefficient_brings_its_reference() -> None:
    assert TrainConfig.model_validate({"measure_kl": False, "algorithm": {"kl": {"coefficient": 0.1}}}).has_reference
    assert TrainConfig.model_validate({"measure_kl": False, "max_kl": 0.1}).has_reference
    assert not TrainConfig.model_validate({"measure_kl": False}).has_reference


# ------------------------------------------------------------------------------------------------ names of one's own


def test_an_unknown_algorithm_is_refused_with_the_list() -> None:
    refused(
        r"train\.algorithm\.name='gpro' is not an algorithm; use 'module:class', or one of grpo, dr_grpo, ",
        algorithm={"name": "gpro"},
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Mine", "the module can't be imported: No module named 'no_such_module'"),
        ("train.objectives.losses:Mine", "the module train.objectives.losses has no 'Mine'"),
        ("train.objectives.losses:token_ratio", "is not a subclass of train.algorithms.base.Algorithm"),
    ],
)
def test_an_algorithm_of_ones_own_that_is_none_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"train.algorithm.name={name!r}") + ".*" + re.escape(message)):
        algorithms.load(AlgorithmConfig(name=name))


def test_an_algorithm_of_ones_own_that_learns_from_feedback_samples_nothing() -> None:
    config = TrainConfig.model_validate({"algorithm": {"name": "train.algorithms.offline.dpo:DPO", "offline": True}})
    assert not config.samples
    assert dataflows.load(config).__name__ == "Offline"
    refused(r"train\.algorithm\.offline=True: grpo does not read it", algorithm={"offline": True})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Mine", "the module can't be imported"),
        ("train.objectives.losses:Mine", "the module train.objectives.losses has no 'Mine'"),
        ("train.objectives.losses:token_ratio", "is not a subclass of train.dataflows.base.Dataflow"),
        ("train.objectives.losses", "names no class; write 'module:class'"),
    ],
)
def test_a_dataflow_of_ones_own_that_is_none_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"train.dataflow={name!r}") + ".*" + re.escape(message)):
        dataflows.load(TrainConfig(dataflow=name))


# ---------------------------------------------------------------------------------------------------- the context


def policy_with(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "config", [{"max_position_embeddings": 64}, {"n_positions": 64}, {"text_config": {"max_position_embeddings": 64}}]
)
def test_the_context_is_the_models_unless_the_setting_is_less(tmp_path: Path, config: dict[str, Any]) -> None:
    policy = policy_with(tmp_path, config)
    assert longest_context(RolloutConfig(), policy) == 64
    assert longest_context(RolloutConfig(max_model_len=32), policy) == 32
    assert longest_prompt(RolloutConfig(max_tokens=20), policy) == 44


SIZED = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64, "dtype": "float32"}


def test_the_context_of_rollouts_is_what_their_kv_cache_holds_and_what_a_run_began_with(tmp_path: Path) -> None:
    policy = policy_with(tmp_path, {"max_position_embeddings": 10**6, **SIZED})
    config = TrainConfig.model_validate({"rollout": {"kv_cache_bytes": 2**20, "max_tokens": 8}})
    tokens = 2**20 // (2 * 2 * 64 * 2)  # in bfloat16
    block = 128  # vLLM keeps one of its blocks to itself
    assert with_context(config, policy).rollout.max_model_len == tokens - block
    assert with_context(config, policy, 640).rollout.max_model_len == 640
    chosen = TrainConfig.model_validate({"rollout": {"max_model_len": 32, "max_tokens": 8}})
    assert with_context(chosen, policy) is chosen
    offline = TrainConfig.model_validate({"algorithm": {"name": "sft"}})
    assert with_context(offline, policy) is offline


def test_lengths_over_the_models_context_are_refused_by_name(tmp_path: Path) -> None:
    policy = policy_with(tmp_path, {"max_position_embeddings": 64})
    with pytest.raises(ValueError, match=r"train\.rollout\.max_model_len=65 is more than the 64 .*; use at most 64"):
        longest_context(RolloutConfig(max_model_len=65), policy)
    with pytest.raises(ValueError, match=r"train\.rollout\.max_tokens=64 leaves no room .*; use at most 63"):
        longest_prompt(RolloutConfig(max_tokens=64), policy)
    with pytest.raises(ValueError, match=r"doesn't say what context .*train\.rollout\.max_model_len"):
        longest_context(RolloutConfig(), policy_with(tmp_path, {}))


def test_a_config_is_checked_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = sys.modules['ray'] = None\n"
        "import train.config.training, train.algorithms, train.dataflows, train.config.context_length\n"
        "train.config.training.TrainConfig.model_validate({'algorithm': {'name': 'dapo'}})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
