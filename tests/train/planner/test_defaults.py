"""What a run does where its settings leave memory open: by the plan, and the same when it goes on."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.train.planner.public_configs import write
from train.config.training import TrainConfig
from train.planner.defaults import OPEN, Decided, as_begun, by_plan, context_of, decide, with_values
from train.planner.machine import Machine, parse_gpus
from train.planner.model_shape import models_of, read_config
from train.planner.plan import Models
from train.planner.sizes import GIB

PLAIN = {OPEN[0]: False, OPEN[1]: False, OPEN[2]: False, OPEN[3]: True}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("Qwen2.5-7B", tmp_path_factory.mktemp("qwen")).parent


@pytest.fixture(scope="module")
def traced(qwen: Path) -> dict[str, Models]:
    """The models, which remember what they were traced to keep."""
    return {kind: models_of(read_config(qwen), TrainConfig(), kind) for kind in ("cuda", "cpu")}


def of(qwen: Path, traced: dict[str, Models], machine: Machine, **settings: Any) -> Decided:
    return decide(TrainConfig.model_validate(settings), qwen, machine, traced[machine.kind])


def cpu(memory: int) -> Machine:
    return replace(parse_gpus("1x80GB"), kind="cpu", name="this CPU", memory=memory)


def test_on_gpus_graphs_are_captured_and_the_cache_holds_what_a_step_uses(
    qwen: Path, traced: dict[str, Models]
) -> None:
    found = of(qwen, traced, parse_gpus("8x80GB"), ranks=8)
    assert found.values.keys() == set(OPEN)
    assert found.values[OPEN[3]] is False
    assert found.why == "by the plan for 8 x 80GB"
    # 32 sequences of 512 + 256 tokens an engine are less than one response of the whole context, 32768 tokens.
    assert found.values[OPEN[4]] == (32768 // 128 + 1) * 128 * 57_344
    assert found.config.rollout.kv_cache_bytes == found.values[OPEN[4]]
    long = of(qwen, traced, parse_gpus("4x80GB"), ranks=4, rollout={"max_tokens": 4096})
    assert long.values[OPEN[4]] > 64 * (512 + 4096) * 57_344


def test_activations_are_recomputed_where_they_would_not_fit(qwen: Path, traced: dict[str, Models]) -> None:
    values = {size: of(qwen, traced, parse_gpus(f"8x{size}GB"), ranks=8).values for size in (80, 40)}
    assert (values[80][OPEN[0]], values[40][OPEN[0]]) == (False, True)


def test_gradients_that_would_be_held_whole_are_reduced_each_time(qwen: Path, traced: dict[str, Models]) -> None:
    # Of several micro-batches, 4 bytes a parameter: 28 GiB beside 38 GiB of the rest.
    assert of(qwen, traced, parse_gpus("4x80GB"), ranks=4).values[OPEN[1]] is True
    few = {"data": {"prompts_per_step": 4}, "micro_batch_tokens": 16384}
    assert of(qwen, traced, parse_gpus("4x192GB"), ranks=4, **few).values[OPEN[1]] is False


def test_what_is_trained_waits_in_the_hosts_memory_where_the_cache_needs_the_room(
    qwen: Path, traced: dict[str, Models]
) -> None:
    machine, long = parse_gpus("2x80GB"), {"rollout": {"max_tokens": 8192}, "ranks": 2}
    away = of(qwen, traced, machine, **long)
    assert away.values[OPEN[2]] is True
    assert of(qwen, traced, parse_gpus("2x288GB"), **long).values[OPEN[2]] is False
    stays = of(qwen, traced, machine, **long, fsdp={"offload_while_generating": False})
    assert OPEN[2] not in stays.values
    assert away.values[OPEN[4]] > 2 * stays.values[OPEN[4]]
    plan = by_plan(away.config, traced["cuda"], machine, 32768)
    held = 12 * 7_615_616_512 / 2 + 2 * 7_615_616_512 / 2  # master weights and moments, and the reference
    assert plan.host_bytes == pytest.approx(2 * held, rel=1e-3)
    phases = {phase.name: phase for phase in plan.phases}
    assert not any(name.startswith(("actor", "reference")) for name in phases["generate"].memory)
    assert set(phases["weight sync"].memory) == {
        *("actor weights", "rollout weights", "rollout buffers", "rollout graphs")
    }
    assert phases["generate"].cost.moved >= 2 * held


def test_what_is_set_stays(qwen: Path, traced: dict[str, Models]) -> None:
    given = {
        "activation_checkpointing": True,
        "fsdp": {"reduce_every_micro_batch": False, "offload_while_generating": True},
        "rollout": {"enforce_eager": True, "kv_cache_bytes": 2**30},
    }
    config = TrainConfig.model_validate({**given, "ranks": 8})
    assert decide(config, qwen, parse_gpus("8x80GB"), traced["cuda"]) == Decided(config, {}, "all of it is set")
    one = of(qwen, traced, parse_gpus("8x40GB"), ranks=8, activation_checkpointing=False)
    assert (one.config.activation_checkpointing, OPEN[0] in one.values) == (False, False)


def test_on_a_cpu_with_room_nothing_is_recomputed_reduced_or_moved(qwen: Path, traced: dict[str, Models]) -> None:
    found = of(qwen, traced, cpu(1024 * GIB))
    assert (found.values, found.saves) == (PLAIN, False)
    assert found.config.rollout.kv_cache_bytes is None
    less = of(qwen, traced, cpu(150 * GIB), micro_batch_tokens=32768)
    assert (less.values[OPEN[0]], less.values[OPEN[2]], less.values[OPEN[3]], less.saves) == (True, False, True, True)


def test_a_small_model_on_a_cpu_is_not_planned_for(tmp_path: Path) -> None:
    folder = write("Qwen2.5-7B", tmp_path).parent
    header = json.dumps({"all": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 4_000_000]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4_000_000)
    found = decide(TrainConfig(), folder, cpu(24 * GIB))
    assert (found.values, found.why) == (PLAIN, "without a plan, as it is small")
    assert "small" not in decide(TrainConfig(), folder, cpu(4 * GIB)).why


def test_without_a_plan_a_gpu_gets_what_needs_least(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    found = decide(TrainConfig(), tmp_path, parse_gpus("1x80GB"))
    cache = int(0.1 * parse_gpus("1x80GB").memory)
    assert found.values == {OPEN[0]: True, OPEN[1]: True, OPEN[2]: False, OPEN[3]: False, OPEN[4]: cache}
    assert found.why.startswith("without a plan (")
    unknown = decide(TrainConfig(), tmp_path, None)
    assert (unknown.values[OPEN[0]], OPEN[4] in unknown.values) == (True, False)
    assert decide(TrainConfig(), tmp_path, cpu(24 * GIB)).values == PLAIN


def test_generation_by_transformers_captures_nothing_and_moves_nothing(qwen: Path, traced: dict[str, Models]) -> None:
    found = of(qwen, traced, parse_gpus("8x80GB"), ranks=8, rollout={"backend": "hf"})
    assert (found.values[OPEN[2]], found.values[OPEN[3]]) == (False, True)


def test_a_run_goes_on_with_what_was_decided_when_it_began(qwen: Path, traced: dict[str, Models]) -> None:
    began = of(qwen, traced, parse_gpus("8x40GB"), ranks=8).config
    config = TrainConfig(ranks=8)
    again = as_begun(config, json.loads(began.model_dump_json()))
    assert again == began
    chosen = TrainConfig.model_validate({"ranks": 8, "activation_checkpointing": False})
    assert as_begun(chosen, began.model_dump(mode="json")).activation_checkpointing is False
    assert as_begun(config, {}) == config  # of a run whose settings are not known


def test_values_are_put_where_nothing_is_set(qwen: Path) -> None:
    config = TrainConfig.model_validate({"fsdp": {"reduce_every_micro_batch": False}})
    changed = with_values(config, {OPEN[0]: True, OPEN[1]: True, OPEN[4]: None})
    assert (changed.activation_checkpointing, changed.fsdp.reduce_every_micro_batch) == (True, False)
    assert changed.rollout.kv_cache_bytes is None
    assert context_of(TrainConfig(), qwen) == 32768
