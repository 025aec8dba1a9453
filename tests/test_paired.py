"""What benchmarks say of figures that turns measured."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from loadtests import paired
from loadtests.paired import Ratio, pooled, ratio


def test_the_interval_of_one_turn_is_open_and_valid_json() -> None:
    for found in (ratio([2.0], [1.0]), pooled([[2.0]], [[1.0]], 50)):
        assert json.dumps(found.interval(), allow_nan=False) == "[0.0, null]"
        assert found.judge("at least", 1.0) == "undecided"
    assert ratio([2.0, 2.0], [1.0, 1.0]).interval() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("interval", "at_least", "at_most"),
    [((1.0, 1.2), "met", "undecided"), ((0.8, 0.9), "missed", "met"), ((1.1, 1.2), "met", "missed")],
)
def test_a_bar_is_met_or_missed_only_if_the_whole_interval_is(
    interval: tuple[float, float], at_least: str, at_most: str
) -> None:
    found = Ratio(1.0, *interval)
    assert (found.judge("at least", 1.0), found.judge("at most", 1.0)) == (at_least, at_most)


def test_a_pooled_percentile_is_of_all_answers_and_not_the_mean_of_each_turns_greatest() -> None:
    ours = [[float(value) for value in range(turn, 1001, 10)] for turn in range(1, 11)]  # 1 … 1000
    assert paired.percentile(ours, 99) == 990.0
    assert paired.percentile(ours, 50) == 500.0
    found = pooled(ours, [[2 * value for value in turn] for turn in ours], 99)
    assert found.value == pytest.approx(0.5)
    # Each draw has the same turns of both servers, so that a turn with slow answers on both sides widens nothing.
    assert found.width == pytest.approx(0.0, abs=1e-9)


def test_the_interval_of_two_turns_is_the_bootstraps_worked_out_by_hand() -> None:
    """Three of four draws have the lesser turn's answer as their median, so the error is sqrt(3 / 16) of the distance.

    Times sqrt(2), and Student's t of one degree of freedom is 12.706.
    """
    found = pooled([[1.0], [1.1]], [[1.0], [1.0]], 50)
    half = 12.706 * math.sqrt(2) * math.sqrt(3 / 16) * math.log(1.1)
    assert found.value == 1.0
    assert math.log(found.high) == pytest.approx(half, rel=0.1)
    assert math.log(found.low) == pytest.approx(-half, rel=0.1)


def test_an_interval_covers_the_truth_about_as_often_as_it_says_though_turns_drift() -> None:
    chance = np.random.default_rng(2)
    covered = 0
    for _ in range(40):
        drift = chance.normal(0, 0.3, 10)  # of the machine, for both servers of a pair
        ours, theirs = (
            [np.exp(chance.normal(shift + each + chance.normal(0, 0.1), 0.5, 50)).tolist() for each in drift]
            for shift in (math.log(1.2), 0.0)
        )
        found = pooled(ours, theirs, 90)
        covered += found.low <= 1.2 <= found.high
    assert covered >= 34


def test_the_same_turns_give_the_same_interval() -> None:
    ours, theirs = [[1.0, 2.0], [1.5, 3.0], [1.2, 2.2]], [[1.0, 1.5], [1.1, 2.0], [1.3, 2.5]]
    assert pooled(ours, theirs, 50) == pooled(ours, theirs, 50)
