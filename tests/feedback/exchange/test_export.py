"""Feedback of the lake as sets that TRL's formats describe."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from feedback_rows import NOON, interaction, put, said

from feedback.exchange.export import Filter, export
from feedback.lake.tables import Lake

CHAT = json.dumps([{"role": "user", "content": "two and two"}])


def fill(lake: Lake, **columns: Any) -> None:
    """Two responses that are compared, of which the worse is corrected; a thumb on each."""
    put(
        lake,
        "interactions",
        [
            interaction("good", response="four", **columns),
            interaction("bad", response="five", policy_spans=[{"start": 0, "policy_version": 2}], **columns),
        ],
    )
    put(
        lake,
        "feedback",
        [
            said("p", "good", "preference", rejected_response_id="bad"),
            said("c", "bad", "correction", text="4", minute=1),
            said("t1", "good", "thumb", value=1.0, minute=2),
            said("t2", "bad", "thumb", value=0.0, minute=3),
        ],
    )


@pytest.fixture
def plain(lake: Lake) -> Lake:
    fill(lake)
    return lake


def rows(lake: Lake, form: Any, style: Any = "auto", **only: Any) -> list[dict[str, Any]]:
    return export(lake, form, Filter(**only), style).table.to_pylist()


def test_prompts_that_are_text_make_sets_of_trls_standard_format(plain: Lake) -> None:
    pair = {"prompt": "two and two", "chosen": "four", "rejected": "five"}
    corrected = {"prompt": "two and two", "chosen": "4", "rejected": "five"}
    assert rows(plain, "trl-preference") == [pair, corrected, pair]  # by preference, correction, thumbs
    assert rows(plain, "trl-kto") == [
        {"prompt": "two and two", "completion": "four", "label": True},
        {"prompt": "two and two", "completion": "five", "label": False},
    ]
    assert rows(plain, "trl-sft") == [{"prompt": "two and two", "completion": "4"}]
    assert rows(plain, "prompts") == [{"prompt": "two and two", "answer": "four"}]


def test_prompts_that_are_messages_make_sets_of_the_conversational_format(lake: Lake) -> None:
    fill(lake, messages=CHAT, prompt="<user>two and two")
    asked = [{"role": "user", "content": "two and two"}]
    four, five = ([{"role": "assistant", "content": text}] for text in ("four", "five"))
    assert rows(lake, "trl-preference")[0] == {"prompt": asked, "chosen": four, "rejected": five}
    assert rows(lake, "trl-kto")[1] == {"prompt": asked, "completion": five, "label": False}
    assert rows(lake, "prompts") == [{"prompt": asked, "answer": "four"}]
    assert rows(lake, "trl-sft", "text") == [{"prompt": "<user>two and two", "completion": "4"}]


def test_rows_of_the_other_kind_of_prompt_are_left_out_and_counted(lake: Lake) -> None:
    fill(lake, messages=CHAT)
    call = json.dumps([{"role": "user", "content": "a", "tool_calls": [{"id": "1"}]}])
    put(
        lake,
        "interactions",
        [
            interaction("text", prompt="one"),
            interaction("ids", prompt=None),
            interaction("call", messages=call),
            interaction("parts", messages='[{"role": "user", "content": [{"type": "text", "text": "b"}]}]'),
        ],
    )
    put(lake, "feedback", [said(f"t-{i}", i, "thumb", value=1.0, minute=9) for i in ("text", "ids", "call", "parts")])
    found = export(lake, "trl-kto", Filter())
    assert [row["prompt"][0]["content"] for row in found.table.to_pylist()] == ["two and two", "two and two", "b"]
    assert found.left_out == {
        "with a prompt that is no chat messages": 2,
        "with messages that hold more than text": 1,
    }
    assert export(lake, "trl-kto", Filter(), "text").left_out == {"with a prompt of token ids alone": 1}


def test_filters_leave_out_other_times_policies_and_tenants(plain: Lake) -> None:
    at = NOON + timedelta(minutes=3)
    assert [row["label"] for row in rows(plain, "trl-kto", since=at)] == [False]
    assert [row["label"] for row in rows(plain, "trl-kto", until=at)] == [True]
    assert [row["label"] for row in rows(plain, "trl-kto", policy=2)] == [False]
    assert rows(plain, "trl-preference", policy=1) == []
    assert export(plain, "trl-kto", Filter(tenant="other")).left_out == {"of another tenant": 2}
    assert len(rows(plain, "prompts", policy=2, tenant="default", since=NOON)) == 1
    assert rows(plain, "prompts", policy=3) == rows(plain, "prompts", until=NOON) == []


def test_of_metadata_what_is_millraces_own_is_no_column_and_a_key_prompt_hides_no_prompt(lake: Lake) -> None:
    put(lake, "interactions", [interaction("a", metadata={"millrace:sampling": "{}", "prompt": "x", "level": "3"})])
    assert rows(lake, "prompts") == [{"prompt": "two and two", "level": "3", "metadata.prompt": "x"}]


def test_a_lake_without_feedback_makes_a_set_without_rows_but_with_its_columns(lake: Lake) -> None:
    assert export(lake, "trl-preference", Filter()).table.column_names == ["prompt", "chosen", "rejected"]
