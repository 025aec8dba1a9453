"""A policy's numbers where memory has no room for the policy."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from serve.policies import probe
from serve.policies.folder import safetensors_header
from tests.train import tiny_models
from train.export.piecewise import piecewise_model


def policy(folder: Path, name: str) -> Path:
    torch.manual_seed(0)
    getattr(tiny_models, name)().save_pretrained(folder, max_shard_size="10KB")
    return folder


def needed(folder: Path) -> int:
    """Bytes of a policy in float32."""
    headers = map(safetensors_header, folder.glob("*.safetensors"))
    return 4 * sum(math.prod(entry["shape"]) for header in headers for entry in header.values())


def have(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(probe.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt_neox", "gpt2", "mixture"])
def test_a_module_at_a_time_a_policy_has_the_numbers_that_it_has_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, made = policy(tmp_path, name), []

    def piecewise(folder: Path, model_class: Any) -> nn.Module:
        made.append(piecewise_model(folder, model_class))
        return made[-1]

    whole = probe.measure(folder, piecewise=piecewise)
    assert not made
    assert len(whole["tokens"]) > 0
    have(monkeypatch, 2 * needed(folder) - 1)
    assert probe.measure(folder, piecewise=piecewise) == whole
    assert made


def test_only_the_module_that_computes_has_its_weights(tmp_path: Path) -> None:
    model = piecewise_model(policy(tmp_path, "mixture"))
    own = {m: sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()}
    held = []

    def look(module: nn.Module, *_: Any) -> None:
        held.append(sum(p.numel() for p in model.parameters() if not p.is_meta))
        assert held[-1] == own[module] or not own[module], "its own, or those of the experts that it is part of"

    for module in model.modules():
        module.register_forward_pre_hook(look)
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))
    assert max(held) == max(own.values())
    assert all(p.is_meta for p in model.parameters())


def test_without_room_for_the_largest_of_the_weights_the_reason_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = policy(tmp_path, "llama")
    have(monkeypatch, 4 * 67 * 32)
    assert "and the largest alone takes 0 MiB" in probe.measure(folder, piecewise=piecewise_model)["skipped"]


class Computing(Qwen3ForCausalLM):
    """Has a buffer that is neither stored nor computed by transformers' rules."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("scale", torch.ones(3), persistent=False)


def test_a_buffer_that_only_the_models_own_code_computes_is_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = policy(tmp_path, "qwen3")
    have(monkeypatch, 2 * needed(folder) - 1)
    found = probe.measure(folder, Computing, piecewise_model)
    assert "can't be read piece by piece: scale is not stored" in found["skipped"]
