"""A mixture of experts in training and in vLLM: its experts arrive in vLLM's fused weights, each slice by the plan."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtests.tiny_model import make_model_folder
from tests.train.torchrun_checks import answer_of_ranks


def make_mixture(home: Path, *, width: int = 32, positions: int = 64) -> Path:
    """``width``: of each expert. Two ranks have half of it, which vLLM fills up for a CPU's kernel.

    ``positions``: that a sequence may have.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = make_model_folder(home, 0)  # for its tokenizer
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=width,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def run(policy: Path, ranks: int, engine: int, folder: Path) -> dict[str, Any]:
    return answer_of_ranks("tests.train.mixture_ranks", policy, engine, folder, ranks=ranks, timeout=500)


@pytest.mark.parametrize(("ranks", "engine"), [(2, 2), pytest.param(1, 1, marks=pytest.mark.long)])
def test_an_engine_that_weights_were_sent_to_answers_as_one_that_loads_their_export(
    tmp_path: Path, ranks: int, engine: int
) -> None:
    policy, exported = make_mixture(tmp_path / "policy"), tmp_path / "exported"
    sent = run(policy, ranks, engine, exported)
    for file in policy.glob("*token*"):
        shutil.copy(file, exported / file.name)
    fresh = run(exported, ranks, engine, exported)["loaded"]
    assert sent["by the plan"] == fresh
    assert sent["in place"] == fresh
    assert sent["gathered"] == fresh
    assert sent["alike"], "each weight in the form of its kernel, however it came"
    assert sent["others"] != fresh
    assert sent["loaded"] != fresh
    names = {
        f"model.layers.{n}.mlp.experts.{e}.{kind}_proj.weight"
        for n in (0, 1)
        for e in range(4)
        for kind in ("gate", "up", "down")
    }
    assert names <= set(sent["checked"]), "each expert is compared under its own name"
