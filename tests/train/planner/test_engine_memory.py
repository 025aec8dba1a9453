"""What a rollout engine takes of a device: as a plan counts it from a config, and a rank from its engine's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from serve.kv_cache import device_share
from train.config.training import TrainConfig
from train.planner.engine_memory import engine_bytes, engine_share
from train.planner.machine import parse_gpus
from train.planner.model_shape import models_of, read_config
from train.planner.plan import Workload, plan

HIDDEN, LAYERS, VOCABULARY = 256, 3, 1000
BODY = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * 512)
"""Parameters in the matrices of the layers, of four heads of 64, and as many of keys and values."""
EMBEDDINGS = 2 * VOCABULARY * HIDDEN


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stored in either type, in several files."""
    folder = tmp_path_factory.mktemp("policy")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
    config = Qwen3Config(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes, **heads)
    model = Qwen3ForCausalLM(config).to(getattr(torch, request.param))
    model.save_pretrained(folder, max_shard_size="1MB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def bytes_of(policy: Path, **settings: Any) -> float:
    """Of weights and adapters on a device, as its rank counts them."""
    config = TrainConfig.model_validate({"ranks": 2, **settings})
    return engine_share(config, policy, kv_cache=0, device=2**40) * 2**40 / 1.1


def test_weights_take_what_training_computes_in_whatever_type_they_are_stored_in(policy: Path) -> None:
    norms = LAYERS * (2 * HIDDEN + 2 * 64) + HIDDEN
    whole = BODY + EMBEDDINGS + norms
    assert bytes_of(policy, dtype="float32") == pytest.approx(4 * whole)
    assert bytes_of(policy, dtype="bfloat16") == pytest.approx(2 * whole)
    assert bytes_of(policy, dtype="float32", rollout={"tensor_parallel_size": 2}) == pytest.approx(2 * whole)
    in_fp8 = {"rollout": "fp8_per_channel"}
    assert bytes_of(policy, dtype="bfloat16", fp8=in_fp8) == pytest.approx(BODY + 2 * (EMBEDDINGS + norms))


def test_adapters_beside_the_weights_are_there_twice_on_each_device(policy: Path) -> None:
    plain = {"dtype": "bfloat16", "rollout": {"tensor_parallel_size": 2}}
    sides = LAYERS * (4 * 2 * HIDDEN + 3 * (HIDDEN + 512))
    more = bytes_of(policy, **plain, lora={"rank": 8, "sync": "adapters"}) - bytes_of(policy, **plain)
    assert more == pytest.approx(2 * 2 * 8 * sides)
    assert bytes_of(policy, **plain, lora={"rank": 8}) == bytes_of(policy, **plain), "merged into the weights"


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float32", "rollout": {"tensor_parallel_size": 2}},
        {"dtype": "bfloat16", "fp8": {"rollout": "fp8_per_channel"}},
        {"dtype": "bfloat16", "lora": {"rank": 16, "sync": "adapters"}},
    ],
    ids=["float32", "bfloat16", "two ranks", "fp8", "adapters"],
)
def test_vllm_is_started_with_the_share_that_the_plan_names(policy: Path, settings: dict[str, Any]) -> None:
    config = TrainConfig.model_validate({"ranks": 2, **settings})
    machine = parse_gpus("2x24GB")
    found = plan(config, models_of(read_config(policy), config, "cuda"), machine, Workload.of(config, 64))
    share = engine_share(config, policy, kv_cache=found.kv_bytes, device=machine.memory)
    assert share == pytest.approx(found.engine_share, rel=1e-3)
    alone = engine_share(config, policy, kv_cache=0, device=machine.memory)
    assert alone == pytest.approx(found.engine_share - device_share(0, found.kv_bytes, machine.memory), rel=5e-3)


def test_an_engine_asks_for_what_it_takes_and_no_more_than_the_device() -> None:
    assert engine_bytes(1_000, 0, itemsize=2, tensor_parallel_size=1) == 2_000
    assert engine_bytes(1_000, 600, itemsize=2, tensor_parallel_size=2, adapters=50) == 750
    assert device_share(2_000, 1_000, 10_000) == pytest.approx(0.33)
    assert device_share(1_000, 1_000, 10_000) == pytest.approx(0.22)
    assert device_share(2_000, 1_000_000, 10_000) == 1.0
