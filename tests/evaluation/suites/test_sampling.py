"""A suite drawn from traffic has prompts of the held-out slice alone, as the policy gets them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from evaluation.suites.held_out import HeldOut, position
from evaluation.suites.sampling import TooFewPrompts, sample
from evaluation.suites.suite import Suite
from feedback.config import LakeConfig
from feedback.lake.erasure_registry import register
from feedback.lake.tables import Lake
from serve.generation.tokenizer import Text
from tests.evaluation.suites.chat_rows import chat, make_tokenizer, text, token_ids
from tests.feedback.feedback_rows import NOON, interaction, put

SHARE = 0.4
ROWS = 40
TURNS = ("Go on", "And then?")


def asked(row: int) -> str:
    return f"question {row:03d}"


SLICE = {row for row in range(ROWS) if position(asked(row)) < SHARE}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_tokenizer().save_pretrained(folder)
    return folder


def make_lake(folder: Path, rows: list[dict[str, Any]]) -> Lake:
    lake = Lake(str(folder / "lake"), LakeConfig())
    lake.create()
    put(lake, "interactions", rows)
    return lake


def served(row: int, columns: dict[str, Any], name: str = "", **more: Any) -> dict[str, Any]:
    return interaction(f"r{row}{name}", **columns | {"metadata": {"answer": str(row), "millrace:x": "1"}} | more)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Questions as text, as token ids and as chats of three turns, some asked twice."""
    rows = []
    for i in range(ROWS):
        if i % 3 == 0:
            rows.append(served(i, text(asked(i))))
        elif i % 3 == 1:
            rows.append(served(i, token_ids(asked(i))))
        else:
            talk = [("system", "Be brief."), ("user", asked(i))]
            rows += [served(i, chat(*talk)), served(i, chat(*talk), "again", created_at=NOON + timedelta(hours=1))]
            for turn in TURNS:
                talk += [("assistant", "Well"), ("user", turn)]
                rows.append(served(i, chat(*talk), turn))
    return make_lake(tmp_path_factory.mktemp("home"), rows)


def draw(lake: Lake, policy: Path, **arguments: Any) -> Any:
    return sample(lake, policy, SHARE, **{"items": 1000, "least": 1, "longest": None, "seed": 0} | arguments)


def row_of(item: Any) -> int:
    said = item.prompt if item.prompt is not None else item.messages[1]["content"]
    return int(said.removeprefix("question "))


def test_each_conversation_of_the_slice_is_one_item_that_gives_the_prompt_token_by_token(
    lake: Lake, policy: Path, tmp_path: Path
) -> None:
    drawn = draw(lake, policy)
    assert sorted(map(row_of, drawn.items)) == sorted(SLICE)
    assert (drawn.available, drawn.left_out) == (len(SLICE), {})
    (tmp_path / "suite.jsonl").write_bytes(drawn.content())
    suite = Suite.load(tmp_path / "suite.jsonl")
    assert suite.items == drawn.items
    tokenizer = Text(AutoTokenizer.from_pretrained(policy))
    known = lake.read(lambda views: views.sql("SELECT prompt_token_ids FROM interactions").fetchall())
    for item in suite.items:
        assert (tokenizer.prompt(item.text_or_messages)[2],) in known
        assert item.metadata == {"answer": str(row_of(item))}
        assert HeldOut(policy=policy, share=SHARE).in_slice(item.as_row())
    assert {len(item.messages) for item in suite.items if item.messages} > {2}  # not only first turns


def test_the_seed_says_which_and_fewer_are_some_of_them(lake: Lake, policy: Path) -> None:
    first, again, other = (draw(lake, policy, items=5, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.items != other.items
    assert len(first.items) == 5
    assert {row_of(item) for item in first.items} < SLICE


def test_too_few_prompts_are_refused_with_both_numbers(lake: Lake, policy: Path) -> None:
    least = len(SLICE) + 1
    found = rf"^{len(SLICE)} conversations .*evaluation\.holdout=0\.4 of \d+ prompts\), and a suite needs {least}$"
    with pytest.raises(TooFewPrompts, match=found):
        draw(lake, policy, least=least)
    with pytest.raises(TooFewPrompts, match=r"^0 .* \(\d+ too long left out\)$"):
        draw(lake, policy, longest=5, seed=1)


def test_what_was_imported_redacted_aborted_or_is_being_erased_is_no_item(policy: Path, tmp_path: Path) -> None:
    wanted = sorted(SLICE)[:5]
    statuses = ["complete", "imported", "redacted", "aborted", "complete"]
    rows = [
        served(row, text(asked(row)), status=status, user=f"user {row}")
        for row, status in zip(wanted, statuses, strict=True)
    ]
    lake = make_lake(tmp_path, rows)
    assert sorted(map(row_of, draw(lake, policy).items)) == [wanted[0], wanted[4]]
    register(lake, "user", [f"user {wanted[4]}"], NOON - timedelta(days=1), {})
    assert [row_of(item) for item in draw(lake, policy).items] == [wanted[0]]


def test_a_prompt_that_no_text_gives_again_is_left_out_and_counted(policy: Path, tmp_path: Path) -> None:
    ids = text(asked(min(SLICE)))["prompt_token_ids"]
    odd = {"prompt": None, "messages": None, "prompt_token_ids": [*ids, 0]}  # <pad>, which decoding leaves out
    lake = make_lake(tmp_path, [served(1, odd)])
    with pytest.raises(TooFewPrompts, match="1 that neither text nor messages give again left out"):
        draw(lake, policy)
