"""Whole jobs with environments: real vLLM, FSDP2, a policy store and a lake, under torchrun's controller and Ray's."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from job_home import job_context, metrics_of, results_of, run_jobs

from deploy.examples.agent.seed import make_seed
from deploy.examples.agent.task import keys
from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from serve.policies.store import PolicyStore
from tests.paths import ROOT

HERE = ROOT / "tests" / "train"
STEPS = 4
CONFIG: dict[str, Any] = {
    "launcher": "torchrun",
    "dtype": "float32",
    "steps": STEPS,
    "minibatches": 2,
    "micro_batch_tokens": 512,
    "algorithm": {"name": "grpo", "group_size": 4, "credit": "turn"},
    "optimizer": {"learning_rate": 1e-3},
    "rollout": {"max_tokens": 18, "max_model_len": 64, "kv_cache_bytes": 2**26},
    "environment": {"name": "players:Counting", "arguments": {"turns": 2}, "step_seconds": 60},
    "checkpoint": {"every_steps": 2, "asynchronous": False},
    "start_timeout_s": 200,
    "step_timeout_s": 200,
}
STALE: dict[str, Any] = {
    "optimizer": {"learning_rate": 1e-12},  # all policies are one
    "environment": {"name": "players:Counting", "arguments": {"turns": 2, "jitter": 0.02}, "episodes_at_once": 24},
    "rollout": {"staleness": 1},
}
HOOK = """
from pathlib import Path
from train.observe.hooks import Hook

class Stop(Hook):
    def on_step(self, step, metrics):
        if step == 2 and self.run.name == "broken" and not (mark := self.run.folder / "stopped").exists():
            mark.touch()
            raise RuntimeError("stopped on purpose")
"""
FORGETFUL = "<user>{{ messages[-1].content }}{% if add_generation_prompt %}<assistant>{% else %}<eos>{% endif %}"
"""A template that shows the last message alone."""


@dataclass(frozen=True)
class Jobs:
    home: Path
    results: dict[str, dict[str, Any]]
    printed: str


def merged(**settings: Any) -> dict[str, Any]:
    return {
        **CONFIG,
        **{k: {**CONFIG[k], **v} if isinstance(v, dict) and k in CONFIG else v for k, v in settings.items()},
    }


def make_agent_home(root: Path) -> None:
    make_seed(root / "seed", steps=120, batch=32)
    store = PolicyStore(root / "policies")
    for template in (None, FORGETFUL):
        if template is not None:
            (root / "seed" / "chat_template.jinja").write_text(template)
        policy = store.publish(root / "seed", parent=None, lineage={}, metrics={})
        if template is None:
            store.promote(policy.version, who="test", why="test", expected=None)
    Lake(str(root / "lake"), LakeConfig()).create()
    shutil.copy(HERE / "environments" / "players.py", root)
    (root / "agent_hooks.py").write_text(HOOK)
    for name, wrong in (("good", [""]), ("bad", ["", "raises", "", "nan", "", "raises", "", ""])):
        rows = [{"prompt": f"{k}?", "wrong": wrong[i % len(wrong)]} for i, k in enumerate(keys()[:8])]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def data(home: Path, name: str = "good") -> dict[str, Any]:
    source = {"path": str(home / f"{name}.jsonl"), "metadata": {"wrong": "wrong"}}
    return {"prompts_per_step": 8, "min_prompts": 1, "traffic_weight": 0, "prompts": [source]}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    home = tmp_path_factory.mktemp("agents")
    make_agent_home(home)
    hooks = {"hooks": ["agent_hooks:Stop"]}
    bad = {"environment": {"name": "players:Bad"}, "data": data(home, "bad"), "steps": 1}
    settings = {
        "whole": merged(data=data(home), **hooks),
        "broken": merged(data=data(home), **hooks),
        "again": merged(data=data(home), **hooks),
        "dropped": merged(**{**bad, "environment": {"name": "players:Bad", "max_dropped": 0.6}}),
        "stopped": merged(**bad),
        "ppo": merged(data=data(home), steps=1, algorithm={"name": "ppo", "group_size": 2}),
        "split": merged(data=data(home), steps=1),
        "stale": merged(data=data(home), **STALE),
    }
    runs = [
        {
            "config": config,
            "context": job_context(
                home, "broken" if name == "again" else name, parent=2 if name == "split" else 1, reward=None
            ),
        }
        for name, config in settings.items()
    ]
    printed = run_jobs(home, runs)
    names = [name for name in settings if name != "broken"]
    return Jobs(home, dict(zip(names, results_of(printed), strict=True)), printed)


def weights(home: Path, version: int) -> str:
    folder = PolicyStore(home / "policies").get(version).path
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.safetensors")))).hexdigest()


def test_a_run_learns_from_episodes_whose_logprobs_are_the_trainers(jobs: Jobs) -> None:
    assert jobs.results["whole"]["candidate"] is not None, jobs.printed
    for metrics in metrics_of(jobs.home, "whole"):
        assert 1 <= metrics["turns"] <= 2
        assert metrics["responses"] == 32
        assert metrics["logprob_difference_max"] < 1e-3
        assert "episodes_dropped" not in metrics


def test_a_run_that_was_stopped_goes_on_to_the_weights_of_one_that_was_not(jobs: Jobs) -> None:
    assert "stopped on purpose" in jobs.printed
    assert "goes on after step 2" in jobs.printed
    whole, again = jobs.results["whole"], jobs.results["again"]
    assert again["steps"] == whole["steps"] == STEPS
    assert weights(jobs.home, again["candidate"]) == weights(jobs.home, whole["candidate"])


def test_episodes_go_on_over_steps_with_tokens_that_are_the_policys(jobs: Jobs) -> None:
    assert jobs.results["stale"]["candidate"] is not None, jobs.printed
    found = metrics_of(jobs.home, "stale")
    assert len(found) == STEPS
    for metrics in found:
        assert metrics["responses"] == 32
        assert metrics["logprob_difference_max"] < 1e-3
        assert metrics["staleness_max"] <= 1
    assert max(metrics["staleness_mean"] for metrics in found) > 0


def test_dropped_episodes_are_counted_by_reason_and_the_run_goes_on(jobs: Jobs) -> None:
    assert jobs.results["dropped"]["candidate"] is not None, jobs.printed
    [metrics] = metrics_of(jobs.home, "dropped")
    assert metrics["episodes_dropped/raised"] == 8
    assert metrics["episodes_dropped/reward_not_finite"] == 4
    assert metrics["episodes_dropped"] == 12
    assert metrics["responses"] == 20
    assert "dropped of 32 episodes: 8 × raised: step raised RuntimeError: as it was told" in jobs.printed


def test_past_a_share_the_run_stops_and_names_the_commonest_reason(jobs: Jobs) -> None:
    result = jobs.results["stopped"]
    assert (result["candidate"], result["stopped"]) == (None, True)
    assert result["reason"] == (
        "step 1: 12 of 32 episodes were dropped, a larger share than train.environment.max_dropped=0.2; most of them, "
        "8, because the environment raised an exception (8 × step raised RuntimeError: as it was told); nothing is "
        "published"
    )


def test_ppo_learns_from_episodes_by_turn(jobs: Jobs) -> None:
    assert jobs.results["ppo"]["candidate"] is not None, jobs.printed
    [metrics] = metrics_of(jobs.home, "ppo")
    assert metrics["value_loss"] > 0


def test_under_a_template_that_rewrites_earlier_turns_each_turn_is_a_sequence(jobs: Jobs) -> None:
    assert jobs.results["split"]["candidate"] is not None, jobs.printed
    [metrics] = metrics_of(jobs.home, "split")
    assert metrics["responses"] == 32
    assert metrics["learned_responses"] == round(32 * metrics["turns"]) > 32
    assert metrics["logprob_difference_max"] < 1e-3


def test_under_ray_with_two_engines_the_first_episodes_are_the_same(jobs: Jobs) -> None:
    config = merged(data=data(jobs.home), launcher="ray", ranks=2, steps=1, hooks=[])
    spec = [{"config": config, "context": job_context(jobs.home, "ray", parent=1, reward=None)}]
    (jobs.home / "ray.json").write_text(json.dumps(spec))
    done = subprocess.run(
        [sys.executable, str(HERE / "job_driver.py"), str(jobs.home / "ray.json")],
        env={**os.environ, "PYTHONPATH": f"{jobs.home}:{ROOT}:{HERE}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [metrics], first = metrics_of(jobs.home, "ray"), metrics_of(jobs.home, "whole")[0]
    for name in ("reward", "reward_std", "turns", "response_length", "truncated_fraction"):
        assert metrics[name] == pytest.approx(first[name], rel=1e-6), name
