"""A home without suite, rule or judge, and nothing but thumbs: a whole cycle turns, by real training and evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from deploy.config import root
from deploy.config.root import Settings
from deploy.loop.cycle import run_cycle
from evaluation.results import Evaluation
from evaluation.suites.held_out import position
from evaluation.suites.suite import Suite
from tests.feedback.feedback_rows import interaction, put, said

ASKED = [f"{a}{b}=" for a in "abcdefghijkl" for b in "0123456789"]
SLICE = {prompt for prompt in ASKED if position(prompt) < 0.5}

THUMBS_ALONE = {
    "cycle.recipe": "rlhf",
    "cycle.stop_grace_s": "2",
    "evaluation.holdout": "0.5",
    "evaluation.scorer": "reward_model",
    "evaluation.max_tokens": "4",
    "evaluation.suite_items": "55",
    "evaluation.gate.max_items": "55",  # then it is refused, if it has not passed
    "train.launcher": "torchrun",
    "train.dtype": "float32",
    "train.steps": "1",
    "train.micro_batch_tokens": "256",
    "train.algorithm.group_size": "4",
    "train.data.prompts_per_step": "4",
    "train.rollout.max_tokens": "4",
    "train.reward_model.steps": "6",
    "train.reward_model.items_per_step": "8",
    "train.reward_model.min_items": "16",
    "train.checkpoint.every_steps": "null",
}


@pytest.mark.long
def test_thumbs_alone_turn_a_whole_cycle_whose_gate_scores_by_feedback_that_no_training_saw(
    home_with_policy: Settings, nothing_left: Callable[[], list[str]]
) -> None:
    home_with_policy.path("suite.jsonl").unlink()
    options = [("home", str(home_with_policy.home)), ("serve.port", str(home_with_policy.serve.port))]
    settings = root.load(None, [*options, *THUMBS_ALONE.items()], {})
    assert not settings.feedback.scoring.rules
    tokenizer = AutoTokenizer.from_pretrained(settings.policy_store().get(1).path)
    lake = settings.lake()
    lake.create()
    rows, thumbs = [], []
    for i, prompt in enumerate(ASKED):
        answer = "yes" if i % 3 else "no"
        ids = tokenizer(answer).input_ids
        sampled = {"response": answer, "response_token_ids": ids, "logprobs": [-1.0] * len(ids)}
        rows.append(interaction(f"r{i}", prompt=prompt, prompt_token_ids=tokenizer(prompt).input_ids, **sampled))
        thumbs.append(said(f"t{i}", f"r{i}", "thumb", value=float(answer == "yes")))
    put(lake, "interactions", rows)
    put(lake, "feedback", thumbs)

    printed: list[str] = []
    record = run_cycle(settings, say=printed.append)
    assert record.status in ("promoted", "refused"), record.reason
    wanted = ["score", "suite", "evaluation-reward-model", "reward-model", "train", "evaluate"]
    assert [stage.name for stage in record.stages][:6] == wanted

    stores = settings.stores()
    proxy, judge = stores.reward_models.get(1), stores.evaluation_reward_models.get(1)
    assert (stores.reward_models.versions(), stores.evaluation_reward_models.versions()) == ([1], [1])
    suite = Suite.load(settings.path("suite.jsonl"))
    assert len(suite.items) == 55
    assert {item.prompt for item in suite.items} <= SLICE

    resolved = settings.resolved()
    found = Evaluation.load(resolved.evaluation.folder / f"{record.candidate}-vs-1.json")
    assert found.scorer.startswith("reward_model@")
    details = {"model": str(judge.path), "version": 1, "agreement": judge.metrics["agreement"]}
    assert found.scorer_details == details
    assert found.n == (record.verdict or {})["items"] in (50, 55), "it was looked at all of them, or decided before"
    assert 0 < found.incumbent.reward.low <= found.incumbent.reward.high < 1
    said_of = "\n".join(printed)
    rest = len(ASKED) - len(SLICE)
    assert f"{len(SLICE)} not of the held-out slice" not in said_of
    assert f"{rest} not of the held-out slice" in said_of
    assert proxy.sha256 != judge.sha256
    runs = {path.parent.name: json.loads(path.read_text()) for path in Path(resolved.train.runs).glob("*/start.json")}
    sides = {name: start["config"]["data"]["holdout_side"] for name, start in runs.items()}
    assert sides == {
        "cycle-000001": "rest",
        "cycle-000001-reward-model": "rest",
        "cycle-000001-evaluation-reward-model": "slice",
    }
    assert nothing_left() == []
