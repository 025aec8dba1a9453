"""Jobs that sample by transformers, of a policy that vLLM has no attention for on a CPU: its heads are too narrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from job_home import job_context, make_home, metrics_of, results_of, run_jobs
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "launcher": "torchrun",
    "steps": 2,
    "micro_batch_tokens": 64,
    "optimizer": {"learning_rate": 3e-3},
    "rollout": {"backend": "hf", "max_tokens": 6, "max_model_len": 64},
    "data": {"prompts_per_step": 4, "min_prompts": 4},
    "start_timeout_s": 100,
    "step_timeout_s": 60,
}
JOBS: dict[str, dict[str, Any]] = {
    "one": {"algorithm": {"name": "grpo", "group_size": 4}},
    "another": {"algorithm": {"name": "grpo", "group_size": 4}},
    "adapters": {
        "algorithm": {"name": "online_dpo", "group_size": 2},
        "rollout": CONFIG["rollout"] | {"top_p": 0.9, "top_k": 20},
        "lora": {"rank": 2},
    },
    **{
        name: {
            "algorithm": {"name": name, "group_size": 8, "min_reward": least},
            "optimizer": {"learning_rate": 1e-2},
            "steps": 12,
        }
        for name, least in (("best_of_n", None), ("rejection_sampling", -6.5))
    },
}


class Jobs:
    def __init__(self, home: Path, printed: str) -> None:
        self.home, self.printed = home, printed
        self.results = dict(zip(JOBS, results_of(printed), strict=True))

    def weights(self, run: str) -> bytes:
        folder = self.home / "policies" / f"v{self.results[run]['candidate']:06d}"
        return (folder / "model.safetensors").read_bytes()


def narrow(seed: Path) -> None:
    """A policy of heads of 8 in the place of the one that is there, with its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(seed)
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(seed)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    home = tmp_path_factory.mktemp("home")
    make_home(home, narrow)
    context = {"reward": "users_code:reward", "parent": 1}
    printed = run_jobs(
        home,
        [{"config": CONFIG | of_run, "context": job_context(home, run, **context)} for run, of_run in JOBS.items()],
    )
    return Jobs(home, printed)


def test_a_run_learns_what_it_sampled_without_vllm(jobs: Jobs) -> None:
    assert jobs.printed.splitlines()[-1] == "IMPORTED"
    for run in JOBS:
        for step in metrics_of(jobs.home, run):
            assert step["grad_norm"] > 0
        assert jobs.weights(run) != (jobs.home / "seed" / "model.safetensors").read_bytes()


def test_the_policy_that_learns_gives_the_logprobs_that_it_sampled_with(jobs: Jobs) -> None:
    for step in metrics_of(jobs.home, "one"):
        assert step["logprob_difference_max"] < 1e-4


def test_equal_seeds_make_equal_policies(jobs: Jobs) -> None:
    assert jobs.weights("one") == jobs.weights("another")


@pytest.mark.parametrize("name", ["best_of_n", "rejection_sampling"])
def test_what_is_learned_of_the_best_or_the_good_responses_makes_better_ones(jobs: Jobs, name: str) -> None:
    steps = metrics_of(jobs.home, name)
    rewards = [step["reward"] for step in steps]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 1
    assert all(0 < step["learned_responses"] < step["responses"] for step in steps[:2])
    if name == "best_of_n":
        assert {step["learned_responses"] for step in steps} == {4.0}
