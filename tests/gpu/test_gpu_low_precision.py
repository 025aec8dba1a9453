"""Weights and products of few bits in training, by torchao, on one device or two: against float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.gpu_suite import DEVICE, gpu_test, on_ranks, ranks_here
from tests.gpu.test_gpu_training import a_batch, a_pass, expected, policy

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
