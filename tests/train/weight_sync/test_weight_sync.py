"""Resharding between training and vLLM in processes that do both: biases, replicated heads, an untied padded head.

The checks are the functions of reshard_ranks.py; they run in one start of the processes for each case of sizes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loadtests.tiny_model import make_model_folder
from tests.paths import ROOT
from tests.train.reshard_ranks import CHECKS, CHECKS_OF_SLICES


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    folder = make_policy(tmp_path_factory.mktemp("policy"), key_value_heads=1, vocabulary=258)  # fewer heads than ranks
    return run_checks(folder, "tests.train.reshard_ranks", 2, 2, 1)


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


def run_checks(folder: Path, module: str, ranks: int, *arguments: object) -> dict[str, str | None]:
    """What the module prints whose ``main`` so many ranks run."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*torchrun, "-m", module, str(folder), *map(str, arguments)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, f"torchrun ended with {done.returncode}:\n{done.stderr[-4000:]}"
    answer: dict[str, str | None] = json.loads(lines[-1])
    return answer


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
    found = run_checks(policy, "tests.train.reshard_ranks", ranks, engine, training)
    assert found == dict.fromkeys(check.__name__ for check in CHECKS_OF_SLICES)
