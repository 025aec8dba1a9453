"""Whole jobs that sample, rewarded by a rule, a reward model and a judge over HTTP, or token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from job_home import job_context, make_home, metrics_of, results_of, run_jobs
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from tests.feedback.judge_server import Answer, Asked, JudgeServer, judge_server, says
from train.config.training import TrainConfig
from train.context import JobContext, JobResult
from train.launch import JobError, run_job

KEY = "sk-5d41402abc4b2a76"
BASE: dict[str, Any] = {
    "launcher": "torchrun",
    "dtype": "float32",
    "steps": 2,
    "micro_batch_tokens": 64,
    "rollout": {"max_tokens": 4, "max_model_len": 64, "kv_cache_bytes": 16 * 2**20},
    "data": {"prompts_per_step": 4, "min_prompts": 4},
    "checkpoint": {"every_steps": None},
}
GRPO: dict[str, Any] = {"name": "grpo", "group_size": 2}
ON_THE_ACTORS_POOL = {"placement": {"reward": "all"}}
TOKENS = """
def reward(rows):
    return [[float(token) for token in ids] for ids in rows["response_token_ids"].to_pylist()]
"""


@dataclass(frozen=True)
class Ran:
    root: Path
    results: dict[str, JobResult]
    output: str
    server: JudgeServer


def verdict(asked: Asked, _: int) -> Answer:
    """By the length of the response, in words that have no score where it has none."""
    if asked.body["model"] == "dies" and "A: x\n" not in asked.text:  # it knows the logged response alone
        return Answer(500, {"error": "no GPU"})
    length = len(asked.text.split("A: ")[1].split("\n\n")[0])
    return says(json.dumps({"score": min(length, 10)}))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    root = tmp_path_factory.mktemp("sources")
    make_home(root)
    (root / "by_token.py").write_text(TOKENS)
    model = reward_model(root)
    with judge_server(verdict) as server:
        mixed = {
            "human": {"weight": 2.0, "model": {"name": str(model), "device": "cpu"}},
            "rules": {"short": {"sql": "1 / (1 + len(response_token_ids))"}},
            "judge": judge(server, root, model="m", api_key=KEY),
        }
        dying = {"judge": judge(server, root, model="dies", attempts=1)}
        steps = {**BASE, "algorithm": {"name": "reinforce_pp"}}
        jobs = [
            a_job(root, "mixed", {**BASE, **ON_THE_ACTORS_POOL, "algorithm": GRPO}, mixed),
            a_job(root, "again", {**BASE, "algorithm": GRPO}, mixed),
            a_job(root, "dies", {**BASE, "algorithm": GRPO}, dying),
            a_job(root, "tokens", steps, "by_token:reward"),
        ]
        printed = "".join(run_jobs(root, [job]) for job in jobs)  # a process has one engine
        yield Ran(root, {r.run: r for r in map(JobResult.model_validate, results_of(printed))}, printed, server)


def a_job(root: Path, run: str, config: dict[str, Any], reward: Any) -> dict[str, Any]:
    return {"config": config, "context": job_context(root, run, reward=reward, parent=1)}


def judge(server: JudgeServer, root: Path, **more: Any) -> dict[str, Any]:
    rubric = "Q: {prompt}\nA: {response}"
    return {"url": server.url, "rubric": rubric, "cache": str(root / "judge"), "backoff_s": 0.01, **more}


def reward_model(root: Path) -> Path:
    """With the policy's tokenizer."""
    folder = root / "reward_model"
    tokenizer = AutoTokenizer.from_pretrained(root / "seed")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = Qwen3Config(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **sizes, **heads)
    torch.manual_seed(3)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.timeout(800)
def test_a_model_of_the_votes_a_rule_and_a_judge_reward_rollouts_on_the_actors_pool(ran: Ran) -> None:
    assert ran.results["mixed"].reason is None, ran.output
    for step in metrics_of(ran.root, "mixed"):
        mean = (2 * step["reward/human"] + step["reward/short"] + step["reward/judge"]) / 4
        assert step["reward"] == pytest.approx(mean)
        assert step["unrewarded_responses"] == 0
        assert 0 < step["reward/human"] < 1
    keys = {asked.headers["Authorization"] for asked in ran.server.asked if asked.body["model"] == "m"}
    assert keys == {f"Bearer {KEY}"}


def test_the_reward_is_tried_by_component_before_an_engine_starts_wherever_it_runs(ran: Ran) -> None:
    lines = [line for line in ran.output.splitlines() if line.startswith(("mixed: ", "again: "))]
    for run, first in (("mixed", "starting the workers"), ("again", "trying the reward on 12 logged responses")):
        of_run = [line for line in lines if line.startswith(run)]
        tried = next(i for i, line in enumerate(of_run) if "human 12 of 12, mean 0." in line)
        assert "; short 12 of 12, mean 0.500; judge 12 of 12, mean 0.100" in of_run[tried]
        assert any(first in line for line in of_run[:tried])
        assert any("workers up" in line for line in of_run[tried:])


def test_where_a_reward_runs_changes_no_number_and_no_verdict_is_asked_for_twice(ran: Ran) -> None:
    times = ("seconds", "time", "tokens_per_s", "model_flops_per_s", "peak_memory")
    first, second = (
        [{k: v for k, v in m.items() if not k.startswith(times)} for m in of_run]
        for of_run in (metrics_of(ran.root, "mixed"), metrics_of(ran.root, "again"))
    )
    assert first == second
    texts = [asked.text for asked in ran.server.asked if asked.body["model"] == "m"]
    assert len(texts) == len(set(texts))


def test_a_judge_that_fails_on_all_of_a_step_stops_the_run_and_says_why(ran: Ran) -> None:
    result = ran.results["dies"]
    assert (result.candidate, result.stopped) == (None, True)
    assert str(result.reason).startswith("step 1: judge gave none of 8 responses a value (8 × HTTP 500: no GPU")


def test_rewards_of_tokens_are_learned_from_and_logged_as_their_sum(ran: Ran) -> None:
    assert ran.results["tokens"].reason is None, ran.output
    assert all(step["updates"] == 1 and step["reward"] > 4 for step in metrics_of(ran.root, "tokens"))


def test_the_published_policy_names_its_reward_without_the_judges_key(ran: Ran) -> None:
    policy = ran.root / "policies" / f"v{ran.results['mixed'].candidate:06d}"
    texts = [path.read_text() for path in policy.rglob("*.json")]
    scorer = json.loads((ran.root / "runs" / "mixed" / "start.json").read_text())["scorer"]
    assert scorer.startswith("human+short+judge@")
    assert any(scorer in text for text in texts)
    files = [path for folder in ("runs", "policies") for path in (ran.root / folder).rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


@pytest.mark.timeout(200)
def test_a_model_that_is_none_ends_a_job_on_a_pool_before_an_engine_starts_and_in_one_line(
    ran: Ran, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = ran.root / "seed"
    config = TrainConfig.model_validate({**BASE, **ON_THE_ACTORS_POOL, "algorithm": GRPO})
    context = job_context(ran.root, "none", reward={"model": {"name": str(policy), "device": "cpu"}})
    problem = rf"feedback\.scoring: reward model {policy} has no weights for score\.weight: is it a seq[^\n]*"
    with pytest.raises(JobError, match=problem) as error:
        run_job(config, JobContext.model_validate(context))
    assert "Traceback" not in str(error.value)
    assert "workers up" not in capfd.readouterr().out
