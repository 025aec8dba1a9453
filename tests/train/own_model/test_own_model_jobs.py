"""Jobs of a model that neither transformers nor vLLM knows: a class of the user's, and code that comes with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from job_home import job_context, make_home, metrics_of, results_of, run_jobs
from safetensors.torch import load_file
from tiny_own_model import SOURCE, put_tiny_model

from feedback.trusted_code import code_files

CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "launcher": "torchrun",
    "steps": 2,
    "micro_batch_tokens": 64,
    "algorithm": {"name": "grpo", "group_size": 4},
    "optimizer": {"learning_rate": 3e-3},
    "rollout": {"backend": "hf", "max_tokens": 6, "max_model_len": 48},
    "data": {"prompts_per_step": 4, "min_prompts": 4},
    "start_timeout_s": 100,
    "step_timeout_s": 60,
}
CLASS = {"class": "users_model:TinyLM"}


def run(home: Path, settings: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    context = {"reward": "users_code:reward", "parent": 1}
    jobs = [
        {"config": CONFIG | {"model": model}, "context": job_context(home, name, **context)}
        for name, model in settings.items()
    ]
    return results_of(run_jobs(home, jobs))


def policy(home: Path, result: dict[str, Any]) -> Path:
    return home / "policies" / f"v{result['candidate']:06d}"


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "policy.json").read_text())
    return found


def learned(home: Path, name: str, result: dict[str, Any]) -> None:
    for step in metrics_of(home, name):
        assert step["grad_norm"] > 0
        assert step["logprob_difference_max"] < 1e-4
    before, after = (load_file(folder / "model.safetensors") for folder in (home / "seed", policy(home, result)))
    assert before.keys() == after.keys()
    assert not [key for key in before if torch.equal(before[key], after[key])]


@pytest.fixture(scope="module")
def by_class(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    home = tmp_path_factory.mktemp("home")
    make_home(home, put_tiny_model)
    (home / "users_model.py").write_text(SOURCE)
    return home, run(home, {"plain": CLASS, "sharper": CLASS | {"config_overrides": {"sharpness": 10000.0}}})


def test_a_class_of_ones_own_learns(by_class: tuple[Path, list[dict[str, Any]]]) -> None:
    home, (plain, _) = by_class
    learned(home, "plain", plain)
    folder = policy(home, plain)
    assert (folder / "config.json").read_bytes() == (home / "seed" / "config.json").read_bytes()
    made_by = manifest(folder)["lineage"]["model"]
    assert made_by == {"class": "users_model:TinyLM", "class_sha256": code_files(home)["users_model.py"]}
    assert "tokens" in manifest(folder)["probe"]


def test_what_is_published_has_the_config_that_it_was_trained_with(by_class: tuple[Path, list[dict[str, Any]]]) -> None:
    home, (plain, sharper) = by_class
    learned(home, "sharper", sharper)
    stored = json.loads((home / "seed" / "config.json").read_text())
    assert json.loads((policy(home, sharper) / "config.json").read_text()) == stored | {"sharpness": 10000.0}
    assert manifest(policy(home, sharper))["lineage"]["model"]["config_overrides"] == {"sharpness": 10000.0}
    weights = [load_file(policy(home, of) / "model.safetensors")["layers.0.mix.weight"] for of in (plain, sharper)]
    assert not torch.equal(*weights)


def test_code_that_comes_with_a_policy_learns_and_goes_with_what_is_published(tmp_path: Path) -> None:
    make_home(tmp_path, lambda seed: put_tiny_model(seed, module="modeling_tiny"))
    files = code_files(tmp_path / "seed")
    (result,) = run(tmp_path, {"own": {"trusted_code": files}})
    learned(tmp_path, "own", result)
    folder = policy(tmp_path, result)
    assert (folder / "modeling_tiny.py").read_text() == SOURCE
    assert (folder / "config.json").read_bytes() == (tmp_path / "seed" / "config.json").read_bytes()
    assert manifest(folder)["lineage"]["model"] == {"code": files}
    assert manifest(folder)["files"]["modeling_tiny.py"]["sha256"] == files["modeling_tiny.py"]
