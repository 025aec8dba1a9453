"""Which prompts are of the held-out slice: the same whichever way a prompt comes, and all turns of a conversation."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.suites.held_out import IN_SLICE, NOT_IN_SLICE, HeldOut, position
from evaluation.suites.suite import Item
from tests.evaluation.suites.chat_rows import (
    WITH_DEFAULT_SYSTEM,
    chat,
    make_tokenizer,
    rendered,
    text,
    token_ids,
    turns,
)

ASKED = "What is 2 + 2?"
TALK = [("user", ASKED), ("assistant", "4"), ("user", "Sure?"), ("assistant", "Yes"), ("user", "Why?")]
POET = ("system", "You are a poet.")
PARTS = [{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " 2 + 2?"}]}]

FORMS = {
    "text": text(ASKED),
    "text in other case and spacing": text("  what IS\n2 +  2? "),
    "text with a full-width sign": text("What is 2 ＋ 2?"),
    "token ids": token_ids(ASKED),
    "messages": chat(("user", ASKED)),
    "messages with a system's": chat(POET, ("user", ASKED)),
    "messages after a greeting": chat(("assistant", "Hello, how can I help?"), ("user", ASKED)),
    "messages in parts": {**text("templated otherwise"), "messages": json.dumps(PARTS)},
    "text that the client rendered": text(rendered(("user", ASKED))),
    "text with a system's that the client rendered": text(rendered(POET, ("user", ASKED))),
    "token ids that the client rendered": token_ids(rendered(POET, ("user", ASKED))),
    "the second turn": chat(*TALK[:3]),
    "the third turn": chat(*TALK),
    "the third turn under a system's": chat(POET, *TALK),
    "the second turn that the client rendered": text(rendered(*TALK[:3])),
    "the third turn that the client rendered": text(rendered(POET, *TALK)),
    "the third turn as token ids that the client rendered": token_ids(rendered(*TALK)),
    "the third turn with the answer's beginning": text(rendered(*TALK) + "Because"),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("how", FORMS)
def test_a_prompt_and_all_turns_of_its_conversation_are_on_one_side_however_they_come(how: str, policy: Path) -> None:
    assert HeldOut(policy=policy, share=0.5).opening(FORMS[how]) == "what is 2 + 2?"


@pytest.mark.parametrize("ends", ["", "{% if not add_generation_prompt %}<eos>{% endif %}"])
def test_prompts_rendered_without_the_templates_own_system_message_are_known_too(ends: str, tmp_path: Path) -> None:
    make_tokenizer(WITH_DEFAULT_SYSTEM + ends).save_pretrained(tmp_path)
    item = Item(id="1", prompt=ASKED)
    held_out = HeldOut(items=(item,), policy=tmp_path, share=0.5)
    assert [held_out.opening(row) for row in FORMS.values()] == ["what is 2 + 2?"] * len(FORMS)
    last = text(rendered(("user", "Hi"), ("assistant", "Hello"), ("user", ASKED)))
    assert held_out.contains(text(rendered(("user", ASKED))))
    assert held_out.contains(token_ids(rendered(("user", ASKED))))
    assert held_out.contains(last)
    assert not held_out.contains(text(rendered(("user", "What is 2 + 3?"))))


@pytest.mark.parametrize(
    "row",
    [
        text("What is 2 + 3?"),
        text(f"More: {ASKED}"),
        chat(("user", "Hi"), ("assistant", "Hello"), ("user", ASKED)),
        chat(("user", "Ask me"), ("assistant", ASKED), ("user", "4")),
        chat(("system", ASKED), ("user", "Go")),
        text(f"User: {ASKED}\nBot: 4\nUser: Sure?"),
    ],
)
def test_another_prompt_has_a_side_of_its_own(row: dict[str, Any], policy: Path) -> None:
    assert HeldOut(policy=policy, share=0.5).opening(row) != "what is 2 + 2?"


def test_the_side_is_a_plain_hash_of_the_text() -> None:
    """So that it is the same on every machine, and in every version."""
    first_64_bits = int(hashlib.sha256(b"what is 2 + 2?").hexdigest()[:16], 16)
    assert position("what is 2 + 2?") == first_64_bits / 2**64
    below, above = (position("what is 2 + 2?") + step for step in (1e-9, -1e-9))
    assert HeldOut(share=below).in_slice(chat(("user", ASKED)))
    assert not HeldOut(share=above).in_slice(chat(("user", ASKED)))


def test_a_larger_share_only_adds_prompts_and_is_what_it_says() -> None:
    rows = [chat(("user", f"question {i}")) for i in range(1000)]
    slices = [
        {i for i, row in enumerate(rows) if HeldOut(share=share).in_slice(row)} for share in (0.0, 0.05, 0.3, 0.6)
    ]
    assert slices[0] == set()
    assert slices[1] < slices[2] < slices[3]
    for share, found in zip((0.05, 0.3, 0.6), slices[1:], strict=True):
        assert abs(len(found) / 1000 - share) < 4 * (share * (1 - share) / 1000) ** 0.5


def test_each_side_says_why_the_other_is_left_out() -> None:
    rows = [chat(("user", f"question {i}")) for i in range(50)]
    rest, inside = HeldOut(share=0.4), HeldOut(share=0.4, learned="slice")
    assert {(rest.reason(row), inside.reason(row)) for row in rows} == {(IN_SLICE, None), (None, NOT_IN_SLICE)}
    assert {HeldOut().reason(row) for row in rows} == {None}


@pytest.mark.parametrize("template", [None, "{{ messages[-1]['content'] }}", "{{ raise_exception('no') }}"])
def test_a_tokenizer_without_a_template_of_turns_will_do(template: str | None, tmp_path: Path) -> None:
    make_tokenizer(template).save_pretrained(tmp_path)
    held_out = HeldOut(policy=tmp_path, share=0.5)
    for form in ("text", "token ids", "messages", "the third turn"):
        assert held_out.opening(FORMS[form]) == "what is 2 + 2?"


def test_a_text_with_half_a_character_has_a_side() -> None:
    row = {"prompt": None, "messages": json.dumps(turns(("user", "a\ud800"))), "prompt_token_ids": [1]}
    assert HeldOut(share=0.999999).in_slice(row)
