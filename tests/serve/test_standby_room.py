"""Whether a swap's second set of weights has room is decided before an engine starts, from sizes."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from serve.config import AdaptersConfig, EngineConfig, SwapConfig
from serve.standby_room import GIB, RESERVED, WORKSPACE, Needs, Room, decide, room_of
from serve.vllm.adapters.slots import server_places_bytes

# Qwen2.5-7B in bfloat16: 7,615,616,512 parameters, and 57,344 bytes of KV cache for a token.
WEIGHTS = 2 * 7_615_616_512
SECOND = int(1.05 * WEIGHTS)
LEAST = 16384 * 57_344
ON_GPU = Needs(WEIGHTS, SECOND, None, LEAST)
SPARE = 256 << 20


def device(gigabytes: float) -> int:
    """What a process finds of a device's memory."""
    return int(0.985 * gigabytes * GIB)


def on_gpu(gigabytes: float, swap: SwapConfig | None = None, needs: Needs = ON_GPU, **engine: Any) -> Room:
    return decide(needs, EngineConfig(**engine), swap or SwapConfig(), gpu=True, memory=device(gigabytes))


def test_on_80_gb_an_engine_leaves_room_for_a_second_set_of_7_billion_parameters() -> None:
    room = on_gpu(80)
    # 78.8 GiB, of which 1.5 are the driver's and 15.15 the second set's: 62.15 for the engine.
    assert (room.in_place, room.utilization, room.kv_cache_bytes) == (False, 0.788, None)
    assert room.second == SECOND + SPARE
    assert "a second set of weights takes 15.1 GiB of 78.8 GiB, which the engine leaves free" in room.reason
    taken = room.utilization * device(80)
    assert taken + room.second + RESERVED <= device(80)
    assert taken - WEIGHTS - WORKSPACE > LEAST


def test_on_24_gb_the_same_policy_is_swapped_in_place_and_the_engine_takes_what_it_may() -> None:
    room = on_gpu(24)
    assert (room.in_place, room.utilization, room.second) == (True, 0.9, 0)
    assert room.reason.startswith("a second set of weights takes 15.1 GiB of 23.6 GiB, and beside it there are 0 MiB")
    assert room.reason.endswith("for a KV cache of at least 0.9 GiB")


def test_the_least_kv_cache_decides_between_the_two() -> None:
    free = on_gpu(32.5)
    assert free.in_place  # 32.0 - 1.5 - 15.1 - 14.2 - 1 GiB
    assert not on_gpu(32.5, needs=replace(ON_GPU, least_kv_cache=16 << 20)).in_place
    assert not on_gpu(34).in_place


def test_what_an_engine_may_take_is_never_raised() -> None:
    assert on_gpu(80, gpu_memory_utilization=0.5).utilization == 0.5
    assert on_gpu(80, gpu_memory_utilization=0.1).in_place  # no room for weights and cache within it


def test_a_cache_of_a_set_size_stays_and_the_second_set_gets_what_is_left() -> None:
    sized = replace(ON_GPU, kv_cache=40 * GIB)
    room = on_gpu(80, needs=sized, kv_cache_bytes=40 * GIB)
    assert (room.in_place, room.kv_cache_bytes) == (False, 40 * GIB)
    larger = on_gpu(80, needs=replace(sized, kv_cache=50 * GIB), kv_cache_bytes=50 * GIB)
    assert (larger.in_place, larger.kv_cache_bytes) == (True, 50 * GIB)


def test_what_is_set_is_what_is_done() -> None:
    assert on_gpu(80, SwapConfig(in_place=True)) == Room(True, "serve.swap.in_place is set", 0.9)
    forced = on_gpu(24, SwapConfig(in_place=False))
    assert not forced.in_place
    assert forced.short > 0
    assert forced.reason.endswith("more than there are, so that swaps will be refused")
    assert on_gpu(80, SwapConfig(in_place=False)) == on_gpu(80)


def test_on_a_cpu_the_cache_gets_smaller_before_a_swap_is_in_place() -> None:
    needs = Needs(WEIGHTS, SECOND, 4 * GIB, LEAST)

    def on_cpu(gigabytes: int, **engine: Any) -> Room:
        return decide(needs, EngineConfig(**engine), SwapConfig(), gpu=False, memory=gigabytes * GIB)

    assert (on_cpu(64).in_place, on_cpu(64).kv_cache_bytes) == (False, 4 * GIB)
    less = on_cpu(33)  # 33 - 1.5 - 15.1 - 14.2: 2.2 GiB
    assert not less.in_place
    assert LEAST < (less.kv_cache_bytes or 0) < 2.3 * GIB
    assert (on_cpu(31).in_place, on_cpu(31).kv_cache_bytes) == (True, 4 * GIB)
    assert on_cpu(33, kv_cache_bytes=4 * GIB).in_place  # that size was set


def policy(folder: Path, **config: Any) -> Path:
    """A 7B policy, whose weights are a hole in a file."""
    shape = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}
    known = {"model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 32768, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(shape | known | config))
    header = json.dumps({"all": {"dtype": "BF16", "shape": [WEIGHTS // 2], "data_offsets": [0, WEIGHTS]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + WEIGHTS)
    return folder


def test_a_policys_files_say_what_it_needs(tmp_path: Path) -> None:
    folder, swap = policy(tmp_path), SwapConfig()
    of = {"gpu": True, "memory": device(80)}
    assert room_of(EngineConfig(), swap, folder, **of) == on_gpu(80)
    assert room_of(EngineConfig(), swap, folder, gpu=True, memory=device(24)).in_place
    halves = room_of(EngineConfig(tensor_parallel_size=2), swap, folder, gpu=True, memory=device(24))
    assert (halves.in_place, halves.second) == (False, SECOND // 2 + SPARE)
    machine = room_of(EngineConfig(), swap, folder, gpu=False, memory=64 * GIB)
    assert (machine.in_place, machine.kv_cache_bytes) == (False, room_of_share(64))
    busy = room_of(EngineConfig(), swap, folder, gpu=False, memory=64 * GIB, available=20 * GIB)
    assert (busy.in_place, busy.kv_cache_bytes) == (True, room_of_share(64))


def test_slots_for_adapters_take_of_the_engines_room_and_not_of_a_second_sets(tmp_path: Path) -> None:
    folder, engine, swap = policy(tmp_path), EngineConfig(), SwapConfig()
    beside = room_of(engine, swap, folder, gpu=True, memory=device(80), adapters=GIB)
    assert (beside.in_place, beside.second) == (False, SECOND + SPARE)
    assert not room_of(engine, swap, folder, gpu=True, memory=device(34)).in_place
    assert room_of(engine, swap, folder, gpu=True, memory=device(34), adapters=GIB).in_place


def test_what_slots_for_adapters_take_is_counted_by_the_shapes_of_layers(tmp_path: Path) -> None:
    layer = {"dtype": "BF16", "shape": [300, 100], "data_offsets": [0, 60000]}
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    header = json.dumps(dict.fromkeys(names, layer)).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(60000))
    room = AdaptersConfig(count=3, rank=5)  # vLLM has kernels for rank 8
    assert server_places_bytes(EngineConfig(adapters=room), tmp_path) == 3 * 8 * 2 * (300 + 100) * 2
    assert server_places_bytes(EngineConfig(), tmp_path) == 0


def room_of_share(gigabytes: int) -> int:
    """A CPU's KV cache: a tenth of its memory, which 64 responses of the whole context could use."""
    return int(0.1 * (gigabytes * GIB))


@pytest.mark.parametrize(
    ("engine", "config", "why"),
    [
        ({"extra": {"enable_lora": True}}, {}, "serve.engine.extra has enable_lora"),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "the policy's weights are quantized"),
    ],
)
def test_what_can_not_have_a_second_set_keeps_no_room_for_one(
    engine: Any, config: Any, why: str, tmp_path: Path
) -> None:
    room = room_of(EngineConfig(**engine), SwapConfig(), policy(tmp_path, **config), gpu=True, memory=device(80))
    assert (room.in_place, room.reason, room.utilization) == (True, why, 0.9)


def test_a_compiled_engine_on_a_cpu_is_loaded_in_place(tmp_path: Path) -> None:
    compiled = EngineConfig(enforce_eager=False)
    assert room_of(compiled, SwapConfig(), policy(tmp_path), gpu=False, memory=64 * GIB).in_place
    assert not room_of(compiled, SwapConfig(), tmp_path, gpu=True, memory=device(80)).in_place


def test_where_sizes_are_not_known_a_gpu_loads_in_place_unless_a_setting_says_otherwise(tmp_path: Path) -> None:
    engine, folder = EngineConfig(extra={"cpu_offload_gb": 8}), policy(tmp_path)
    room = room_of(engine, SwapConfig(), folder, gpu=True, memory=device(24))
    assert (room.in_place, room.utilization) == (True, 0.9)
    assert "is not known, as serve.engine.extra has cpu_offload_gb" in room.reason
    assert not room_of(engine, SwapConfig(in_place=False), folder, gpu=True, memory=device(24)).in_place
    assert not room_of(engine, SwapConfig(), folder, gpu=False, memory=device(24)).in_place


def test_a_model_with_another_kind_of_cache_keeps_a_twentieth_for_it(tmp_path: Path) -> None:
    folder = policy(tmp_path, kv_lora_rank=512)
    assert not room_of(EngineConfig(), SwapConfig(), folder, gpu=True, memory=device(80)).in_place
    assert room_of(EngineConfig(), SwapConfig(), folder, gpu=True, memory=device(33)).in_place


@pytest.mark.parametrize("bad", [{"least_kv_tokens": 0}, {"in_place": "perhaps"}, {"least_kv_tokens": -5}])
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SwapConfig(**bad)
