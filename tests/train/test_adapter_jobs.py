"""Runs that generate beside their adapters and publish them: one on a policy, one on its adapter, one that merges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from job_home import job_context, make_home, metrics_of, results_of, run_jobs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from serve.policies.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, rank_of
from serve.policies.probe import measure
from serve.policies.store import PolicyStore
from serve.policies.whole_policies import whole

CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "launcher": "torchrun",
    "steps": 2,
    "micro_batch_tokens": 64,
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
    "algorithm": {"name": "grpo", "group_size": 4},
    "rollout": {"max_tokens": 6, "max_model_len": 64, "kv_cache_bytes": 16 * 2**20},
    "data": {"prompts_per_step": 4, "min_prompts": 4},
    "lora": {"rank": 3, "alpha": 12, "sync": "adapters", "publish": "adapter", "publish_rank": 6},
    "start_timeout_s": 300,
    "step_timeout_s": 200,
}
RUNS = {"first": 1, "on top": 2, "too large": 3}
"""Runs, and their parents: each is the candidate of the run before."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    make_home(home)
    context = {"reward": "users_code:reward"}
    jobs = [
        {"config": CONFIG, "context": job_context(home, run.replace(" ", "-"), **context, parent=parent)}
        for run, parent in RUNS.items()
    ]
    assert [found["candidate"] for found in results_of(run_jobs(home, jobs))] == [2, 3, 4]
    return home


def test_generation_beside_adapters_says_what_training_says(home: Path) -> None:
    for run in RUNS:
        for step in metrics_of(home, run.replace(" ", "-")):
            assert step["logprob_difference_max"] < 1e-4
            assert step["grad_norm"] > 0


def test_a_candidate_is_an_adapter_of_the_policy_that_has_the_weights(home: Path) -> None:
    store = PolicyStore(home / "policies")
    first, second, third = map(store.get, (2, 3, 4))
    base = {"version": 1, "sha256": store.get(1).sha256}
    assert [(one.parent, one.base) for one in (first, second, third)] == [(1, base), (2, base), (3, None)]
    assert [rank_of(one.path) for one in (first, second)] == [3, 6]
    assert json.loads((second.path / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == "v000001"
    assert not {ADAPTER_CONFIG, ADAPTER_WEIGHTS} & third.files.keys()
    small = set(store.get(1).files) - {"model.safetensors"}
    for one in (first, second):
        assert set(one.files) == small | {ADAPTER_CONFIG, ADAPTER_WEIGHTS}
        store.verify(one.version)
    assert set(third.files) == set(store.get(1).files)


def test_the_numbers_of_an_adapter_are_those_of_the_model_that_it_makes(home: Path) -> None:
    store = PolicyStore(home / "policies")
    for version in (2, 3, 4):
        policy = store.get(version)
        assert policy.probe is not None
        found = measure(whole(policy).path)
        assert found["tokens"] == policy.probe["tokens"]
        torch.testing.assert_close(
            torch.tensor(found["logprobs"]), torch.tensor(policy.probe["logprobs"]), atol=1e-6, rtol=0
        )


def test_what_two_runs_learned_is_in_the_stacked_adapter(home: Path) -> None:
    """The second run began with the first one's model: the base and both adapters, one after the other."""
    from peft import PeftModel

    store = PolicyStore(home / "policies")
    base = AutoModelForCausalLM.from_pretrained(store.get(1).path, dtype=torch.float32)
    by_peft = PeftModel.from_pretrained(base, store.get(3).path).merge_and_unload().state_dict()
    first, second = (load_file(whole(store.get(version)).path / "model.safetensors") for version in (2, 3))
    changed = [name for name, tensor in second.items() if not torch.equal(tensor, first[name])]
    assert changed
    for name, tensor in second.items():
        torch.testing.assert_close(tensor, by_peft[name], atol=1e-6, rtol=1e-5)
