"""Resharding between training and vLLM in processes that do both: biases, replicated heads, an untied padded head.

The checks are the functions of reshard_ranks.py; they run in one start of the processes for each case of sizes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loadtests.tiny_model import make_model_folder
from tests.train.reshard_ranks import CHECKS, CHECKS_OF_SLICES
from tests.train.torchrun_checks import answer_of_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    folder = make_policy(tmp_path_factory.mktemp("policy"), key_value_heads=1, vocabulary=258)  # fewer heads than ranks
    return answer_of_ranks("tests.train.reshard_ranks", folder, 2, 1, ranks=2, timeout=800)


def make_policy(home: Path, *, key_value_heads: int, vocabulary: int) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = make_model_folder(home, 0)  # for its tokenizer
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2 * key_value_heads,
            num_key_value_heads=key_value_heads,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_resharding(results: dict[str, str | None], check: str) -> None:
    assert results[check] is None, results[check]


# (ranks, those of an engine, those that share each layer in training): as many, more in training, more in an engine.
@pytest.mark.parametrize(
    ("ranks", "engine", "training"),
    [(2, 2, 2), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((2, 1, 2), (4, 4, 2)))],
)
def test_slices_of_tensor_parallel_training_arrive(tmp_path: Path, ranks: int, engine: int, training: int) -> None:
    policy = make_policy(tmp_path, key_value_heads=2, vocabulary=320)  # padding would make slices differ
    found = answer_of_ranks("tests.train.reshard_ranks", policy, engine, training, ranks=ranks, timeout=800)
    assert found == dict.fromkeys(check.__name__ for check in CHECKS_OF_SLICES)
