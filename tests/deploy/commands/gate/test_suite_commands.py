"""`millrace suite sample`, `add` and `show`, as a person types them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from deploy import cli
from deploy.config.root import Settings
from evaluation.suites.held_out import position, prompt_key
from evaluation.suites.suite import Suite
from tests.evaluation.decisions.worlds import judged, seen
from tests.feedback.feedback_rows import interaction, put

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPTS = [f"{a}{b}=" for a in LETTERS for b in LETTERS][:200]
SLICE = {prompt for prompt in PROMPTS if position(prompt) < 0.5}


@pytest.fixture
def home(home_with_policy: Settings) -> Settings:
    """A home without a suite, to which two hundred prompts came."""
    from transformers import AutoTokenizer

    home_with_policy.path("suite.jsonl").unlink()
    tokenizer = AutoTokenizer.from_pretrained(home_with_policy.policy_store().get(1).path)
    lake = home_with_policy.lake()
    lake.create()
    rows = [
        interaction(f"r{i}", prompt=prompt, prompt_token_ids=tokenizer(prompt).input_ids)
        for i, prompt in enumerate(PROMPTS)
    ]
    put(lake, "interactions", rows)
    return home_with_policy


def run(settings: Settings, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    code = cli.run(["suite", *map(str, arguments), "--home", str(settings.home)])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


HALF = ("--evaluation.holdout", "0.5")


def test_a_suite_is_drawn_shown_and_not_drawn_again_unless_it_is_to_be(
    home: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, out = home.path("suite.jsonl"), tmp_path / "out.json"
    code, printed = run(home, capsys, "sample", *HALF, "--json-out", out)
    assert code == 0, printed
    items = Suite.load(path).items
    assert {item.prompt for item in items} == SLICE  # 200 wanted, so all that there are
    assert f"{len(SLICE)} of {len(SLICE)} held-out prompts of traffic" in printed
    assert "cycles add to it when there was more traffic" in printed
    result = json.loads(out.read_text())
    assert (result["items"], result["in_slice"], result["reason"]) == (len(SLICE), len(SLICE), None)

    code, printed = run(home, capsys, "sample", *HALF)
    assert (code, "--replace puts another in its place" in printed) == (2, True), printed
    assert run(home, capsys, "sample", *HALF, "--replace", "--items", "60")[0] == 0
    code, printed = run(home, capsys, "show", "--json", *HALF)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    expected = {"path": str(path), "items": 60, "sha256": sha256, "text": 60, "chat": 0, "answers": 60}
    assert json.loads(printed) == expected | {"holdout": 0.5, "in_slice": 60, "fresh": 60}
    code, printed = run(home, capsys, "show", *HALF)
    assert "60 of the held-out slice (evaluation.holdout=0.5)" in printed


def test_a_drawn_suite_grows_by_a_look_or_more_up_to_its_size_and_its_items_stay(
    home: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of SLICE, of which 60 are drawn: to 80, the size; then too few for another look are left."""
    path, grow = home.path("suite.jsonl"), ("sample", *HALF, "--grow", "--evaluation.suite_items")
    assert run(home, capsys, *grow, "60")[0] == 0
    first = path.read_bytes()
    code, printed = run(home, capsys, *grow, "80")
    assert (code, f"60 items and 20 of {len(SLICE) - 60} other held-out prompts" in printed) == (0, True), printed
    second = path.read_bytes()
    assert second.startswith(first)
    prompts = [item.prompt for item in Suite.load(path).items]
    assert len(prompts) == len(set(prompts)) == 80
    assert set(prompts) < SLICE
    path.write_bytes(first)
    assert run(home, capsys, *grow, "80")[0] == 0
    assert path.read_bytes() == second, "the same again after a kill"

    assert run(home, capsys, *grow, "80")[0] == 0
    code, printed = run(home, capsys, *grow, "200")  # fewer than gate.look_items are left
    assert (code, f"{len(SLICE) - 80} more conversations" in printed, "50 are added at once" in printed) == (
        3,
        True,
        True,
    )
    assert path.read_bytes() == second
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"id": "mine", "prompt": "z"}\n')
    assert run(home, capsys, "add", mine)[0] == 0
    code, printed = run(home, capsys, *grow, "200")
    assert (code, "with items or answers of your own" in printed) == (2, True), printed


def test_what_has_decided_is_not_drawn_again_and_a_drawn_suite_grows_by_as_many(
    home: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    path, size = home.path("suite.jsonl"), ("--evaluation.suite_items", "60", "--evaluation.gate.look_items", "20")
    assert run(home, capsys, "sample", *HALF, *size)[0] == 0
    first = Suite.load(path).items
    used = [seen(item.id, 1.0, 1.0, prompt=prompt_key(item)) for item in first[:20]]
    judged(home.ledger(), 2, tuple(used))
    assert json.loads(run(home, capsys, "show", "--json", *HALF)[1])["fresh"] == 40
    assert run(home, capsys, "sample", *HALF, *size, "--grow")[0] == 0
    grown = Suite.load(path).items
    assert (grown[:60], len(grown)) == (first, 80)
    assert json.loads(run(home, capsys, "show", "--json", *HALF)[1])["fresh"] == 60
    assert run(home, capsys, "sample", *HALF, "--replace", "--evaluation.suite_items", "200")[0] == 0
    assert {item.prompt for item in Suite.load(path).items} == SLICE - {item.prompt for item in first[:20]}
    path.unlink()
    assert run(home, capsys, "sample", *HALF, "--evaluation.suite_items", "200")[0] == 0
    assert {item.prompt for item in Suite.load(path).items} == SLICE - {item.prompt for item in first[:20]}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "evaluation.holdout is 0"),
        (("--evaluation.holdout", "1.0"), 2, "evaluation.holdout"),
        ((*HALF, "--items", "150"), 3, f"{len(SLICE)} conversations of traffic are of the held-out slice"),
        (("--evaluation.holdout", "0.01"), 3, "and a suite needs 50"),
    ],
)
def test_a_suite_that_can_not_be_drawn_is_refused_with_the_reason_and_none_is_written(
    arguments: tuple[str, ...], code: int, words: str, home: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    found, printed = run(home, capsys, "sample", *arguments)
    assert (found, words in printed) == (code, True), printed
    assert not home.path("suite.jsonl").exists()


def test_items_of_ones_own_are_added_all_or_none(
    home: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    inside, outside = next(iter(SLICE)), next(iter(set(PROMPTS) - SLICE))
    mine = tmp_path / "mine.jsonl"
    mine.write_text(
        "\n".join(json.dumps({"id": f"i{n}", "prompt": prompt}) for n, prompt in enumerate((inside, outside)))
    )
    code, printed = run(home, capsys, "add", mine, *HALF)
    assert (code, "2 items added, 2 in all" in printed) == (0, True), printed
    assert "1 of them are not of the held-out slice" in printed
    before = home.path("suite.jsonl").read_bytes()

    for line, words in (
        ({"id": "i1", "prompt": "x"}, f"{mine}, line 2: id 'i1' is that of line 2 of {home.path('suite.jsonl')}"),
        ({"id": "new"}, f"{mine}, line 2: Value error, an item has exactly one of prompt and messages"),
    ):
        mine.write_text('{"id": "fresh", "prompt": "y"}\n' + json.dumps(line) + "\n")
        code, printed = run(home, capsys, "add", mine)
        assert (code, words in printed) == (1, True), printed
        assert home.path("suite.jsonl").read_bytes() == before

    mine.write_text('{"id": "i2", "messages": [{"role": "user", "content": "z"}]}\n')
    assert run(home, capsys, "add", mine)[0] == 0
    assert [item.id for item in Suite.load(home.path("suite.jsonl")).items] == ["i0", "i1", "i2"]


def test_a_suite_that_is_not_there_is_named(home: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = run(home, capsys, "show")
    assert (code, "suite.jsonl is not there. `millrace suite sample` draws one" in printed) == (1, True), printed
