"""Jobs that generate in fp8 by vLLM, and train in bfloat16 or in fp8: on a CPU the numbers are emulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from job_home import job_context, make_home, metrics_of, results_of, run_jobs

ROLLOUT = {"max_tokens": 8, "max_model_len": 64, "kv_cache_bytes": 16 * 2**20}
CONFIG: dict[str, Any] = {
    "dtype": "bfloat16",
    "launcher": "torchrun",
    "steps": 3,
    "micro_batch_tokens": 256,
    "optimizer": {"learning_rate": 3e-3},
    "rollout": ROLLOUT,
    "data": {"prompts_per_step": 4, "min_prompts": 4},
    "algorithm": {"name": "grpo", "group_size": 8, "correction": {"cap": 1.01}},
    "start_timeout_s": 200,
    "step_timeout_s": 100,
}
GENERATION = {"rollout": "fp8_per_channel", "emulate": True}
JOBS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "generation": {"fp8": GENERATION},
    "both": {"fp8": {"training": "rowwise", **GENERATION}},
    "both-gathered": {"fp8": {"training": "rowwise", **GENERATION}, "rollout": {**ROLLOUT, "reshard": "gather"}},
}


class Jobs:
    def __init__(self, home: Path, results: list[dict[str, Any]]) -> None:
        self.home = home
        self.results = dict(zip(JOBS, results, strict=True))

    def weights(self, run: str) -> bytes:
        folder = self.home / "policies" / f"v{self.results[run]['candidate']:06d}"
        return (folder / "model.safetensors").read_bytes()

    def differences(self, run: str) -> list[float]:
        return [step["logprob_difference_mean"] for step in metrics_of(self.home, run)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    home = tmp_path_factory.mktemp("home")
    make_home(home)
    context = {"reward": "users_code:reward", "parent": 1}
    jobs = [{"config": CONFIG | of_run, "context": job_context(home, run, **context)} for run, of_run in JOBS.items()]
    # The runs of a process share its engine.
    return Jobs(home, [*results_of(run_jobs(home, jobs[:1])), *results_of(run_jobs(home, jobs[1:]))])


def test_the_mismatch_of_fp8_is_measured_in_each_step(jobs: Jobs) -> None:
    for plain, fp8 in zip(jobs.differences("bfloat16"), jobs.differences("generation"), strict=True):
        assert 2 * plain < fp8 < 0.2


def test_the_mismatch_is_corrected_by_the_weights_of_any_other_sampler(jobs: Jobs) -> None:
    for step in metrics_of(jobs.home, "generation"):
        assert step["grad_norm"] > 0
        assert 0 < step["capped_fraction"] < 1
        assert 0.9 < step["importance_weight"] < 1.01
        assert step["effective_sample_size"] < 1


def test_weights_arrive_in_an_engine_in_fp8_by_either_way(jobs: Jobs) -> None:
    assert jobs.weights("both") == jobs.weights("both-gathered")
    assert jobs.weights("both") != jobs.weights("generation")
    first, *_, last = jobs.differences("both")
    assert last < 2 * first, "an engine that had missed an update would be further from the policy"
