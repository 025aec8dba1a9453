"""Runs whose responses go on over several steps: real vLLM and FSDP2, on one rank that does both, one of them stopped.

The learning rate is as good as none, so that all policies are one: then the trainer must say of every token what was
said when it was sampled, however many policies had a part in the response.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from job_home import job_context, make_home, metrics_of, results_of, run_jobs

STEPS, PROMPTS, GROUP, STALENESS = 6, 3, 4, 2
LOGGED = 12
CONFIG: dict[str, Any] = {
    "launcher": "torchrun",
    "dtype": "float32",
    "steps": STEPS,
    "micro_batch_tokens": 256,
    "optimizer": {"learning_rate": 1e-12},
    "rollout": {
        "max_tokens": 48,
        "max_model_len": 64,
        "kv_cache_bytes": 16 * 2**20,
        "max_num_seqs": 10,  # so that groups end one after the other
        "staleness": STALENESS,
    },
    "data": {"prompts_per_step": PROMPTS, "min_prompts": 4},
    "algorithm": {"name": "grpo", "group_size": GROUP},
    "checkpoint": {"every_steps": 2, "asynchronous": False, "keep": 9},
    "hooks": ["stale:Stop"],
    "start_timeout_s": 200,
    "step_timeout_s": 100,
}
CODE = """
import json
from pathlib import Path
from train.observe.hooks import Hook

def reward(rows):
    with (Path(__file__).parent / "asked").open("a") as file:
        for tokens in rows["response_token_ids"].to_pylist():
            print(json.dumps(tokens), file=file)
    return [float(len(tokens)) for tokens in rows["response_token_ids"].to_pylist()]

class Stop(Hook):
    def on_step(self, step, metrics):
        if step == 4 and self.run.name == "broken" and not (mark := self.run.folder / "stopped").exists():
            mark.touch()
            (Path(__file__).parent / "asked").rename(self.run.folder / "asked")
            raise RuntimeError("stopped on purpose")

    def on_checkpoint(self, steps, folder):
        if steps == 4 and (mark := self.run.folder / "kept").exists() is False:
            mark.write_bytes((folder / "driver.json").read_bytes())
"""


@dataclass(frozen=True)
class Stopped:
    """``kept``: what the checkpoint has of the dataflow. ``asked``: token ids that were rewarded once it went on."""

    metrics: list[dict[str, float]]
    kept: dict[str, Any]
    asked: list[list[int]]
    asked_before: list[list[int]]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    home = tmp_path_factory.mktemp("home")
    make_home(home)
    (home / "stale.py").write_text(CODE)
    job = {"config": CONFIG, "context": job_context(home, "broken", parent=1, reward="stale:reward")}
    printed = run_jobs(home, [job, job])
    assert "stopped on purpose" in printed
    assert "goes on after step 4" in printed
    [result] = results_of(printed)
    assert result["candidate"] is not None, printed
    folder = home / "runs" / "broken"
    asked, before = (sampled(file) for file in (home / "asked", folder / "asked"))
    shutil.rmtree(home / "policies")
    return Stopped(metrics_of(home, "broken"), json.loads((folder / "kept").read_text())["dataflow"], asked, before)


def sampled(file: Path) -> list[list[int]]:
    """Without the logged responses that a reward is tried on before a run begins."""
    return [json.loads(line) for line in file.read_text().splitlines()][LOGGED:]


def test_the_trainer_says_of_every_token_what_was_said_when_it_was_sampled(stopped: Stopped) -> None:
    assert len(stopped.metrics) == STEPS
    for metrics in stopped.metrics:
        assert metrics["logprob_difference_max"] < 1e-3
        assert metrics["responses"] == PROMPTS * GROUP


def test_responses_went_on_over_steps_and_no_token_is_older_than_allowed(stopped: Stopped) -> None:
    assert max(metrics["partial_fraction"] for metrics in stopped.metrics) > 0
    assert 0 < max(metrics["staleness_max"] for metrics in stopped.metrics) <= STALENESS
    for metrics in stopped.metrics:
        assert 0 <= metrics["staleness_mean"] <= metrics["staleness_max"] <= STALENESS
        assert metrics["queued_groups"] >= 0


def test_a_checkpoint_has_what_has_ended_and_was_not_learned_from(stopped: Stopped) -> None:
    groups = stopped.kept["sampled"]["groups"]
    assert 0 < len(groups) <= PROMPTS * STALENESS + PROMPTS
    ended = [one for group in groups for one in group["ended"].values()]
    assert ended
    for one in ended:
        assert len(one["token_ids"]) == len(one["log_probs"])
        starts, versions = zip(*one["policies"], strict=True)
        assert starts[0] == 0
        assert list(versions) == sorted(set(versions))
        assert max(versions) <= 4


def test_a_run_that_goes_on_asks_for_no_reward_that_it_has_and_learns_from_all_that_it_had(stopped: Stopped) -> None:
    rewarded = sum(len(group["rewards"]) for group in stopped.kept["sampled"]["groups"])
    assert len(stopped.asked) == (STEPS - 4) * PROMPTS * GROUP - rewarded
    assert len(stopped.asked_before) >= 5 * PROMPTS * GROUP, "five steps had their rewards, and some of the next"
