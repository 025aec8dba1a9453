"""Weights and products of few bits in training, by torchao, on one device or two: against float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.gpu_suite import DEVICE, gpu_test, on_ranks, ranks_here
from tests.gpu.test_gpu_training import a_batch, a_model, a_pass, expected, policy, weights_of

__all__ = ["policy"]  # the fixture


@gpu_test("part", "the numbers of fp8 are emulated", packages=("torchao", "pydantic"), capability=(8, 9))
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_in_fp8_is_near_to_bfloat16(policy: Path, tmp_path: Path, recipe: Any, compiled: bool) -> None:
    import torch

    from train.config.fp8 import Fp8Config

    log_probs, gradients = expected(policy, a_batch())
    fp8 = Fp8Config(training=recipe, emulate=DEVICE == "cpu")
    options = {"compile_layers": "inductor" if DEVICE == "cuda" else "aot_eager"} if compiled else {}
    for found in on_ranks(ranks_here(), a_pass, tmp_path, policy, "bfloat16", options, {}, {"fp8": fp8}):
        difference = (found["log_probs"] - log_probs).abs()
        assert 0 < float(difference.mean()) < 0.1
        flat = [torch.cat([of[n].flatten() for n in sorted(gradients)]) for of in (found["gradients"], gradients)]
        assert float(torch.cosine_similarity(*flat, dim=0)) > 0.95


def four_bits(rank: int, folder: Path, policy: Path, lora: Any) -> dict[str, Any]:
    """Log-probabilities and gradients with adapters over weights in NF4; what these are as numbers; where they are."""
    import torch

    from tests.train.tiny_models import whole
    from train.model.fsdp import token_log_probs
    from train.model.lora import merged_parameters
    from train.model.low_precision.nf4 import is_packed

    model = a_model(policy, "float32", {}, {}, lora=lora)
    model.train()
    for _ in range(2):  # the second pass gathers into what the first has made
        log_probs, _ = token_log_probs(model, a_batch())
        (log_probs * weights_of(a_batch())).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    packed = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters() if is_packed(p)]
    return {
        "log_probs": log_probs.detach(),
        "finite": all(bool(torch.isfinite(whole(gradient)).all()) for gradient in gradients),
        "merged": {name: whole(tensor).cpu() for name, tensor in merged_parameters(model)},
        "homes": {weight.quantized_data.device.type for weight in packed},
        "packed": len(packed),
    }


@gpu_test("part", "collectives are gloo's, or none", packages=("torchao", "peft", "pydantic"))
def test_adapters_over_weights_of_four_bits_compute_what_they_round_to(policy: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.train.tiny_models import plain_log_probs
    from train.config.sections import LoraConfig

    for found in on_ranks(ranks_here(), four_bits, tmp_path, policy, LoraConfig(rank=4, base="nf4")):
        assert (found["homes"], found["packed"], found["finite"]) == ({DEVICE}, 7 * 4, True)
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
        exact = plain_log_probs(model, a_batch()).detach()
        model.load_state_dict(found["merged"])
        rounded = plain_log_probs(model, a_batch()).detach()
        torch.testing.assert_close(found["log_probs"], rounded, atol=2e-4, rtol=0)
        assert float((rounded - exact).abs().max()) > 1e-3
