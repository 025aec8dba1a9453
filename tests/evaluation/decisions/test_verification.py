"""What was decided is computed again, and what was forged is found, also where all hashes were made anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.decisions.history import History
from evaluation.decisions.ledger import FIRST, Entry, Ledger, canonical
from evaluation.decisions.verification import verify
from tests.evaluation.decisions.worlds import config, items, judged


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Candidate 2 passes in two evaluations, 3 is refused, 4 is undecided; 2 was promoted."""
    ledger = Ledger(tmp_path_factory.mktemp("ledger"))
    better = items(400, gain=0.25, name="a")
    assert judged(ledger, 2, better[:50]).body["verdict"] == "undecided"
    assert judged(ledger, 2, better[50:]).body["verdict"] == "pass"
    assert judged(ledger, 3, items(500, gain=-0.2, name="b")).body["verdict"] == "refuse"
    assert judged(ledger, 4, items(50, gain=0.0, name="c"), incumbent=2).body["verdict"] == "undecided"
    moved = {"version": 2, "sha256": "sha-2", "previous": 1, "previous_sha256": "sha-1"}
    ledger.append("promotion", moved, who="cycle")
    return ledger.folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "decisions"))


def rewrite(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """What somebody does who knows the format: change entries, and make all hashes anew."""
    ledger = Ledger(folder)
    entries = [entry.model_dump() for entry in ledger.entries()]
    change(entries)
    previous, lines = FIRST, []
    for number, entry in enumerate(entries, start=1):
        forged = Entry(**{**entry, "number": number, "previous": previous, "sha256": ""})
        previous = forged.digest()
        lines.append(canonical(forged.model_copy(update={"sha256": previous}).model_dump()) + b"\n")
    ledger.file.write_bytes(b"".join(lines))


def forge_evidence(folder: Path, number: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
    ledger = Ledger(folder)
    evidence = ledger.evidence(ledger.entries()[number - 1].body["evidence"])
    change(evidence["looks"])
    name = ledger.keep(evidence)
    rewrite(folder, lambda entries: entries[number - 1]["body"].update(evidence=name))


def test_what_was_decided_verifies_bit_for_bit(folder: Path) -> None:
    found = verify(Ledger(folder))
    assert found.problems == ()
    assert (found.entries, found.verdicts) == (5, 4)
    history = History.of(Ledger(folder).entries())
    levels = [race[0][1].plan.level for race in history.races.values()]
    assert found.spent == pytest.approx(sum(levels))
    assert levels[1] > 0.05 * 2**-1.6 / 2.2857656660680787 * 1.99  # one candidate had passed before it


def test_a_line_that_was_changed_by_hand_is_named(folder: Path) -> None:
    file = folder / "decisions.jsonl"
    file.write_text(file.read_text().replace('"verdict":"refuse"', '"verdict":"pass"'))
    assert verify(Ledger(folder)).problems == (f"{file}, line 3 was changed: its sha256 is not that of its content",)


def of_body(number: int, **fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda entries: entries[number - 1]["body"].update(fields)


def of_plan(number: int, **fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda entries: entries[number - 1]["body"]["plan"].update(fields)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (of_body(3, verdict="pass"), "entry 3: its verdict is 'pass', and its evidence gives 'refuse'"),
        (of_body(3, reasons=["fine"]), "entry 3: its reasons is ('fine',)"),
        (of_body(2, e_value=1e9), "entry 2: its e_value is 1000000000.0"),
        (of_body(2, difference=0.9), "entry 2: its difference is 0.9"),
        (of_body(2, items=40), "entry 2: its items is 40"),
        (of_body(2, standings=[]), "entry 2: its standings is ()"),
        (of_body(3, prompts=[]), "entry 3: the prompts that it used up are not those of its evidence"),
        (of_plan(3, level=0.5), "entry 3: its level is 0.5, and what the budget gives it is"),
        (of_plan(2, min_difference=0.01), "entry 2: its plan is not that of the candidate's first look, entry 1"),
        (of_plan(1, low=-1.0), "entry 1: its"),
        (lambda entries: entries.pop(0), "entry 1: its items is"),
        (lambda entries: entries.insert(4, entries[2]), "entry 5: entry 3 is a final verdict on this candidate"),
        (
            lambda entries: entries[2]["body"]["candidate"].update(sha256="sha-2"),
            "entry 3: entry 2 is a final verdict on this candidate already",
        ),
        (of_body(5, sha256="sha-3"), "entry 5: policy 2 was promoted without a passing verdict against policy 1"),
        (of_body(5, previous_sha256="sha-9"), "entry 5: policy 2 was promoted without a passing verdict"),
        (of_body(3, extra=1), "entry 3 is no verdict: extra"),
    ],
)
def test_what_was_forged_with_all_hashes_made_anew_is_found(
    folder: Path, change: Callable[[list[dict[str, Any]]], None], problem: str
) -> None:
    rewrite(folder, change)
    found = verify(Ledger(folder)).problems
    assert any(problem in one for one in found), found


def first_item(looks: list[dict[str, Any]], **fields: Any) -> None:
    looks[0]["fresh"][0].update(fields)


@pytest.mark.parametrize(
    ("number", "change", "problem"),
    [
        (3, lambda looks: [one.update(candidate=1.0) for look in looks for one in look["fresh"]], "its verdict is"),
        (2, lambda looks: first_item(looks, candidate=0.5), "its difference is"),
        (2, lambda looks: first_item(looks, prompt="a0"), "item 'a50' had decided before"),
        (2, lambda looks: first_item(looks, candidate=7.0), "has the value 7, outside the bounds"),
        (2, lambda looks: looks.append(looks[0]), "was decided after"),
        (2, lambda looks: looks.pop(), "its verdict is"),
        (3, lambda looks: looks[1]["fresh"][0].update(looks[0]["fresh"][0]), "is of a voice that an earlier look"),
        (3, lambda looks: looks[0].update(regression=[looks[0]["fresh"][0]]), "has not decided on an earlier"),
        (2, lambda looks: first_item(looks, surprise=1), "holds no looks"),
    ],
)
def test_forged_evidence_is_found(
    folder: Path, number: int, change: Callable[[list[dict[str, Any]]], None], problem: str
) -> None:
    forge_evidence(folder, number, change)
    found = verify(Ledger(folder)).problems
    assert any(problem in one for one in found), found


def test_evidence_that_is_gone_or_changed_is_named(folder: Path) -> None:
    name = Ledger(folder).entries()[0].body["evidence"]
    (folder / "evidence" / name).write_text(json.dumps({"looks": []}))
    assert f"entry 1: evidence {folder / 'evidence' / name} was changed" in verify(Ledger(folder)).problems[0]
    (folder / "evidence" / name).unlink()
    assert "can't be read" in verify(Ledger(folder)).problems[0]


def test_with_a_fixed_horizon_a_spent_budget_refuses_and_verifies(tmp_path: Path) -> None:
    ledger, settings = Ledger(tmp_path), config(budget={"rule": "fixed_horizon", "horizon": 1, "alpha": 0.05})
    assert judged(ledger, 2, items(500, gain=0.3, name="a"), settings=settings).body["verdict"] == "pass"
    spent = judged(ledger, 3, (), settings=settings)
    assert (spent.body["verdict"], spent.body["items"], spent.body["prompts"]) == ("refuse", 0, [])
    assert verify(Ledger(tmp_path)).problems == ()
    assert verify(Ledger(tmp_path)).spent == 0.05
