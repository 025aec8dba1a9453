"""The parts of the page about decisions: which points are joined, what became of promotions, and what is drawn."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from evaluation.config import SamplingParameters
from evaluation.decisions.history import History
from evaluation.decisions.ledger import Ledger
from evaluation.decisions.ranking import rankings
from evaluation.report.evidence import races, spending
from evaluation.report.page import ReportData, build
from evaluation.results import Interval, Wins
from evaluation.suites.decoding import Decoding, ParameterSet
from tests.evaluation.decisions.test_ranking import PAIRWISE
from tests.evaluation.decisions.worlds import compared, config, items, judged
from tests.evaluation.test_report import Page, evaluation


def policy(version: int, reward: float | None = None, accuracy: float | None = None) -> dict[str, Any]:
    def interval(value: float | None) -> Interval | None:
        return None if value is None else Interval(value=value, low=value - 0.05, high=value + 0.05)

    return {"version": version, "parent": version - 1 or None, "reward": interval(reward), "n": 100,
            "accuracy": interval(accuracy)}  # fmt: skip


def suite(*policies: dict[str, Any]) -> dict[str, Any]:
    return {"name": "suite.jsonl", "items": 100, "policies": policies}


def move(version: int, fate: str = "replaced", **more: Any) -> dict[str, Any]:
    known = {"at": "2026-11-24T00:00:00", "version": version, "previous": version - 1 or None, "who": "cycle"}
    return {**known, "why": "it passed", "served": True, "fate": fate, **more}


def verdict(candidate: int, word: str, incumbent: int = 1) -> dict[str, Any]:
    return {"candidate": candidate, "incumbent": incumbent, "difference": 0.1, "ci_low": 0.0, "ci_high": 0.2,
            "verdict": word}  # fmt: skip


def page(tmp_path: Path, **data: Any) -> Page:
    return Page(build(ReportData(title="x", **data), tmp_path / "report.html").read_text())


def words_of(data: ReportData, version: int) -> list[str]:
    return [word for word, _ in data.tags(version)]


def test_greedy_results_stand_beside_those_of_sampled_answers_and_the_page_says_how_they_were_sampled(
    tmp_path: Path,
) -> None:
    rows = [policy(1, reward=0.3), policy(2, reward=0.5) | {"greedy": Interval(value=0.875, low=0.8, high=0.9)}]
    warm = ParameterSet(parameters=SamplingParameters(temperature=0.7), requests=3)
    sampled = Decoding(source="traffic", sets=(warm,))
    shown = page(tmp_path, metric="reward", policies=rows, gates=[verdict(2, "pass") | {"sampling": sampled}])
    assert "Greedy reward" in shown.text
    assert "0.875 0.800 – 0.900" in shown.text
    assert "answered the items sampled at temperature 0.7, as requests of traffic are." in shown.text
    plain = page(tmp_path, metric="reward", policies=[policy(1, reward=0.3)], gates=[verdict(2, "pass")])
    assert "Greedy reward" not in plain.text
    assert "answered the items greedily." in plain.text


def test_the_gate_s_metric_is_the_headline_and_comes_first(tmp_path: Path) -> None:
    known: dict[str, Any] = {
        "policies": [policy(1, reward=0.3, accuracy=0.4), policy(2, reward=0.5, accuracy=0.45)],
        "moves": [move(1), move(2, "serves")],
    }
    by_reward = page(tmp_path, metric="reward", **known)
    assert "policy v2 has a mean reward of 0.500; v1, which the loop started from, 0.300." in by_reward.text
    assert "Held-out reward +0.200 v1 to v2" in by_reward.text
    assert by_reward.pictures() == ["Held-out reward by policy", "Held-out accuracy by policy"]
    by_accuracy = page(tmp_path, metric="accuracy", **known)
    assert "policy v2 answers 45.0% right; v1, which the loop started from, 40.0%." in by_accuracy.text
    assert by_accuracy.pictures() == ["Held-out accuracy by policy", "Held-out reward by policy"]


def test_figures_of_different_items_are_neither_joined_nor_subtracted(tmp_path: Path) -> None:
    data = ReportData(
        title="x",
        policies=[policy(1, 0.3), policy(2, 0.5), policy(3, 0.9)],
        suites=[suite(policy(1, 0.3), policy(2, 0.5)), suite(policy(2, 0.8), policy(3, 0.9))],
        moves=[move(1), move(2), move(3, "serves")],
    )
    assert data.progress == [(2, 0.8), (3, 0.9)]
    assert data.letters == {1: "A", 2: "B", 3: "B"}
    shown = Page(build(data, tmp_path / "report.html").read_text())
    assert "policy v3 has a mean reward of 0.900; v2, on the same ones, 0.800." in shown.text
    assert "B · 100" in shown.text
    assert _lines(tmp_path / "report.html") == 2


def test_one_set_of_items_is_joined_by_one_line_and_has_no_letter(tmp_path: Path) -> None:
    policies = [policy(1, 0.3), policy(2, 0.5), policy(3, 0.9)]
    data = ReportData(title="x", policies=policies, moves=[move(1), move(2), move(3, "serves")])
    build(data, tmp_path / "report.html")
    assert _lines(tmp_path / "report.html") == 1
    assert (data.letters, data.progress) == ({}, [(1, 0.3), (3, 0.9)])


def test_without_another_policy_on_the_same_items_no_gain_is_claimed(tmp_path: Path) -> None:
    suites = [suite(policy(1, 0.3)), suite(policy(2, 0.5))]
    known: dict[str, Any] = {"policies": [policy(1, 0.3), policy(2, 0.5)], "suites": suites}
    shown = page(tmp_path, moves=[move(1), move(2, "serves")], **known)
    assert "policy v2 has a mean reward of 0.500." in shown.text
    assert "to v2, same items" not in shown.text


def _lines(report: Path) -> int:
    """The lines between policies in a picture: those that are drawn as pale as they are, and go anywhere."""
    (svg, *_) = re.findall(r"<svg.*?</svg>", report.read_text(), flags=re.DOTALL)
    paths = re.findall(r'<path d="([^"]*)"[^>]*stroke-opacity: 0\.35', svg)
    return sum(path.count("L") > 0 for path in paths)


@pytest.mark.parametrize(
    ("moves", "gates", "words"),
    [
        ([move(1), move(2, "serves")], [verdict(2, "pass")], ["serves"]),
        ([move(1), move(2), move(3, "serves")], [verdict(2, "pass")], ["promoted", "replaced"]),
        ([move(1), move(2, "rolled back"), move(1, "serves", back=True)], [verdict(2, "pass")], ["rolled back"]),
        (
            [move(1), move(2, "refused by the server", served=False), move(1, "serves", back=True)],
            [verdict(2, "pass")],
            ["refused by the server"],
        ),
        (
            [move(1), move(2, "serves", override=True, objection="it did not pass")],
            [verdict(2, "refuse")],
            ["override", "serves"],
        ),
        ([move(1, "serves")], [verdict(2, "pass")], ["passed, not promoted"]),
        ([move(1, "serves")], [verdict(2, "refuse")], ["refused"]),
        ([move(1, "serves")], [verdict(2, "undecided")], ["undecided"]),
        ([move(1, "serves")], [], ["not judged"]),
    ],
)
def test_a_policy_is_called_what_became_of_it(
    moves: list[dict[str, Any]], gates: list[dict[str, Any]], words: list[str], tmp_path: Path
) -> None:
    data = ReportData(title="x", policies=[policy(i, 0.5) for i in (1, 2, 3)], moves=moves, gates=gates)
    assert words_of(data, 2) == words
    assert "first" in words_of(data, 1)
    build(data, tmp_path / "report.html")


def test_promotions_that_did_not_last_are_counted_and_say_why(tmp_path: Path) -> None:
    moves = [
        move(1),
        move(2, "rolled back", after=1, then="bob: users complain"),
        move(1, "replaced", back=True),
        move(3, "serves", override=True, objection="it is undecided"),
    ]
    shown = page(tmp_path, moves=moves, policies=[policy(i) for i in (1, 2, 3)], gates=[verdict(2, "pass")])
    assert "Of 2 promotions, 1 did not last." in shown.text
    assert "rolled back then v1 by bob: users complain" in shown.text
    assert "override it passed although: it is undecided" in shown.text


def test_a_policy_that_an_experiment_harmed_was_never_promoted(tmp_path: Path) -> None:
    tried = {"number": 1, "candidate": 2, "control": 1, "started_at": 0.0, "state": "ended", "decision": "roll back",
             "why": "feedback is shown to be worse", "committed": False, "requests": 10, "candidate_blocks": 3,
             "control_blocks": 4}  # fmt: skip
    data = ReportData(
        title="x", policies=[policy(1), policy(2)], moves=[move(1, "serves")], gates=[verdict(2, "pass")],
        experiments=[tried],
    )  # fmt: skip
    assert words_of(data, 2) == ["passed, not promoted", "experiment 1: roll back"]
    assert "feedback is shown to be worse" in Page(build(data, tmp_path / "report.html").read_text()).text


def test_what_the_ledger_shows_is_drawn_and_in_tables(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "decisions")
    segments = {"fresh_segments": {"easy": 600}, "fresh": 600, "settings": config(worthwhile=None)}
    judged(ledger, 2, items(600, 0.15, segment="easy"), **segments)
    judged(ledger, 3, items(100, 0.05, seed=1, name="c", segment="easy"), incumbent=2, **segments)
    history = History.of(ledger.entries())
    shown = page(
        tmp_path, races=races(ledger, history, confidence=0.95), spending=spending(history),
        gates=[verdict(2, "pass"), verdict(3, "undecided", 2)],
    )  # fmt: skip
    assert {
        "Error budget spent by candidate",
        "Mean gain over items, with its bounds, by candidate",
        "Gain of each segment",
    } < set(shown.pictures())
    assert "Error budget spent 58% of 0.05; false discovery rate at most 0.05 (e_lond)" in shown.text
    assert re.search(r"v2 v1 easy \+0\.\d+ ", shown.text)
    assert "5.0 → 5.0" in shown.text
    assert "v2 against v1: passed" in (tmp_path / "report.html").read_text()


def test_a_judge_s_win_rates_and_its_ranking_are_there(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "decisions")
    for candidate, better in ((2, 1.0), (3, 0.6)):
        pairs = compared(300, better=better, longer=0.8, ratio=1.1, seed=candidate, name=f"{candidate}-")
        judged(ledger, candidate, pairs, incumbent=candidate - 1, settings=PAIRWISE, scorer="judge@1")
    ranked = [one.to_json(0.95) for one in rankings(ledger, History.of(ledger.entries()))]
    rate = Interval(value=0.6, low=0.55, high=0.65)
    found = Wins(rate=rate, raw=0.7, first=0.5, longer=0.61, identical=0)
    wins = evaluation().model_copy(update={"wins": found})
    missing = evaluation().model_copy(update={"wins_missing": "all answers are the same"})
    shown = page(tmp_path, gates=[verdict(2, "pass")], judged=[wins, missing], rankings=ranked)
    for words in ("60.0% 55.0% – 65.0% 70.0% 50.0% 61.0%", "all answers are the same", "All policies that judge@1 has"):
        assert words in shown.text, words
    order = re.findall(r"v(\d) [+−]\d\.\d\d [+−]\d\.\d\d to", shown.text)
    assert order == ["3", "2", "1"]


def test_a_scale_that_can_not_be_had_says_why(tmp_path: Path) -> None:
    scale = {"scorer": "judge@1", "versions": [1, 2], "missing": "length tells them all"}
    shown = page(tmp_path, gates=[verdict(2, "pass")], rankings=[scale])
    assert "Policies 1, 2 can’t be ranked: length tells them all" in shown.text


def test_runs_stand_side_by_side_with_what_the_gate_saw(tmp_path: Path) -> None:
    run = {"run": "cycle-000001", "candidate": 2, "reward_model": None, "reason": None, "algorithm": "grpo",
           "optimizer": "AdamW", "learning_rate": 3e-4, "batch": "40 × 8", "steps": 6, "reward_first": 0.5,
           "reward_last": 0.8, "max_kl": 0.37, "seconds": 1234.5}  # fmt: skip
    empty = {**dict.fromkeys(run), "run": "cycle-000002", "steps": 0}
    shown = page(tmp_path, runs=[run, empty], gates=[verdict(2, "pass")])
    assert "cycle-000001 v2 grpo AdamW 0.0003 40 × 8 6 0.500 → 0.800 0.370 +0.100 passed 1,234" in shown.text
    assert "cycle-000002 not ended – – – – 0 – – – – –" in shown.text


def test_a_hundred_candidates_and_suites_still_give_a_page(tmp_path: Path) -> None:
    policies = [policy(i, 0.5 + i / 1000) for i in range(1, 101)]
    data = ReportData(
        title="x", policies=policies, suites=[suite(*pair) for pair in itertools.pairwise(policies)],
        moves=[move(i) for i in range(1, 101)],
    )  # fmt: skip
    shown = Page(build(data, tmp_path / "report.html").read_text())
    assert data.letters[100] == "CU"
    assert "v100" in shown.text
