"""The live worlds, with few histories: figures in their places, bars that can be missed."""

from __future__ import annotations

import numpy as np
import pytest

from deploy.examples.simulate import live


@pytest.mark.parametrize(
    ("name", "histories"),
    [
        ("harm_median_feedbacks.10", 20),
        ("harm_median_feedbacks.15", 20),
        pytest.param("false_rollback", 200, marks=pytest.mark.long),
    ],
)
def test_harm_is_rolled_back_in_time_and_no_difference_hardly_ever(name: str, histories: int):
    played = live.WORLDS[name](histories, 0)
    assert list(played.figures) == [name]
    assert played.kept, played.detail


def test_estimates_of_a_log_and_win_rates_are_near_the_truth():
    played = live.off_policy_estimates(20, 0)
    assert set(played.figures) == {"off_policy.mean_error", "off_policy.coverage"}
    assert played.figures["off_policy.mean_error"] < 0.02
    assert live.judge_error(20, 0).kept


def test_adjusted_evidence_errs_as_seldom_and_needs_fewer_blocks():
    played = live.adjusted_evidence(60, 0)
    assert played.kept, played.detail
    assert set(played.figures) == {"adjusted.false_rollback", "adjusted.harm_median_blocks"}


def test_the_same_seed_gives_the_same_figures_and_another_seed_others():
    assert live.harm(15, 10, 1) == live.harm(15, 10, 1)
    assert live.harm(15, 10, 1) != live.harm(15, 10, 2)


def test_a_bar_can_be_missed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live, "MOST_FEEDBACKS", {15: 30})
    assert not live.harm(15, 10, 0).kept


def test_twice_the_harm_is_seen_in_less_than_half_the_feedbacks():
    rng = np.random.default_rng(0)
    some, twice = (np.median(live.feedbacks_until_rollback(rng, harm, 8000, 60)) for harm in (0.08, 0.16))
    assert 0 < twice < some / 2
