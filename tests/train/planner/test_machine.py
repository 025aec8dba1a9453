"""Machines by name and from YAML; what is wrong is named with what would do."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

from train.model.fsdp import causal_lm
from train.planner.cpu_rates import _like, measure_cpu
from train.planner.machine import PRESETS, MachineUnknown, parse_gpus, read_machine


def test_devices_are_named_by_memory_or_by_kind() -> None:
    assert (parse_gpus("8x80GB").devices, parse_gpus("8x80GB").flops) == (8, 312e12)
    assert 78 * 2**30 < parse_gpus("8x80GB").memory < 80 * 2**30
    assert parse_gpus("4xh200").memory == PRESETS["H200"].memory
    assert parse_gpus("16xH100-80").name == "H100-80"


@pytest.mark.parametrize("text", ["80GB", "0x80GB", "8xB52", "8x", "many", "8x2GB"])
def test_another_text_is_refused_with_examples(text: str) -> None:
    with pytest.raises(MachineUnknown, match=rf"--gpus {text}.*8x80GB, 8xA100, 8xH100"):
        parse_gpus(text)


def test_a_file_says_what_differs_from_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text("like: H100\ndevices: 16\nnetwork: 12.5e9\n")
    machine = read_machine(file)
    assert (machine.name, machine.devices, machine.network, machine.flops) == ("slow", 16, 12.5e9, 989e12)
    assert machine.slowest_link(8) == pytest.approx(0.7 * 450e9)
    assert machine.slowest_link(16) == pytest.approx(0.7 * 12.5e9)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gpus: 8", "unknown gpus; it has fields out of: like, name, devices"),
        ("like: T4", "like: T4 is no preset; use one of A100, H100, H200"),
        ("flops: fast", "every field but name and kind is a number"),
        ("memory: 1", "memory must be above"),
        ("- 8", "it has no fields"),
        ("{", "can't be read"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_field(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(text)
    with pytest.raises(MachineUnknown, match=why):
        read_machine(file)
    with pytest.raises(MachineUnknown, match="can't be read"):
        read_machine(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("model", "width"),
    [
        (Qwen3MoeConfig(hidden_size=256, num_experts=4), 256),
        (LlamaConfig(hidden_size=4096), 1024),
        (None, 512),
    ],
)
def test_a_model_that_takes_long_to_time_is_timed_as_a_llama(model: PretrainedConfig | None, width: int) -> None:
    like = _like(model)
    assert (like.model_type, like.hidden_size, like.num_hidden_layers) == ("llama", width, 4)


def test_a_cpus_rates_are_measured_and_leave_no_process_group_behind() -> None:
    threads = torch.get_num_threads()
    made: list[PretrainedConfig] = []

    def make(config: PretrainedConfig) -> PreTrainedModel:
        made.append(config)
        return causal_lm(config)

    small = GPT2Config(n_embd=64, n_layer=3, n_head=2, vocab_size=9000)
    machine = measure_cpu(2, model=small, make=make)
    assert {(of.model_type, of.hidden_size, of.vocab_size) for of in made} == {("gpt2", 64, 8192)}
    assert (machine.devices, machine.kind, machine.name) == (2, "cpu", "this CPU")
    rates = (
        machine.flops,
        machine.float32_share,
        machine.touched,
        machine.operation_s,
        machine.bandwidth,
        machine.link,
    )
    assert all(0 < rate < math.inf for rate in rates)
    assert machine.operation_s < 1e-3
    assert machine.parameter_s >= 0
    assert not torch.distributed.is_initialized()
    assert torch.get_num_threads() == threads
