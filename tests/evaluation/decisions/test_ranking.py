"""One scale for all policies that a judge has compared, from the evidence that verdicts have kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.decisions.history import History
from evaluation.decisions.ledger import Ledger, LedgerDamaged
from evaluation.decisions.ranking import rankings
from tests.evaluation.decisions.worlds import compared, config, items, judged

PAIRWISE = config(max_items=300, worthwhile=None).model_copy(update={"scorer": "pairwise"})
ODDS = {2: 1.0, 3: 0.5}  # policy 2 against 1, 3 against 2


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "decisions")


def race(ledger: Ledger, candidate: int, incumbent: int, better: float, **more: str) -> None:
    """A judge takes the longer of two equal answers more than twice as often; the candidate's are longer."""
    pairs = compared(300, better=better, longer=0.8, ratio=1.1, seed=candidate, name=f"{candidate}-")
    judged(ledger, candidate, pairs, incumbent=incumbent, settings=PAIRWISE, **{"scorer": "judge@1", **more})


def test_policies_that_never_met_are_ranked_by_those_between_them_without_the_judge_s_liking_for_length(
    ledger: Ledger,
) -> None:
    race(ledger, 2, 1, ODDS[2])
    race(ledger, 3, 2, ODDS[3])
    judged(ledger, 9, items(300, 0.2, name="other"), incumbent=8)  # by a rule, which compares nothing
    (found,) = rankings(ledger, History.of(ledger.entries()))
    assert list(found.versions.values()) == [3, 2, 1]
    assert found.strengths is not None
    best, _, first = found.versions
    _, low, high = found.strengths.win_rate(best, first, confidence=0.99)
    truth = 1 / (1 + 2.718281828 ** -(ODDS[2] + ODDS[3]))
    assert low < truth < high
    assert high - low < 0.3
    assert 0.6 < found.strengths.longer < 0.8


def test_another_judge_and_policies_that_nothing_links_have_a_scale_of_their_own_the_newest_first(
    ledger: Ledger,
) -> None:
    race(ledger, 2, 1, 1.0)
    race(ledger, 5, 4, 1.0)
    race(ledger, 6, 5, 1.0, scorer="judge@2")
    found = rankings(ledger, History.of(ledger.entries()))
    assert [(one.scorer, list(one.versions.values())) for one in found] == [
        ("judge@2", [6, 5]),
        ("judge@1", [2, 1]),
        ("judge@1", [5, 4]),
    ]


def test_what_can_not_be_told_from_length_has_no_strengths_and_says_why(ledger: Ledger) -> None:
    pairs = compared(200, better=1.0, longer=0.0, ratio=1.2, spread=0.0)
    judged(ledger, 2, pairs, settings=PAIRWISE, scorer="judge@1")
    (found,) = rankings(ledger, History.of(ledger.entries()))
    assert (found.strengths, list(found.versions.values())) == (None, [1, 2])
    assert "can't tell the policies from the order or the lengths" in str(found.missing)


def test_evidence_that_was_changed_is_named(ledger: Ledger) -> None:
    race(ledger, 2, 1, 1.0)
    (path,) = (ledger.folder / "evidence").iterdir()
    path.write_bytes(path.read_bytes().replace(b"1.0", b"0.0"))
    with pytest.raises(LedgerDamaged, match="was changed"):
        rankings(ledger, History.of(ledger.entries()))
