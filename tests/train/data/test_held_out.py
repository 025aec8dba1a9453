"""Nothing is learned from the prompts that policies are judged by, in whatever form traffic asks them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.suites.held_out import HELD_OUT, HeldOut, conversation
from evaluation.suites.suite import SuiteError
from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from tests.evaluation.suites.chat_rows import chat, make_tokenizer, rendered, text, token_ids, turns
from tests.feedback.feedback_rows import interaction, put, reward, said
from train import dataflows
from train.config.training import TrainConfig

ITEM, TALK = "What is 2 + 2?", [("user", "Hello"), ("assistant", "Hi"), ("user", "yes")]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite of a text, of messages with a system's, and of a conversation."""
    path = tmp_path_factory.mktemp("suites") / "suite.jsonl"
    items: list[dict[str, Any]] = [
        {"id": "text", "prompt": ITEM},
        {"id": "chat", "messages": turns(("system", "Be brief."), ("user", "Name a colour"))},
        {"id": "talk", "messages": turns(*TALK)},
    ]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


PARTS = [{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " 2 + 2?"}]}]

ASKS = {
    "as it stands": text(ITEM),
    "in other case and spacing": text("  what is\n2 +  2? "),
    "with a full-width sign": text("What is 2 ＋ 2?"),
    "with an invisible character": text("What is 2\u200b + 2?"),
    "as token ids": token_ids(ITEM),
    "as other token ids": token_ids("what is 2 + 2?"),
    "as messages": chat(("user", ITEM)),
    "as messages with a system's": chat(("system", "You are a poet."), ("user", ITEM)),
    "as the last of several turns": chat(("user", "Hi"), ("assistant", "Hello"), ("user", "what is 2 + 2?")),
    "as an early turn": chat(("user", ITEM), ("assistant", "4"), ("user", "Sure?")),
    "as parts of a message": {**text("templated otherwise"), "messages": json.dumps(PARTS)},
    "rendered by the client": text(rendered(("user", ITEM))),
    "rendered by the client with a system's": text(rendered(("system", "Be a poet."), ("user", "what is 2 + 2?"))),
    "rendered as token ids": token_ids(rendered(("system", "Be a poet."), ("user", ITEM))),
    "an item of messages as text": text("name a colour"),
    "an item of messages as messages": chat(("system", "Be brief."), ("user", "Name a colour")),
    "an item of messages without its system's": chat(("user", "Name a colour")),
    "an item of messages rendered": text(rendered(("system", "Be brief."), ("user", "Name a colour"))),
    "a conversation": chat(*TALK),
    "a conversation under a system's": chat(("system", "Be brief."), *TALK),
}
OTHERS = {
    "another text": text("What is 2 + 3?"),
    "more than the item": text(f"1{ITEM}"),
    "another message": chat(("user", "What is 12 + 2?")),
    "the system's text of an item": chat(("system", "Name a colour"), ("user", "Go")),
    "the last words of a conversation": chat(("user", "More?"), ("assistant", "Well"), ("user", "yes")),
    "these alone": text("yes"),
    "what only the assistant said": chat(("user", "Ask me"), ("assistant", ITEM), ("user", "4")),
    "an empty message": chat(("user", "")),
    "nothing": token_ids(""),
}


@pytest.mark.parametrize("how", ASKS)
def test_a_prompt_of_a_suite_is_known_in_every_form(how: str, suite: Path, policy: Path) -> None:
    assert HeldOut.load([suite], policy).contains(ASKS[how])


@pytest.mark.parametrize("how", OTHERS)
def test_another_prompt_is_not_taken_for_one(how: str, suite: Path, policy: Path) -> None:
    assert not HeldOut.load([suite], policy).contains(OTHERS[how])


@pytest.mark.parametrize("template", [None, "{{ messages[-1]['content'] }}", "{{ raise_exception('no') }}"])
def test_a_tokenizer_without_a_template_of_turns_will_do(template: str | None, tmp_path: Path, suite: Path) -> None:
    make_tokenizer(template).save_pretrained(tmp_path)
    held_out = HeldOut.load([suite], tmp_path)
    assert held_out.contains(ASKS["in other case and spacing"])
    assert held_out.contains(ASKS["as messages with a system's"])
    assert not held_out.contains(OTHERS["another text"])


def test_without_a_suite_nothing_is_held_out(policy: Path) -> None:
    assert not HeldOut.load([], policy).contains(text(ITEM))


def test_an_image_is_part_of_what_is_asked() -> None:
    def shown(data: str) -> str:
        parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": data}}]
        return conversation([{"role": "user", "content": parts}])

    assert shown("data:a") == shown("data:a") != shown("data:b")
    assert shown("data:a") != conversation(turns(("user", "What is this?")))


# ----------------------------------------------------------------------------------------------------- a run's data


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Every form of the suite's prompts and three others; each answered well and badly, and judged in every way."""
    lake = Lake(str(tmp_path_factory.mktemp("home") / "lake"), LakeConfig())
    lake.create()
    asked = [*ASKS.values(), *list(OTHERS.values())[:3]]
    rows, told, rewards = [], [], []
    for i, columns in enumerate(asked):
        good, bad = f"good{i}", f"bad{i}"
        rows += [interaction(good, **columns, response="yes"), interaction(bad, **columns, response="no")]
        told += [
            said(f"p{i}", good, "preference", rejected_response_id=bad),
            said(f"c{i}", bad, "correction", text="fine"),
            said(f"t{i}", good, "thumb", value=1.0),
        ]
        rewards += [reward(good, 1.0), reward(bad, 0.0)]
    put(lake, "interactions", rows)
    put(lake, "feedback", told)
    put(lake, "rewards", rewards)
    return lake


def read(lake: Lake, policy: Path, suites: list[Path], algorithm: str, **data: Any) -> Any:
    settings = {"data": {"held_out_share": 0, "exclude_suites": suites, **data}, "algorithm": {"name": algorithm}}
    config = TrainConfig.model_validate(settings | {"rollout": {"max_tokens": 8}})
    return dataflows.load(config).read(lake, lake.versions(), config, policy, 0)


@pytest.mark.parametrize("limit", [3, 1000])
def test_no_response_is_sampled_for_a_prompt_of_the_suite(lake: Lake, policy: Path, suite: Path, limit: int) -> None:
    data = read(lake, policy, [suite], "grpo", max_prompts=limit)
    distinct = {tuple(columns["prompt_token_ids"]) for columns in ASKS.values()}
    if limit == 1000:
        assert {prompt.prompt for prompt in data.prompts.items} == {OTHERS[name]["prompt"] for name in list(OTHERS)[:3]}
        assert str(data) == f"3 prompts (left out: 0 too long, {len(distinct)} {HELD_OUT})"
    else:
        held_out = HeldOut.load([suite], policy)
        assert not any(held_out.contains(vars(prompt)) for prompt in data.prompts.items)
    assert read(lake, policy, [], "grpo").usable == len(distinct) + 3


def test_logged_responses_to_one_are_left_out_and_counted(lake: Lake, policy: Path, suite: Path) -> None:
    data = read(lake, policy, [suite], "grpo", traffic_share=1.0)
    assert (data.usable, data.left_out) == (3, 2 * len(ASKS))
    assert f"{2 * len(ASKS)} {HELD_OUT}" in str(data)


@pytest.mark.parametrize(("algorithm", "items"), [("dpo", 2), ("kto", 1), ("sft", 1), ("reward_model", 2)])
def test_feedback_on_a_response_to_one_is_left_out_and_counted(
    algorithm: str, items: int, lake: Lake, policy: Path, suite: Path
) -> None:
    data = read(lake, policy, [suite], algorithm)
    assert data.usable == 3 * items
    assert data.left_out[HELD_OUT] == len(ASKS) * items
    assert f"{len(ASKS) * items} {HELD_OUT}" in str(data)
    assert HELD_OUT not in read(lake, policy, [], algorithm).left_out


def test_a_run_ends_before_it_begins_if_its_suite_can_not_be_read(lake: Lake, policy: Path, tmp_path: Path) -> None:
    for algorithm in ("grpo", "dpo"):
        with pytest.raises(SuiteError, match=r"nowhere\.jsonl can't be read"):
            read(lake, policy, [tmp_path / "nowhere.jsonl"], algorithm)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "refusal", "refusal": "hi", "text": 5}],
        [{"type": "text", "text": None}],
        [{"type": "text", "text": {"a": [1]}}, "plain"],
        [["nested"], 7],
        {"text": "an object"},
        5,
    ],
)
def test_a_message_of_any_form_is_compared_and_ends_no_run(content: Any, policy: Path, suite: Path) -> None:
    row = {"prompt_token_ids": [1, 2], "prompt": None, "messages": json.dumps([{"role": "user", "content": content}])}
    assert not HeldOut.load([suite], policy).contains(row)


def test_an_item_is_found_beside_a_part_that_is_no_text(policy: Path, suite: Path) -> None:
    turns = [{"role": "user", "content": [{"type": "refusal", "text": 5}]}, {"role": "user", "content": ITEM}]
    row = {"prompt_token_ids": [1, 2], "prompt": None, "messages": json.dumps(turns)}
    assert HeldOut.load([suite], policy).contains(row)
