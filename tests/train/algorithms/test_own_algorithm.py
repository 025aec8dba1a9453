"""What a user names in the config works as the documentation shows it, in real jobs that run one after the other.

All but one learn from logged responses alone, so that they start no engine.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from job_home import job_context, make_home, metrics_of, results_of, row, run_jobs
from safetensors.torch import load_file

from feedback.config import LakeConfig, RuleConfig, ScoringConfig
from feedback.journal.codec import to_batch
from feedback.lake.tables import Lake
from feedback.schema import TABLES
from feedback.scoring.sources.rules import load_rule
from tests.paths import ROOT
from train.algorithms.grpo import GRPO
from train.batch.packed import PackedBatch, Rollout
from train.config.algorithms import AlgorithmConfig
from train.config.training import TrainConfig
from train.context import JobContext, JobResult
from train.data.rewards import Reward, RewardError, Rewards, logged_responses, try_reward, with_timeout
from train.launch import JobError, run_job

HERE = ROOT / "tests" / "train"
GROUPS, RESPONSES = 6, 4
BASE: dict[str, Any] = {
    "launcher": "torchrun",
    "dtype": "float32",
    "steps": 3,
    "micro_batch_tokens": 64,
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 0},
    "data": {"prompts_per_step": 4, "min_prompts": 4, "traffic_share": 1},
    "checkpoint": {"every_steps": None},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "again": {"name": "grpo"},
    "ranked": {"name": "mine:Ranked"},
    "spo": {"name": "mine:SPO", "options": {"bound": 0.2}},
    "best": {"name": "mine:RewardWeighted", "beta": 0.5},
    "stale": {"name": "grpo", "correction": {"max_staleness": 0}},
    "lone": {"name": "grpo", "lone_baseline": "leave_out"},
}
SAMPLED: dict[str, Any] = {
    "steps": 2,
    "minibatches": 2,
    "algorithm": {"name": "dapo", "group_size": 2, "kl": {"coefficient": 0.1, "target": 0.01, "estimator": "k2"}},
    "rollout": {"max_tokens": 4, "max_model_len": 64, "kv_cache_bytes": 16 * 2**20},
    "data": {"prompts_per_step": 4, "min_prompts": 4, "traffic_share": 0.25},
}
"""The one job that samples."""
RULES = {"rare": {"sql": "response_token_ids[1] < 8", "weight": 3.0}, "short": {"sql": "-len(response_token_ids)"}}
MORE: dict[str, dict[str, Any]] = {
    "spo": {"minibatches": 2},  # at the first update the ratio is 1, and the gradient GRPO's
    "best": {"dataflow": "mine:BestOfN"},
    "kl": {"max_kl": 1e-6, "measure_kl": False},
    "kl_at_end": {"max_kl": 1e-6, "measure_kl": False, "steps": 1},
    "diverged": {"optimizer": {"learning_rate": 1e30, "warmup_steps": 0}},
    "sampled": SAMPLED,
}
RUNS = [*ALGORITHMS, "kl", "kl_at_end", "diverged", "sampled"]


@dataclass(frozen=True)
class Ran:
    """What the jobs left, by the name of the run."""

    root: Path
    results: dict[str, JobResult]
    output: str

    def metrics(self, run: str) -> list[dict[str, float]]:
        return metrics_of(self.root, run)

    def weights(self, run: str) -> dict[str, Any]:
        return load_file(self.root / "policies" / f"v{self.results[run].candidate:06d}" / "model.safetensors")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    root = tmp_path_factory.mktemp("own")
    make_home(root)
    log_responses(root)
    (root / "mine.py").write_text("\n\n".join(documented()))
    jobs = [
        {
            "config": {**BASE, "algorithm": ALGORITHMS.get(run, {"name": "grpo"}), **MORE.get(run, {})},
            "context": job_context(root, run, reward={"rules": RULES} if run == "sampled" else {}, parent=1),
        }
        for run in RUNS
    ]
    printed = run_jobs(root, jobs)
    return Ran(root, {r.run: r for r in map(JobResult.model_validate, results_of(printed))}, printed)


def documented() -> list[str]:
    """The blocks of the section of the README, each of which stands by itself."""
    text = (ROOT / "train" / "README.md").read_text()
    section = text.split("## Your own algorithm, loss, reward or dataflow\n")[1].split("\n## ")[0]
    blocks: list[str] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 5
    assert all(block.count("\n") < 20 for block in blocks), "they are to be short"
    return blocks


def log_responses(root: Path) -> None:
    """Responses that were served and scored: groups, of which half are of an older policy, and two lone ones."""
    interactions, rewards = [], []
    sizes = [RESPONSES] * GROUPS + [1, 1]
    for group, size in enumerate(sizes):
        for i in range(size):
            name = f"logged-{group}-{i}"
            logged = row(name, "odds", [5 + group, 6, 7])
            logged |= {"response_token_ids": [8 + i, 9 + group % 3], "logprobs": [-4.0, -4.1]}
            logged |= {"policy_spans": [{"start": 0, "policy_version": 1 if group % 2 else 0}]}
            interactions.append(logged)
            columns = {"components": [], "missing": [], "scorer": "test", "scored_at": datetime.now(UTC)}
            rewards.append({"response_id": name, "reward": float(i if size > 1 else group), **columns})
    lake = Lake(str(root / "lake"), LakeConfig())
    for name, rows in (("interactions", interactions), ("rewards", rewards)):
        lake.append(name, pa.Table.from_batches([to_batch(rows, TABLES[name])]))


def test_every_documented_algorithm_loss_and_dataflow_of_ones_own_trains_a_candidate(ran: Ran) -> None:
    grpo = ran.weights("grpo")
    for run in ("ranked", "spo", "best"):
        assert ran.results[run].reason is None
        weights = ran.weights(run)
        assert ran.metrics(run)[0]["updates"] == MORE.get(run, {}).get("minibatches", 1)
        assert any(not weights[name].equal(grpo[name]) for name in grpo), f"{run} is to learn something of its own"
    best = ran.metrics("best")[0]
    assert (best["traffic_responses"], best["learned_responses"]) > (4.0, 4.0)
    assert best["learned_responses"] == 4.0, "one response to each prompt"
    assert "weight" in best, "what the loss logs is among the metrics"


def test_the_documented_reward_is_one(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ran.root)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    rows = pa.table({"response_token_ids": pa.array([[1], [1, 2, 3]], pa.list_(pa.int32()))})
    assert load_rule("mine:brevity")(rows) == [0.5, 0.25]


def test_a_run_tells_the_size_of_its_model_where_it_ran_and_what_its_steps_computed(ran: Ran) -> None:
    size = sum(tensor.numel() for tensor in ran.weights("grpo").values())
    resources = json.loads((ran.root / "runs" / "grpo" / "resources.json").read_text())
    assert (resources["parameters"], resources["trained"], resources["peak_flops"]) == (size, size, None)
    [rank] = resources["ranks"]
    assert (rank["pool"], rank["rank"], rank["host"], rank["device"]) == ("all", 0, socket.gethostname(), "cpu")
    assert rank["peak_memory"] > 2**20
    assert f"grpo: Qwen3ForCausalLM, {size:,} parameters, {size:,} trained; all: 1 rank on cpu of " in ran.output
    assert "grpo: peak memory " in ran.output
    for metrics in ran.metrics("grpo"):
        assert 0 < metrics["model_flops"] < 8 * size * metrics["tokens"]
        assert metrics["model_flops_per_s"] > 0
        assert metrics["peak_memory_gib"] * 2**30 <= rank["peak_memory"]
        assert "mfu" not in metrics  # the peak of a processor is unknown
    assert re.search(r"grpo: step 1/3 reward .* s, \d+ s left$", ran.output, re.M)


def test_the_same_seed_and_data_give_the_same_numbers_and_weights(ran: Ran) -> None:
    def numbers(run: str) -> list[dict[str, float]]:
        times = ("time", "seconds", "tokens_per_s", "model_flops_per_s", "peak_memory")
        return [{k: v for k, v in m.items() if not k.startswith(times)} for m in ran.metrics(run)]

    assert numbers("grpo") == numbers("again")
    first, second = ran.weights("grpo"), ran.weights("again")
    assert all(first[name].equal(second[name]) for name in first)


def test_a_run_of_traffic_alone_samples_nothing_and_measures_what_it_learned_from(ran: Ran) -> None:
    step = ran.metrics("grpo")[0]
    assert (step["responses"], step["updates"]) == (0.0, 1.0)
    assert "seconds_generate" not in step
    assert step["traffic_responses"] >= 4
    assert step["kl_behaviour"] != 0.0
    assert {"reward", "kl_ref", "entropy", "clip_fraction", "grad_norm"} <= step.keys()
    assert "logprob_difference_mean" not in step, "nothing was sampled by these weights"
    assert "6 groups and 2 lone responses of traffic" in ran.output


def test_responses_of_policies_beyond_the_bound_and_lone_ones_are_left_out_and_counted(ran: Ran) -> None:
    assert "3 groups and 1 lone responses of traffic (left out: 13 of a policy too far from the parent)" in ran.output
    assert ran.metrics("stale")[0]["traffic_left_out"] == 13.0
    assert "6 groups and 0 lone responses of traffic (left out: 2 alone for their prompt)" in ran.output


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ("kl", r"step \d: KL to the parent policy [\d.]+ passed train\.max_kl=1e-06; nothing is published"),
        (
            "kl_at_end",
            r"step 1: after the last update, KL to the parent policy [\d.]+ passed train\.max_kl=1e-06; nothing is "
            r"published",
        ),
        ("diverged", r"step 2: .*grad_norm is nan.*; nothing is published"),
    ],
)
def test_a_run_that_is_not_well_ends_with_its_reason_and_no_candidate(ran: Ran, run: str, reason: str) -> None:
    result = ran.results[run]
    assert result.candidate is None
    assert re.fullmatch(reason, str(result.reason)), result.reason
    assert result.steps == len(ran.metrics(run)) < BASE["steps"] + 1


def test_dapo_samples_more_prompts_until_enough_groups_teach_something_and_learns_from_no_more(ran: Ran) -> None:
    assert ran.results["sampled"].reason is None
    for step in ran.metrics("sampled"):
        informative = step["responses"] / 2 + step["traffic_responses"] / RESPONSES - step["uninformative_groups"]
        assert step["responses"] in (6.0, 12.0, 18.0), "three prompts a round, three rounds at most"
        assert step["responses"] == 18.0 or informative >= 3
        assert step["learned_responses"] <= 3 * 2 + RESPONSES


def test_rewards_are_measured_by_component_and_weighed(ran: Ran) -> None:
    for step in ran.metrics("sampled"):
        assert 0 <= step["reward/rare"] <= 1
        assert -4 <= step["reward/short"] <= -1
        assert step["reward"] == pytest.approx((3 * step["reward/rare"] + step["reward/short"]) / 4)


def test_the_weight_of_the_kl_is_adapted_from_step_to_step(ran: Ran) -> None:
    first, second = ran.metrics("sampled")
    assert first["kl_coefficient"] == 0.1
    assert first["kl_ref"] == pytest.approx(0, abs=1e-6), "the policy is still its parent"
    assert second["kl_coefficient"] == pytest.approx(0.1 * (1 - 0.2 / 10))


def test_a_reward_that_is_none_is_told_before_any_model_is_loaded(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    (ran.root / "no_reward.py").write_text("def reward(rows): return [1.0]")
    monkeypatch.syspath_prepend(ran.root)
    lake = Lake(str(ran.root / "lake"), LakeConfig())
    rows = logged_responses(lake, lake.versions())
    rule = ScoringConfig(rules={"mine": RuleConfig(function="no_reward:reward")})
    for settings, name in (("no_reward:reward", "train.reward=no_reward:reward"), (rule, "feedback.scoring: mine")):
        with pytest.raises(
            RewardError, match=rf"{name}.* gave none of 20 responses a value \(20 × rule .*1 values for 20"
        ):
            try_reward(Reward(settings, 30), settings, rows, per_token=False)


HANGS = """
import threading
from concurrent.futures import ThreadPoolExecutor

def reward(rows):
    with ThreadPoolExecutor(1) as pool:  # whose threads Python waits for when it ends
        return [pool.submit(threading.Event().wait).result()]
"""


@pytest.mark.timeout(200)
def test_a_job_under_torchrun_whose_reward_hangs_ends_with_its_error_before_a_model_is_loaded(
    ran: Ran, capfd: pytest.CaptureFixture[str]
) -> None:
    (ran.root / "bad_reward.py").write_text(HANGS)
    settings = {**BASE, "data": {"min_prompts": 4}, "rollout": {"max_tokens": 6}, "step_timeout_s": 1}
    context = JobContext(
        run="bad",
        runs=ran.root / "runs",
        policies=ran.root / "policies",
        reward_models=ran.root / "reward_models",
        lake_uri=str(ran.root / "lake"),
        reward="bad_reward:reward",
        python_path=[str(ran.root)],
    )
    with pytest.raises(JobError, match=r"train\.reward=bad_reward:reward: the reward of 20 .*step_timeout_s=1 s"):
        run_job(TrainConfig.model_validate(settings), context)
    said = capfd.readouterr().out
    assert "bad: grpo from policy 1" in said
    assert "starting the workers" not in said


def test_a_reward_that_does_not_answer_ends_with_the_setting_that_bounds_it() -> None:
    never = threading.Event()

    def sleeps(rows: pa.Table) -> Rewards:
        never.wait()
        return Rewards([])

    with pytest.raises(RewardError, match=r"the reward of 3 responses took longer than train\.step_timeout_s=0\.1 s"):
        with_timeout(sleeps, 0.1)(pa.table({"response": ["a", "b", "c"]}))
    never.set()


def test_what_a_reward_raises_is_raised_as_it_is() -> None:
    def fails(rows: pa.Table) -> Rewards:
        raise ArithmeticError("no reward today")

    with pytest.raises(ArithmeticError, match="no reward today"):
        with_timeout(fails, 10)(pa.table({"response": ["a"]}))


def test_advantages_of_another_shape_are_refused_by_the_name_of_the_algorithm() -> None:
    class WrongShape(GRPO):
        def advantages(self, batch: PackedBatch) -> torch.Tensor:
            return batch.rewards

    batch = PackedBatch.pack([Rollout([1], [2, 3], [0.0, 0.0], 1.0, 0)])
    with pytest.raises(ValueError, match=r"name=own:WrongShape: advantages gave a tensor of shape \[1\] for 3"):
        WrongShape(AlgorithmConfig(name="own:WrongShape")).checked_advantages(batch)
