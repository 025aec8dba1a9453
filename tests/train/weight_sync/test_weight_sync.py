"""Resharding between FSDP2 and vLLM in two processes that do both: biases, replicated heads, an untied padded head.

The checks are the functions of reshard_ranks.py; they run once, in one start of the two processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from loadtests.tiny_model import make_model_folder
from tests.paths import ROOT
from tests.train.reshard_ranks import CHECKS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

    folder = make_model_folder(tmp_path_factory.mktemp("policy"), 0)  # for its tokenizer
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,  # fewer than tensor-parallel ranks
            max_position_embeddings=64,
            tie_word_embeddings=False,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).save_pretrained(folder)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.train.reshard_ranks", str(folder)],
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
