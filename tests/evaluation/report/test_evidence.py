"""What the report says of candidates, from ledgers of worlds whose truth is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evaluation.decisions.history import History
from evaluation.decisions.ledger import Ledger
from evaluation.report.evidence import Race, Spending, races, spending
from evaluation.report.page import ReportData, build
from evaluation.statistics.error_budget import level
from tests.evaluation.decisions.worlds import COMPARED, config, items, judged, seen


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "decisions")


def history(ledger: Ledger) -> History:
    return History.of(ledger.entries())


def raced(ledger: Ledger) -> list[Race]:
    return races(ledger, history(ledger), confidence=0.95)


def spent(ledger: Ledger) -> Spending:
    found = spending(history(ledger))
    assert found is not None
    return found


def test_the_lower_bound_rises_above_what_must_be_shown_where_the_gate_passes_and_not_before(ledger: Ledger) -> None:
    entry = judged(ledger, 2, items(600, 0.15))
    (race,) = raced(ledger)
    assert (race.verdict, race.entry, race.items) == ("pass", entry.number, entry.body["items"])
    assert race.running_mean[-1] == pytest.approx(entry.body["difference"])
    assert race.lower[-1] > race.least
    looks_before = race.lower[: len(race.gains) - 50]  # it passed at its last look, of 50 items
    assert (looks_before[np.arange(49, len(looks_before), 50)] <= race.least).all()
    assert (np.diff(race.lower) >= 0).all()
    assert (np.diff(race.upper) <= 0).all()


def test_the_upper_bound_falls_below_what_is_worthwhile_where_the_gate_refuses_for_that(ledger: Ledger) -> None:
    judged(ledger, 2, items(900, -0.2, seed=1), settings=config(guardrails={"regression": None}))
    (race,) = raced(ledger)
    assert "no worthwhile gain" in race.reasons[0]
    assert race.upper[-1] < race.worthwhile == 0.02
    assert race.lower[-1] <= race.least


def test_the_bounds_go_on_over_all_looks_of_a_candidate(ledger: Ledger) -> None:
    settings = config(max_items=5000)
    judged(ledger, 2, items(100, 0.05), settings=settings)
    (half,) = raced(ledger)
    judged(ledger, 2, items(200, 0.05, seed=7, name="j"), settings=settings)
    (whole,) = raced(ledger)
    assert (half.verdict, len(half.gains), len(whole.gains)) == ("undecided", 100, 300)
    assert whole.lower[:100] == pytest.approx(half.lower, abs=0.1)  # the grid of bounds is laid out from its end
    assert whole.upper[-1] - whole.lower[-1] < 0.8 * (half.upper[-1] - half.lower[-1])


def test_segments_have_their_gain_and_whether_their_guardrail_holds(ledger: Ledger) -> None:
    good = items(300, 0.4, differing=0.5, name="g", segment="good")
    bad = items(300, -0.4, differing=0.5, name="b", seed=1, segment="bad")
    mixed = tuple(one for pair in zip(good, bad, strict=True) for one in pair)
    judged(ledger, 2, mixed, fresh_segments={"good": 300, "bad": 300}, fresh=600)
    (race,) = raced(ledger)
    rows = {row.name: row for row in race.segments}
    assert list(rows) == ["bad", "good"]
    assert (rows["bad"].role, rows["bad"].state) == ("guardrail", "refuted")
    assert rows["bad"].low <= rows["bad"].gain <= rows["bad"].high < 0 < rows["good"].low
    assert rows["bad"].n + rows["good"].n == race.items
    assert race.segment_margin == 0.1


def test_style_is_of_both_policies_with_the_state_of_its_guardrail(ledger: Ledger) -> None:
    answers = {"length": (20, 10), "truncated": (1, 0), "distinct": (0.5, 1), "repeated": (0.4, 0), "kl": 0.25}
    timed = {"latency": (0.03, 0.02)}
    observations = tuple(seen(f"i{i}", 1.0, 0.0, **answers, **(timed if i < 10 else {})) for i in range(200))
    judged(ledger, 2, observations, timed=True)
    (race,) = raced(ledger)
    style = {one.name: (one.incumbent, one.candidate, one.state) for one in race.style}
    assert style == {
        "length": (10, 20, "open"),
        "truncation": (0, 1, "refuted"),
        "distinct_n": (1, 0.5, "refuted"),
        "repetition": (0, pytest.approx(0.4), "refuted"),
        "latency": (pytest.approx(0.02), pytest.approx(0.03), "open"),
        "kl": (None, 0.25, None),
    }
    page = build(ReportData(title="t", races=(race,)), ledger.folder / "report.html").read_text()
    assert "0.02 s → 0.03 s" in page
    assert "of policies of different shapes or types" in page


def test_what_is_spent_is_what_the_rule_keeps_below_alpha(ledger: Ledger) -> None:
    judged(ledger, 2, items(600, 0.15))
    judged(ledger, 3, items(600, -0.2, name="c"), incumbent=2)
    found, events = spent(ledger), history(ledger).events
    levels = [level(history(ledger).budget, events, name) for name in history(ledger).candidates]  # type: ignore[arg-type]
    assert [one.level for one in found.candidates] == levels
    # The pass doubled the second level; what e-LOND bounds is the level before that.
    assert [one.so_far for one in found.candidates] == pytest.approx([levels[0], levels[0] + levels[1] / 2])
    (budget,) = found.budgets
    assert (budget.candidates, budget.levels) == (2, pytest.approx(sum(levels)))
    assert budget.spent == found.candidates[-1].so_far < budget.alpha
    assert found.promise == "false discovery rate at most 0.05 (e_lond)"


def test_a_budget_that_is_declared_anew_has_a_row_of_its_own_and_forgives_nothing(ledger: Ledger) -> None:
    fixed = config(budget={"rule": "fixed_horizon", "alpha": 0.1, "horizon": 10})
    judged(ledger, 2, items(600, -0.2))
    judged(ledger, 3, items(600, -0.2, name="c"), settings=fixed)
    judged(ledger, 4, items(600, -0.2, name="d"), settings=fixed)
    first, second = spent(ledger).budgets
    assert (first.rule, first.candidates, second.rule, second.candidates) == ("e_lond", 1, "fixed_horizon", 2)
    assert second.levels == pytest.approx(0.02)
    assert second.spent == pytest.approx(first.spent + 0.02)


def test_an_evaluation_that_was_killed_has_spent_its_level_and_shows_no_gain(ledger: Ledger) -> None:
    judged(ledger, 2, items(100, 0.1), killed=True)
    assert raced(ledger) == []
    assert [(one.candidate, one.so_far > 0) for one in spent(ledger).candidates] == [(2, True)]


def test_an_empty_ledger_has_spent_nothing(ledger: Ledger) -> None:
    assert spending(history(ledger)) is None
    assert raced(ledger) == []


def test_the_report_has_both_rewards_of_a_candidate_and_the_root_of_its_kl_from_the_first(ledger: Ledger) -> None:
    both = {"proxy": (3.5, 3.0), "holdout": (0.4, 0.7), "kl_v1": 0.09}
    judged(ledger, 2, items(400, 0.25, **both), rewards=COMPARED)
    (race,) = raced(ledger)
    found = race.over_optimisation
    assert found is not None
    assert found.candidate.proxy is not None
    assert found.incumbent.holdout is not None
    assert (found.candidate.proxy.value, found.incumbent.holdout.value) == (3.5, pytest.approx(0.7))
    assert found.sqrt_kl_v1 == pytest.approx(0.3)
    data = ReportData(title="t", races=(race,), first=1)
    assert [(point.version, point.sqrt_kl) for point in data.moved] == [(2, pytest.approx(0.3)), (1, 0.0)]
    page = build(data, ledger.folder / "report.html").read_text()
    assert "Rewards over the root of KL from the first policy" in page
