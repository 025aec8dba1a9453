"""Adapters into vLLM's own slots, in processes that train and generate: what is said is what merged weights say.

The checks are the functions of adapter_ranks.py; they run in one start of the processes for each case of sizes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loadtests.tiny_model import make_model_folder
from tests.train.adapter_ranks import CHECKS, CHECKS_IN_BFLOAT16
from tests.train.torchrun_checks import answer_of_ranks


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


def make_policy(home: Path) -> Path:
    """Biases, grouped queries, an output layer of its own, heads as wide as vLLM's on a CPU must be."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = make_model_folder(home, 0)  # for its tokenizer
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.1}
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=320,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            **sizes,
            **ends,
        )
    ).save_pretrained(folder)
    return folder


# (ranks of an engine, those that share each layer in training)
@pytest.mark.parametrize(("engine", "training"), [(1, 1), (2, 1), (2, 2)])
def test_an_engine_beside_adapters_says_what_merged_weights_say(policy: Path, engine: int, training: int) -> None:
    found = answer_of_ranks("tests.train.adapter_ranks", policy, engine, training, "float32", ranks=2, timeout=800)
    assert not any(found.values()), next(filter(None, found.values()))
    assert found.keys() == {check.__name__ for check in CHECKS}


def test_small_adapters_are_not_rounded_away_in_bfloat16(policy: Path) -> None:
    found = answer_of_ranks("tests.train.adapter_ranks", policy, 1, 1, "bfloat16", ranks=1, timeout=800)
    assert found == dict.fromkeys(check.__name__ for check in CHECKS_IN_BFLOAT16)
