"""Jobs that train adapters over weights in NF4, and sample from what they train by vLLM or by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from job_home import job_context, make_home, metrics_of, results_of, run_jobs
from safetensors.torch import load_file

CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "launcher": "torchrun",
    "steps": 2,
    "micro_batch_tokens": 256,
    "optimizer": {"learning_rate": 3e-3},
    "rollout": {"max_tokens": 8, "max_model_len": 64, "kv_cache_bytes": 16 * 2**20},
    "data": {"prompts_per_step": 4, "min_prompts": 4},
    "algorithm": {"name": "grpo", "group_size": 8},
    "lora": {"rank": 2, "base": "nf4"},
    "start_timeout_s": 200,
    "step_timeout_s": 100,
}
HF = {"rollout": {"backend": "hf", "max_tokens": 8, "max_model_len": 64}}
JOBS: dict[str, dict[str, Any]] = {"vllm": {}, "hf": HF}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    make_home(home)
    return home


@pytest.fixture(scope="module")
def candidates(home: Path) -> dict[str, int]:
    """By run."""
    found = {}
    for run, of_run in JOBS.items():  # a process each: they generate by other means
        context = job_context(home, run, reward="users_code:reward", parent=1)
        [result] = results_of(run_jobs(home, [{"config": CONFIG | of_run, "context": context}]))
        found[run] = result["candidate"]
    return found


@pytest.mark.parametrize("run", JOBS)
def test_generation_samples_from_the_rounded_weights_from_the_first_step_on(
    home: Path, candidates: dict[str, int], run: str
) -> None:
    steps = metrics_of(home, run)
    assert len(steps) == CONFIG["steps"]
    for step in steps:
        assert step["grad_norm"] > 0
        assert step["logprob_difference_max"] < 1e-4


@pytest.mark.parametrize("run", JOBS)
def test_what_is_published_differs_from_the_parent_by_the_adapters_alone(
    home: Path, candidates: dict[str, int], run: str
) -> None:
    parent = load_file(home / "seed" / "model.safetensors")
    published = load_file(home / "policies" / f"v{candidates[run]:06d}" / "model.safetensors")
    assert parent.keys() == published.keys()
    for name, weight in parent.items():
        learned = published[name] - weight
        if ".layers." in name and name.endswith("_proj.weight"):
            # float32 sums leave rounding beside the two directions.
            assert torch.linalg.matrix_rank(learned.double(), atol=1e-6) <= CONFIG["lora"]["rank"], name
        else:
            assert not learned.any(), name
    assert any((published[name] != weight).any() for name, weight in parent.items())
