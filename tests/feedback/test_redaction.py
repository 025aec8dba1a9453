"""Texts before they are recorded: what the ready functions take out, and what is kept of rows and of failures."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from feedback.config import READY_REDACTIONS, CaptureConfig
from feedback.events import FeedbackIn
from feedback.redaction import READY, RedactionError, Redactor, card, email, phone, withheld

OWN = """
import os
import re
import signal
import time

def own(text):
    print("this must not end up among the answers")
    if "raise" in text:
        raise ValueError(text)
    if "hang" in text:
        re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter for longer than anybody waits
    if "alarm" in text:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(0)
        time.sleep(60)
    if "stop" in text:
        os.kill(os.getpid(), signal.SIGSTOP)
    if "number" in text:
        return 5
    if "die" in text:
        os._exit(3)
    return text.replace("swordfish", "[password]")

nothing = 5
"""


@pytest.fixture
def redactor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Redactor]:
    (tmp_path / "own_redaction.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Redactor(CaptureConfig(redact=["email", "own_redaction:own"], redact_timeout_s=1))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("function", "text", "kept"),
    [
        (email, "to bob.o'neil+x@mail.example.org, now", "to [email], now"),
        (email, "<a@b>", "<[email]>"),
        (email, "müller@straße.de", "[email]"),
        (email, "a@@b and @handle and user@ home", "a@@b and @handle and user@ home"),
        (phone, "+49 (0)30 1234567.", "[phone]."),
        (phone, "0049-30-1234567", "[phone]"),
        (phone, "call (555) 123-4567 2026", "call [phone] 2026"),
        (phone, "1-555-123-4567", "[phone]"),
        (phone, "030 123456, 01 23 45 67 89", "[phone], [phone]"),
        (phone, "0301234567", "[phone]"),
        (phone, "2026-11-22, 1,000,000 and 3.0123456789, 12345678", "2026-11-22, 1,000,000 and 3.0123456789, 12345678"),
        (card, "4111 1111 1111 1111", "[card]"),  # the test numbers that card schemes publish
        (card, "(5500-0000-0000-0004)", "([card])"),
        (card, "378282246310005;6011000990139424", "[card];[card]"),
        (card, "4111 1111 1111 1112", "4111 1111 1111 1112"),
        (card, "1234 4111 1111 1111 1111 5", "1234 [card] 5"),
        (card, "123456789012", "123456789012"),
    ],
)
def test_ready_functions_take_out_what_they_say_and_nothing_else(function: Any, text: str, kept: str) -> None:
    assert function(text) == kept


@pytest.mark.parametrize(
    "text", ["a" * 300_000, "a." * 150_000, "1 " * 150_000, "0" * 300_000, "(0" * 150_000, "+1-" * 90_000]
)
def test_ready_functions_get_through_a_text_that_is_made_to_stop_them(text: str) -> None:
    with Redaction(["email", "phone", "card"], timeout_s=120) as redactor:
        assert redactor.texts([text]).keys() >= {text}


class Redaction:
    """A redactor for a block."""

    def __init__(self, functions: list[str], timeout_s: float = 20) -> None:
        self.redactor = Redactor(CaptureConfig(redact=functions, redact_timeout_s=timeout_s))

    def __enter__(self) -> Redactor:
        return self.redactor

    def __exit__(self, *_: object) -> None:
        self.redactor.close()


@given(st.text(alphabet="0123456789", min_size=12, max_size=18))
def test_every_number_with_its_checksum_digit_is_a_card_and_with_another_is_not(digits: str) -> None:
    table = [int(digit) for digit in digits]
    total = 0
    for place, digit in enumerate(reversed(table)):  # doubled: every second from the last before the checksum
        total += sum(int(part) for part in str(digit * 2)) if place % 2 == 0 else digit
    right = str(-total % 10)
    assert card(digits + right) == "[card]"
    wrong = str((int(right) + 1) % 10)
    assert card(digits + wrong) == digits + wrong


def luhn(digits: str) -> bool:
    """By the definition, digit by digit from the last."""
    doubled = [int(digit) * (1 + place % 2) for place, digit in enumerate(reversed(digits))]
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0


@given(st.lists(st.text(alphabet="048", min_size=1, max_size=7), max_size=14))
def test_of_groups_the_first_and_longest_that_make_a_card_go_and_the_others_stay(groups: list[str]) -> None:
    expected, first = [], 0
    while first < len(groups):
        joined = {last: "".join(groups[first:last]) for last in range(first + 1, len(groups) + 1)}
        cards = [last for last, digits in joined.items() if 13 <= len(digits) <= 19 and luhn(digits)]
        expected.append("[card]" if cards else groups[first])
        first = max(cards, default=first + 1)
    assert card(" ".join(groups)) == " ".join(expected)


def test_ready_functions_are_those_that_the_settings_take() -> None:
    assert tuple(READY) == READY_REDACTIONS
    with pytest.raises(ValidationError, match="'mail' is neither a ready one"):
        CaptureConfig(redact=["mail"])


def row(**columns: Any) -> dict[str, Any]:
    """A complete row; its tokens are its text's characters."""
    prompt, response = columns.get("prompt", "hello"), columns.get("response", "world")
    return {
        "response_id": "r",
        "user": "bob@example.org",
        "session_id": "s",
        "prompt": prompt,
        "messages": None,
        "prompt_token_ids": [ord(c) for c in prompt or ""],
        "response": response,
        "response_token_ids": [ord(c) for c in response],
        "logprobs": [-1.0] * len(response),
        "policy_spans": [{"start": 0, "policy_version": 3}],
        "sampling": {"temperature": 1.0, "stop": []},
        "metadata": [("note", "n")],
        "status": "complete",
        "finish_reason": "stop",
        **columns,
    }


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_a_row_whose_texts_do_not_change_is_recorded_as_it_is(redactor: Redactor) -> None:
    rows = [
        row(),
        row(prompt=None, prompt_token_ids=[104, 105]),
        row(response="", messages='[{"content": "x", "n": 1e2}]'),
    ]
    assert redactor.interactions(rows, decode) == rows


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({"prompt": "I am a@b.c"}, {"prompt": "I am [email]"}),
        ({"response": "a@b.c"}, {"response": "[email]"}),
        (
            {"messages": '[{"role": "user", "content": [{"text": "a@b.c"}]}]'},
            {"messages": '[{"role": "user", "content": [{"text": "[email]"}]}]'},
        ),
        ({"messages": '[{"tool": {"a@b.c": "swordfish"}}]'}, {"messages": '[{"tool": {"[email]": "[password]"}}]'}),
        ({"metadata": [("note", "a@b.c")]}, {"metadata": [("note", "[email]")]}),
        (
            {"metadata": [("millrace:sampling", '{"bad_words": ["swordfish"]}')]},
            {"metadata": [("millrace:sampling", '{"bad_words": ["[password]"]}')]},
        ),
        (
            {"metadata": [("millrace:trace", "00-4bf92f3577b34da6-01"), ("a", "swordfish")]},
            {"metadata": [("millrace:trace", "00-4bf92f3577b34da6-01"), ("a", "[password]")]},
        ),
        (
            {"sampling": {"temperature": 1.0, "stop": ["swordfish"]}},
            {"sampling": {"temperature": 1.0, "stop": ["[password]"]}},
        ),
        ({"prompt": None, "prompt_token_ids": [ord(c) for c in "a@b.c"]}, {"prompt": None}),
        ({"response": "see", "response_token_ids": [ord(c) for c in "see a@b.c"]}, {"response": "see"}),
    ],
)
def test_a_changed_row_has_no_tokens_and_says_so(
    redactor: Redactor, changed: dict[str, Any], kept: dict[str, Any]
) -> None:
    before = row(**changed)
    [after] = redactor.interactions([before], decode)
    without = {"prompt_token_ids": [], "response_token_ids": [], "logprobs": [], "status": "redacted"}
    assert after == before | without | kept
    assert after["user"] == "bob@example.org"  # by which an erasure finds it
    [cut_off] = redactor.interactions([before | {"status": "aborted"}], decode)
    assert cut_off["status"] == "aborted"


def test_a_number_that_is_written_as_json_number_is_redacted_too() -> None:
    with Redaction(["card"]) as redactor:
        [after] = redactor.interactions([row(messages='[{"content": "x", "id": 4111111111111111}]')], decode)
    assert json.loads(after["messages"]) == [{"content": "x", "id": "[card]"}]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise swordfish", "own_redaction:own failed: ValueError"),
        ("number", "own failed: AttributeError"),
        ("hang", "longer than 1 s"),
        ("alarm", "longer than 1 s"),  # a timer of its own, in place of any that would end it
        ("stop", "longer than 1 s"),
        ("die", "died"),
    ],
)
def test_a_failing_function_is_an_error_without_the_text_and_the_next_text_is_redacted(
    redactor: Redactor, text: str, says: str
) -> None:
    with pytest.raises(RedactionError, match=says) as raised:
        redactor.texts(["fine", text])
    assert "swordfish" not in str(raised.value)
    assert redactor.texts(["swordfish", ""]) == {"swordfish": "[password]", "": ""}


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("not_there:own", "not_there:own: ModuleNotFoundError"),
        ("own_redaction:none", "AttributeError"),
        ("own_redaction:nothing", "is no function"),
    ],
)
def test_a_function_that_can_not_be_loaded_is_named_at_the_start(redactor: Redactor, function: str, says: str) -> None:
    with pytest.raises(RedactionError, match=says):
        Redactor(CaptureConfig(redact=[function])).start()


def test_a_process_that_can_not_be_started_is_an_error_and_the_next_text_starts_another(
    redactor: Redactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(sys, "executable", "/not/there")
        with pytest.raises(RedactionError, match="could not be started: No such file"):
            redactor.texts(["swordfish"])
    assert redactor.texts(["swordfish"])["swordfish"] == "[password]"


def test_a_text_and_an_answer_longer_than_any_pipe_come_through_whole() -> None:
    text = "ä a@b.c " * 100_000
    with Redaction(["email"]) as redactor:
        assert redactor.texts([text]) == {"": "", text: "ä [email] " * 100_000}


def test_the_process_ends_with_the_redactor(redactor: Redactor) -> None:
    redactor.start()
    child = redactor._child
    assert child is not None
    redactor.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_a_withheld_row_has_no_text_at_all() -> None:
    before = row(prompt="swordfish", response="swordfish", messages='["swordfish"]', metadata=[("a", "swordfish")])
    after = withheld(before | {"sampling": {"temperature": 1.0, "stop": ["swordfish"]}})
    assert "swordfish" not in str(after)
    assert (after["status"], after["user"], after["prompt_token_ids"]) == ("error", "bob@example.org", [])


@pytest.mark.parametrize(("kind", "kept"), [("correction", "comment"), ("comment", "comment")])
def test_a_correction_that_changes_becomes_a_comment(redactor: Redactor, kind: str, kept: str) -> None:
    said = FeedbackIn(response_id="r", kind=kind, text="write a@b.c", source="a@b.c").to_row("t")
    after = redactor.feedback(said)
    assert after == said | {"text": "write [email]", "kind": kept}
    same = FeedbackIn(response_id="r", kind=kind, text="five").to_row("t")
    assert redactor.feedback(same) == same
    assert redactor.feedback(same | {"kind": "thumb", "text": None})["text"] is None
    assert said["created_at"] <= datetime.now(UTC)
