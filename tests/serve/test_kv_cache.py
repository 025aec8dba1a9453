"""What context and KV cache an engine gets, from a model's config.json and a machine's memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from evaluation.config import EngineConfig
from serve import kv_cache
from serve.gpus import Gpu
from serve.kv_cache import (
    BATCH_SHARE,
    GPU_BATCH_SHARE,
    MIB,
    SERVER_SHARE,
    ContextRefused,
    KVCache,
    available_memory,
    device_share,
    fit,
    fit_batch_engine,
    swap_memory,
)

GIB = 2**30
# Layers, heads and contexts as the models' own config.json files on huggingface.co have them.
QWEN3_06B = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 1024,
    "max_position_embeddings": 40960,
}
LLAMA_32_1B = {
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 2048,
    "max_position_embeddings": 131072,
}


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_06B, "dtype": "bfloat16"}))
    return tmp_path


@pytest.mark.parametrize("inside", [True, False])
def test_a_context_of_two_kinds_of_rotary_factors_is_the_original_one(policy: Path, inside: bool) -> None:
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    config = {**QWEN3_06B, "dtype": "bfloat16", "rope_scaling": scaling}
    (scaling if inside else config)["original_max_position_embeddings"] = 4096
    (policy / "config.json").write_text(json.dumps(config))
    assert sized(policy).max_model_len == 4096
    with pytest.raises(ContextRefused, match=r"more than the 4096 tokens .*\(with longrope"):
        sized(policy, max_model_len=8192)


def sized(policy: Path, **changes: Any) -> KVCache:
    settings: dict[str, Any] = {
        "dtype": "auto",
        "max_model_len": None,
        "kv_cache_bytes": None,
        "max_num_seqs": 64,
        "share": SERVER_SHARE,
        "section": "serve.engine",
        "memory": 24 * GIB,
    }
    return fit(policy, **settings | changes)


def test_a_context_that_memory_does_not_hold_is_cut_to_what_fits(policy: Path) -> None:
    token = 2 * 28 * 8 * 128 * 2
    cache = sized(policy)
    assert cache.size == int(0.10 * 24 * GIB)
    assert cache.max_model_len == (cache.size // (token * 128) - 1) * 128 == 22272  # vLLM keeps a block
    assert cache.full_context == 40960


def test_where_there_is_memory_the_context_is_whole_and_the_cache_no_more_than_is_of_use(policy: Path) -> None:
    assert sized(policy, memory=1024 * GIB) == KVCache(40960, int(0.10 * 1024 * GIB))
    useful = (2 * 40960 + 128) * 2 * 28 * 8 * 128 * 2
    assert sized(policy, memory=1024 * GIB, max_num_seqs=2) == KVCache(40960, useful)


def test_a_context_that_was_asked_for_gets_the_cache_that_it_takes(policy: Path) -> None:
    cache = sized(policy, max_model_len=40960, share=BATCH_SHARE)
    assert cache == KVCache(40960, (40960 + 128) * 2 * 28 * 8 * 128 * 2)
    assert cache.size > 0.05 * 24 * GIB


def test_a_cache_that_was_set_decides_the_context(policy: Path) -> None:
    cache = sized(policy, kv_cache_bytes=512 * 2**20)
    assert cache == KVCache(4480, 512 * 2**20, 40960)


def test_both_set_and_one_too_small_is_an_error_with_both_settings(policy: Path) -> None:
    expected = (
        r"serve\.engine\.max_model_len=40960 takes 4712300544 bytes of KV cache, and "
        r"serve\.engine\.kv_cache_bytes=536870912: set one"
    )
    with pytest.raises(ContextRefused, match=expected):
        sized(policy, max_model_len=40960, kv_cache_bytes=512 * 2**20)


def test_more_than_the_models_context_is_refused_with_the_number(policy: Path) -> None:
    with pytest.raises(ContextRefused, match=r"serve\.engine\.max_model_len=40961 is more than the 40960 tokens"):
        sized(policy, max_model_len=40961)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"type": "linear", "factor": 2.0}, 81920),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 40960),
        ({"rope_type": "default"}, 40960),
    ],
)
def test_scaled_rotary_embeddings_make_a_context_longer(policy: Path, scaling: dict[str, Any], context: int) -> None:
    (policy / "config.json").write_text(json.dumps({**QWEN3_06B, "dtype": "bfloat16", "rope_scaling": scaling}))
    assert sized(policy, memory=1024 * GIB).max_model_len == context


def test_a_cache_that_holds_nothing_is_an_error_with_the_least_size(policy: Path) -> None:
    with pytest.raises(ContextRefused, match=r"kv_cache_bytes=1048576 holds no 128 tokens: set at least 29360128"):
        sized(policy, kv_cache_bytes=2**20)


def test_heads_without_a_size_of_their_own_share_the_hidden_size_and_devices_share_the_heads(policy: Path) -> None:
    (policy / "config.json").write_text(json.dumps({**LLAMA_32_1B, "torch_dtype": "bfloat16"}))
    token = 2 * 16 * 8 * 64 * 2
    assert sized(policy).max_model_len == (int(0.10 * 24 * GIB) // (token * 128) - 1) * 128
    assert sized(policy, devices=2) == KVCache(131072, int(0.10 * 24 * GIB))
    assert sized(policy, dtype="float32").max_model_len == (int(0.10 * 24 * GIB) // (2 * token * 128) - 1) * 128


def test_a_model_of_another_kind_is_left_to_vllm(policy: Path) -> None:
    (policy / "config.json").write_text(json.dumps({"dtype": "bfloat16", "d_model": 768, "n_layer": 24}))
    assert sized(policy) == KVCache(-1, int(0.10 * 24 * GIB))
    assert sized(policy, max_model_len=512, kv_cache_bytes=GIB) == KVCache(512, GIB)


def test_what_was_cut_is_told_in_one_line(policy: Path) -> None:
    assert sized(policy, memory=1024 * GIB).cut("serve.engine") is None
    line = sized(policy).cut("serve.engine")
    assert line is not None
    assert line.startswith(
        "prompt and response have 22272 tokens together, of the model's 40960: so many fit into 2457"
    )
    assert "set serve.engine.kv_cache_bytes for more" in line


def test_memory_that_can_be_had_is_what_the_container_has_left(tmp_path: Path) -> None:
    machine = available_memory(tmp_path)
    assert 0 < machine <= psutil.virtual_memory().total
    files = {"memory.max": str(300 * MIB), "memory.current": str(200 * MIB), "memory.stat": f"inactive_file {50 * MIB}"}
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert available_memory(tmp_path) == 150 * MIB
    (tmp_path / "memory.current").write_text(str(400 * MIB))
    assert available_memory(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) > 300 * MIB


def test_swap_is_what_the_container_may_have_of_the_machines(tmp_path: Path) -> None:
    total = psutil.swap_memory().total
    assert swap_memory(tmp_path) == total
    (tmp_path / "memory.swap.max").write_text("max\n")
    (tmp_path / "memory").mkdir()
    for name in ("memsw.limit", "limit"):  # without bounds in version 1
        (tmp_path / "memory" / f"memory.{name}_in_bytes").write_text("9223372036854771712\n")
    assert swap_memory(tmp_path) == total
    (tmp_path / "memory.swap.max").write_text("0\n")
    assert swap_memory(tmp_path) == 0


def test_an_engine_of_evaluation_has_its_part_of_a_gpu_whatever_the_machine_has(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(max_num_seqs=100_000)
    monkeypatch.setattr(kv_cache, "machine_memory", lambda: 2**41)
    monkeypatch.setattr(kv_cache, "smallest_gpu", lambda: Gpu(0, 0, 24 * 2**30, 0.0))
    cache = fit_batch_engine(config, policy, section="evaluation.engine")
    assert cache.size == int(GPU_BATCH_SHARE * 24 * 2**30)
    monkeypatch.setattr(kv_cache, "smallest_gpu", lambda: None)
    cache = fit_batch_engine(config, policy, section="evaluation.engine")
    assert cache.size == int(BATCH_SHARE * 2**41)
    assert device_share(8 * 2**30, 6 * 2**30, 24 * 2**30) == pytest.approx(1.1 * 14 / 24)
    assert device_share(30 * 2**30, 0, 24 * 2**30) == 1.0
