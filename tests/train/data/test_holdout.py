"""No recipe learns from the held-out slice: shown by the row that each thing to learn from came of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from evaluation.suites.held_out import HELD_OUT, IN_SLICE, NOT_IN_SLICE, position, prompt_key
from evaluation.suites.suite import Item
from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from tests.evaluation.suites.chat_rows import chat, text
from tests.feedback.feedback_rows import interaction, put, reward, said
from train import dataflows
from train.config.training import TrainConfig

SHARE = 0.4
ROWS = 60
IMPORTED = range(40, 50)  # the rows that others collected
OWN = range(100, 130)  # the rows of a file


def asked(row: int) -> str:
    return f"question {row:03d}"


SLICE = {row for row in (*range(ROWS), *OWN) if position(asked(row)) < SHARE}


def row_of(tokens: Iterable[int], tokenizer: Any) -> int:
    found = re.findall(r"question (\d{3})", tokenizer.decode(list(tokens)))
    assert len(set(found)) == 1
    return int(found[0])


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Sixty questions of three tenants, each answered well and badly, and judged in every way; some are imported."""
    lake = Lake(str(tmp_path_factory.mktemp("home") / "lake"), LakeConfig())
    lake.create()
    rows, told, rewards = [], [], []
    for i in range(ROWS):
        form = chat(("user", asked(i))) if i % 2 else text(asked(i))
        of: dict[str, Any] = {**form, "tenant": f"tenant {i % 3}"}
        good, bad = f"good{i}", f"bad{i}"
        if i in IMPORTED:
            of |= {"status": "imported", "response_token_ids": [], "logprobs": [], "policy_spans": []}
        rows += [interaction(good, **of, response="yes"), interaction(bad, **of, response="no")]
        by = {"tenant": of["tenant"], "source": "set" if i in IMPORTED else "ann"}
        told += [
            said(f"p{i}", good, "preference", rejected_response_id=bad, **by),
            said(f"c{i}", bad, "correction", text="fine", **by),
            said(f"t{i}", good, "thumb", value=1.0, **by),
        ]
        if i not in IMPORTED:
            rewards += [reward(good, 1.0), reward(bad, 0.0)]
    put(lake, "interactions", rows)
    put(lake, "feedback", told)
    put(lake, "rewards", rewards)
    return lake


def read(lake: Lake, policy: Path, algorithm: str, share: float = SHARE, **data: Any) -> Any:
    settings = {"data": {"held_out_share": 0.2, **data}, "algorithm": {"name": algorithm}, "rollout": {"max_tokens": 8}}
    config = TrainConfig.model_validate(settings).excluding(None, share)
    return dataflows.load(config).read(lake, lake.versions(), config, policy, 0)


def rows_of(data: Any, policy: Path) -> set[int]:
    """The rows of the lake or file of all that a run draws from or is measured by."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    if hasattr(data, "prompts"):
        sources = getattr(data.prompts, "sources", [data.prompts])
        prompts = [prompt.prompt_token_ids for source in sources for prompt in source.items]
        logged = [rollout.prompt for group in data.traffic.items for rollout in group]
        return {row_of(tokens, tokenizer) for tokens in (*prompts, *logged)}
    sequences = [rollout for item in (*data.learned.items, *data.held_out) for rollout in item]
    return {row_of((*rollout.prompt, *rollout.response), tokenizer) for rollout in sequences}


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "online_dpo"])
def test_no_fresh_response_is_sampled_for_a_held_out_prompt(algorithm: str, lake: Lake, policy: Path) -> None:
    data, traffic = read(lake, policy, algorithm), set(range(ROWS)) - set(IMPORTED)
    assert rows_of(data, policy) == traffic - SLICE
    left = len(traffic & SLICE)
    assert str(data) == f"{len(traffic - SLICE)} prompts (left out: 0 too long, 0 {HELD_OUT}, {left} {IN_SLICE})"
    assert rows_of(read(lake, policy, algorithm, share=0.0), policy) == traffic


def test_the_newest_prompts_are_about_as_many_as_without_a_slice(lake: Lake, policy: Path) -> None:
    data = read(lake, policy, "grpo", max_prompts=10)
    assert 5 <= len(rows_of(data, policy)) <= 10
    assert not rows_of(data, policy) & SLICE


def test_a_held_out_prompt_of_a_file_is_left_out_and_counted(lake: Lake, policy: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"prompt": asked(row)}) + "\n" for row in OWN))
    data = read(lake, policy, "grpo", prompts=[{"path": file, "as_user_message": True}], traffic_weight=0)
    assert rows_of(data, policy) == set(OWN) - SLICE
    assert data.own[0].left_out == {IN_SLICE: len(set(OWN) & SLICE)}


def test_no_logged_response_to_a_held_out_prompt_is_learned_from(lake: Lake, policy: Path) -> None:
    data, traffic = read(lake, policy, "grpo", traffic_share=1.0), set(range(ROWS)) - set(IMPORTED)
    assert rows_of(data, policy) == traffic - SLICE
    assert data.left_out == 2 * len(traffic & SLICE)


@pytest.mark.parametrize(("algorithm", "items"), [("dpo", 2), ("kto", 1), ("sft", 1), ("reward_model", 2)])
def test_no_feedback_on_a_held_out_prompt_is_learned_from_be_it_imported(
    algorithm: str, items: int, lake: Lake, policy: Path
) -> None:
    data = read(lake, policy, algorithm)
    assert rows_of(data, policy) == set(range(ROWS)) - SLICE
    assert data.left_out[IN_SLICE] == items * len(SLICE & set(range(ROWS)))
    assert rows_of(read(lake, policy, algorithm, share=0.0), policy) == set(range(ROWS))


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [("grpo", {}), ("grpo", {"traffic_share": 1.0}), ("dpo", {}), ("kto", {}), ("sft", {})],
)
def test_the_prompts_that_were_learned_from_are_known_by_what_suites_know_them_by(
    algorithm: str, settings: dict[str, Any], lake: Lake, policy: Path
) -> None:
    data = read(lake, policy, algorithm, **({"held_out_share": 0} | settings))
    known = {row for row in range(ROWS) if prompt_key(Item(id="a", prompt=asked(row))) in data.learned_prompts}
    assert known == rows_of(data, policy)
    as_a_chat = Item(id="b", messages=[{"role": "user", "content": asked(min(known)).upper()}])
    assert prompt_key(as_a_chat) in data.learned_prompts


def test_the_prompts_of_a_file_are_known_and_those_that_a_run_is_measured_by_are_not(
    lake: Lake, policy: Path, tmp_path: Path
) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"prompt": asked(row)}) + "\n" for row in OWN))
    own = read(lake, policy, "grpo", prompts=[{"path": file, "as_user_message": True}], traffic_weight=0)
    assert {row for row in OWN if prompt_key(Item(id="a", prompt=asked(row))) in own.learned_prompts} == set(
        OWN
    ) - SLICE
    measured = read(lake, policy, "sft")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    held_out = {row_of(item[0].prompt, tokenizer) for item in measured.held_out}
    assert held_out
    for row in held_out:
        assert prompt_key(Item(id="a", prompt=asked(row))) not in measured.learned_prompts


def test_the_reward_model_of_the_slice_learns_from_nothing_else(lake: Lake, policy: Path) -> None:
    data = read(lake, policy, "reward_model", holdout_side="slice")
    assert rows_of(data, policy) == SLICE & set(range(ROWS))
    assert data.left_out[NOT_IN_SLICE] == 2 * len(set(range(ROWS)) - SLICE)


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_no_policy_can_be_trained_on_the_slice(algorithm: str) -> None:
    with pytest.raises(ValueError, match=rf"train\.data\.holdout_side=slice: {algorithm} trains a policy"):
        TrainConfig.model_validate({"data": {"holdout_side": "slice"}, "algorithm": {"name": algorithm}})


def test_the_settings_of_a_reward_model_keep_the_slice_out() -> None:
    config = TrainConfig.model_validate({}).excluding(None, 0.3).of_reward_model()
    assert (config.data.holdout, config.data.holdout_side) == (0.3, "rest")
