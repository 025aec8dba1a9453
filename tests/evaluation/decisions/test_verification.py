"""What was decided is computed again, and what was forged is found, also where all hashes were made anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.config import SamplingParameters
from evaluation.decisions.history import History
from evaluation.decisions.ledger import Kind, Ledger
from evaluation.decisions.verification import verify
from evaluation.suites.decoding import Decoding, ParameterSet
from tests.evaluation.decisions.worlds import COMPARED, config, items, judged, rewrite


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Candidate 2 passes in two evaluations, 3 is refused, 4 is undecided; 2 was promoted.

    Entries: 1 the budget; 2 and 4 what 3 and 5, verdicts on 2, looked at; 6 and 7 what 8, on 3, did; 9 and 10 of 4; 11
    the promotion.
    """
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


def forge_evidence(folder: Path, number: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
    ledger = Ledger(folder)
    evidence = ledger.evidence(ledger.entries()[number - 1].body["evidence"])
    change(evidence["looks"])
    name = ledger.keep(evidence)
    rewrite(ledger, lambda entries: entries[number - 1]["body"].update(evidence=name))


def test_what_was_decided_verifies_bit_for_bit(folder: Path) -> None:
    found = verify(Ledger(folder))
    assert found.problems == ()
    assert (found.entries, found.verdicts) == (11, 4)
    history = History.of(Ledger(folder).entries())
    levels = [race[0][1].plan.level for race in history.races.values()]
    assert found.levels_given == pytest.approx(sum(levels))
    assert levels[1] > 0.05 * 2**-1.6 / 2.2857656660680787 * 1.99  # one candidate had passed before it


def test_a_ledger_from_before_items_were_sampled_or_timed_verifies(folder: Path) -> None:
    """Its plans say nothing of decoding, nor its observations of sampling and latency."""
    ledger = Ledger(folder)
    names = {entry.number: entry.body["evidence"] for entry in ledger.entries() if entry.kind == "verdict"}
    for number, name in names.items():
        evidence = ledger.evidence(name)
        for one in (one for look in evidence["looks"] for one in look["fresh"]):
            assert (one.pop("sampling"), one.pop("latency")) == (None, None)
        names[number] = ledger.keep(evidence)

    def before(entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            if "plan" in entry["body"]:
                del entry["body"]["plan"]["decoding"]
            if entry["number"] in names:
                entry["body"]["evidence"] = names[entry["number"]]

    rewrite(ledger, before)
    assert verify(Ledger(folder)).problems == ()
    assert all("decoding" not in entry.body.get("plan", {}) for entry in Ledger(folder).entries())


SETS = (
    ParameterSet(parameters=SamplingParameters(), requests=3),
    ParameterSet(parameters=SamplingParameters(temperature=0.5), requests=1),
)
SAMPLED = Decoding(source="traffic", sets=SETS)


def test_what_each_item_draws_is_drawn_again_from_the_plan(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "decisions")
    drawn = [one.model_copy(update={"sampling": SAMPLED.drawn(one.item)}) for one in items(400, gain=0.25)]
    entry = judged(ledger, 2, tuple(drawn), decoding=SAMPLED)
    assert {one.sampling for one in drawn[:50]} == {0, 1}
    assert (entry.body["verdict"], verify(Ledger(ledger.folder)).problems) == ("pass", ())

    def another(looks: list[dict[str, Any]]) -> None:
        looks[0]["fresh"][7]["sampling"] = 1 - looks[0]["fresh"][7]["sampling"]

    forge_evidence(ledger.folder, entry.number, another)
    (problem,) = verify(Ledger(ledger.folder)).problems
    assert problem.startswith(f"entry {entry.number}: item 'i7' was answered by sampling parameters ")

    def once_more(entries: list[dict[str, Any]]) -> None:
        for one in entries[1:]:
            one["body"]["plan"]["decoding"]["sets"][1]["requests"] = 50

    forge_evidence(ledger.folder, entry.number, another)
    rewrite(ledger, once_more)
    assert "it draws" in verify(Ledger(ledger.folder)).problems[0]


def test_a_refusal_for_latency_is_recomputed_from_the_seconds_that_were_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "decisions")
    entry = judged(ledger, 2, items(400, gain=0.25, latency=(0.05, 0.005)), timed=True)
    assert (entry.body["verdict"], "latency is +0.9" in entry.body["reasons"][0]) == ("refuse", True)
    assert verify(Ledger(ledger.folder)).problems == ()

    def faster(looks: list[dict[str, Any]]) -> None:
        looks[0]["fresh"][0]["latency"] = [0.005, 0.005]

    forge_evidence(ledger.folder, entry.number, faster)
    assert any("standings" in why for why in verify(Ledger(ledger.folder)).problems)


def test_a_refusal_for_over_optimisation_is_recomputed_from_both_rewards_of_each_item(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "decisions")
    hacks = items(400, gain=0.25, proxy=(3.5, 3.0), holdout=(0.4, 0.7))
    entry = judged(ledger, 2, hacks, rewards=COMPARED)
    assert entry.body["verdict"] == "refuse"
    assert any(why.startswith("over-optimised: ") for why in entry.body["reasons"])
    assert verify(Ledger(ledger.folder)).problems == ()

    def please_it_less(looks: list[dict[str, Any]]) -> None:
        looks[0]["fresh"][0]["proxy"][0] = 0.0

    forge_evidence(ledger.folder, entry.number, please_it_less)
    (problem,) = verify(Ledger(ledger.folder)).problems
    assert "its reasons is" in problem


def test_a_line_that_was_changed_by_hand_is_named(folder: Path) -> None:
    file = folder / "decisions.jsonl"
    file.write_text(file.read_text().replace('"verdict":"refuse"', '"verdict":"pass"'))
    assert verify(Ledger(folder)).problems == (f"{file}, line 8 was changed: its sha256 is not that of its content",)


def of_body(number: int, **fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda entries: entries[number - 1]["body"].update(fields)


def of_plan(number: int, **fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda entries: entries[number - 1]["body"]["plan"].update(fields)


def without(*numbers: int) -> Callable[[list[dict[str, Any]]], None]:
    return lambda entries: [entries.pop(number - 1) for number in numbers] and None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (of_body(8, verdict="pass"), "entry 8: its verdict is 'pass', and its evidence gives 'refuse'"),
        (of_body(8, reasons=["fine"]), "entry 8: its reasons is ('fine',)"),
        (of_body(5, e_value=1e9), "entry 5: its e_value is 1000000000.0"),
        (of_body(5, difference=0.9), "entry 5: its difference is 0.9"),
        (of_body(5, items=40), "entry 5: its items is 40"),
        (of_body(5, standings=[]), "entry 5: its standings is ()"),
        (of_body(8, prompts=[]), "entry 8: the prompts that it used up are not those of its evidence"),
        (of_plan(8, level=0.5), "entry 8: its level is 0.5, and what the budget gives it is"),
        (of_plan(5, min_difference=0.01), "entry 5: its plan is not that of the candidate's first look, entry 2"),
        (of_plan(3, low=-1.0), "entry 3: its"),
        (lambda entries: entries.pop(2), "entry 4: its items is"),
        (lambda entries: entries.insert(10, entries[7]), "entry 11: entry 8 is a final verdict on this candidate"),
        (
            lambda entries: entries[7]["body"]["candidate"].update(sha256="sha-2"),
            "entry 8: entry 5 is a final verdict on this candidate already",
        ),
        (of_body(11, sha256="sha-3"), "entry 11: policy 2 was promoted without a passing verdict against policy 1"),
        (of_body(11, previous_sha256="sha-9"), "entry 11: policy 2 was promoted without a passing verdict"),
        (of_body(8, extra=1), "entry 8 is no verdict: extra"),
        (of_body(7, extra=1), "entry 7 is no intent: extra"),
        (of_body(1, alpha=2.0), "entry 1 is no error budget: an error budget of 2 over 1000"),
        (without(7), "entry 7: 2 looks were made, and 1 were on record before"),
        (without(7, 6), "entry 6: 2 looks were made, and 0 were on record before"),
        (of_body(6, fresh=["b1"]), "entry 8: look 1 is not at the items that were about to be looked at"),
        (of_body(6, prompts=["b1"]), "entry 8: look 1 is not at the items that were about to be looked at"),
        (of_body(6, prompts=["a0"]), "entry 6: it is about items that were looked at before"),
        (of_plan(7, alpha=0.1), "entry 7: its plan is not that of the candidate's first look, entry 6"),
        (without(1), "entry 1: its level is of e_lond 0.05 over 1000, and what is declared is no budget"),
        (of_body(1, alpha=0.1), "entry 2: its level is of e_lond 0.05 over 1000, and what is declared is e_lond 0.1"),
        (lambda entries: entries.insert(10, entries[6]), "entry 11: entry 8 is a final verdict on this candidate"),
    ],
)
def test_what_was_forged_with_all_hashes_made_anew_is_found(
    folder: Path, change: Callable[[list[dict[str, Any]]], None], problem: str
) -> None:
    rewrite(Ledger(folder), change)
    found = verify(Ledger(folder)).problems
    assert any(problem in one for one in found), found


def first_item(looks: list[dict[str, Any]], **fields: Any) -> None:
    looks[0]["fresh"][0].update(fields)


@pytest.mark.parametrize(
    ("number", "change", "problem"),
    [
        (8, lambda looks: [one.update(candidate=1.0) for look in looks for one in look["fresh"]], "its verdict is"),
        (5, lambda looks: first_item(looks, candidate=0.5), "its difference is"),
        (5, lambda looks: first_item(looks, prompt="a0"), "item 'a50' had decided before"),
        (5, lambda looks: first_item(looks, candidate=7.0), "has the value 7, outside the bounds"),
        (5, lambda looks: looks.append(looks[0]), "was decided after"),
        (5, lambda looks: looks.pop(), "its verdict is"),
        (8, lambda looks: looks[1]["fresh"][0].update(looks[0]["fresh"][0]), "is of a voice that an earlier look"),
        (8, lambda looks: looks[0].update(regression=[looks[0]["fresh"][0]]), "has not decided on an earlier"),
        (5, lambda looks: first_item(looks, surprise=1), "holds no looks"),
    ],
)
def test_forged_evidence_is_found(
    folder: Path, number: int, change: Callable[[list[dict[str, Any]]], None], problem: str
) -> None:
    forge_evidence(folder, number, change)
    found = verify(Ledger(folder)).problems
    assert any(problem in one for one in found), found


def test_evidence_that_is_gone_or_changed_is_named(folder: Path) -> None:
    name = Ledger(folder).entries()[2].body["evidence"]
    (folder / "evidence" / name).write_text(json.dumps({"looks": []}))
    assert f"entry 3: evidence {folder / 'evidence' / name} was changed" in verify(Ledger(folder)).problems[0]
    (folder / "evidence" / name).unlink()
    assert "can't be read" in verify(Ledger(folder)).problems[0]


def test_with_a_fixed_horizon_a_spent_budget_refuses_and_verifies(tmp_path: Path) -> None:
    ledger, settings = Ledger(tmp_path), config(budget={"rule": "fixed_horizon", "horizon": 1, "alpha": 0.05})
    assert judged(ledger, 2, items(500, gain=0.3, name="a"), settings=settings).body["verdict"] == "pass"
    spent = judged(ledger, 3, (), settings=settings)
    assert (spent.body["verdict"], spent.body["items"], spent.body["prompts"]) == ("refuse", 0, [])
    assert verify(Ledger(tmp_path)).problems == ()
    assert verify(Ledger(tmp_path)).levels_given == 0.05


def test_a_horizon_that_is_raised_before_each_candidate_spends_what_is_left_and_no_more(tmp_path: Path) -> None:
    """By its own horizon each of these would have 0.05 / k, 0.294 over 200 of them."""
    ledger = Ledger(tmp_path)
    for number in range(1, 9):
        settings = config(budget={"rule": "fixed_horizon", "horizon": number, "alpha": 0.05})
        judged(ledger, number + 1, items(50, gain=-0.2, name=f"c{number}-"), settings=settings)
    found = verify(Ledger(tmp_path))
    assert found.problems == ()
    assert found.levels_given == pytest.approx(0.05)
    budgets = [entry for entry in ledger.entries() if entry.kind == "budget"]
    assert [(entry.who, entry.body["horizon"]) for entry in budgets] == [("tests", number) for number in range(1, 9)]

    def by_its_own(entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            if entry["kind"] != "budget":
                entry["body"]["plan"]["level"] = 0.05 / entry["body"]["plan"]["horizon"]

    rewrite(ledger, by_its_own)
    assert "its level is 0.025, and what the budget gives it is 0.0" in "; ".join(verify(Ledger(tmp_path)).problems)


def test_what_was_about_to_be_looked_at_has_its_level_and_its_items_without_a_verdict(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    judged(ledger, 2, items(50, gain=0.0, name="a"), killed=True)
    judged(ledger, 3, items(500, gain=-0.3, name="b"))
    history, found = History.of(ledger.entries()), verify(Ledger(tmp_path))
    assert found.problems == ()
    assert (len(history.candidates), history.passes) == (2, 0)
    assert found.levels_given == pytest.approx(0.05 * (1 + 2**-1.6) / 2.2857656660680787)
    assert {f"a{i}" for i in range(50)} < history.used
    with_its_items = items(50, gain=0.3, name="a")
    judged(ledger, 4, with_its_items)
    assert any("it is about items that were looked at before" in one for one in verify(Ledger(tmp_path)).problems)


@pytest.mark.parametrize("kind", ["shadow", "experiment"])
def test_an_entry_that_says_nothing_of_its_kind_is_named_and_what_follows_is_verified(
    kind: Kind, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path)
    judged(ledger, 2, items(500, gain=0.3, differing=0.4))
    empty = ledger.append(kind, {}, who="somebody")
    move = {"version": 3, "sha256": "sha-3", "previous": 1, "previous_sha256": "sha-1", "generation": 9, "at": "then"}
    unjudged = ledger.append("promotion", move, who="somebody")
    first, second = verify(ledger).problems
    assert first.startswith(f"entry {empty.number}: entry {empty.number} is no {kind}: ")
    assert second == f"entry {unjudged.number}: policy 3 was promoted without a passing verdict against policy 1"
