"""The wealth of a bettor against plain loops, and what it never does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.statistics.wealth import FRACTIONS, first_crossing, greatest_refuted, wealth_path


def test_the_wealth_is_the_mean_of_what_each_stake_earned():
    values, low = [0.5, -1.0, 2.0], [-1.0, -2.0, -1.0]
    expected, wealth = [], [1.0] * len(FRACTIONS)
    for value, least in zip(values, low, strict=True):
        wealth = [w * (1 + f * (value - 0.1) / (0.1 - least)) for w, f in zip(wealth, FRACTIONS, strict=True)]
        expected.append(sum(wealth) / len(FRACTIONS))
    assert wealth_path(values, low, 0.1).tolist() == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.5, 100)), min_size=1, max_size=30),
    st.floats(-0.9, 0.9),
    st.floats(0, 0.09),
)
def test_wealth_is_never_negative_and_falls_as_the_mean_rises(
    rows: list[tuple[float, float]], mean: float, more: float
):
    low = np.array([-span - 1 for _, span in rows])
    values = low + np.array([share for share, _ in rows]) * np.array([2 * span + 2 for _, span in rows])
    path = wealth_path(values, low, mean)
    assert (path >= 0).all()
    assert (wealth_path(values, low, mean + more) <= path * (1 + 1e-12)).all()


def test_its_mean_is_one_where_the_hypothesis_is_just_true():
    values = np.random.default_rng(0).choice([-1.0, 1.0], (40_000, 6))
    assert wealth_path(values, -1.0, 0.0)[:, -1].mean() == pytest.approx(1.0, abs=0.01)


def test_histories_stand_in_leading_axes_and_none_depends_on_another():
    values = np.random.default_rng(1).random((3, 4, 50))
    path = wealth_path(values, 0.0, 0.3)
    assert np.array_equal(path[2, 1], wealth_path(values[2, 1], 0.0, 0.3))
    assert first_crossing(path, 0.05).shape == (3, 4)
    assert first_crossing(np.array([[1.0, 20.0, 3.0], [1.0, 19.9, 3.0]]), 0.05).tolist() == [2, 0]


def test_the_greatest_refuted_mean_is_where_the_wealth_crosses():
    values = np.full(200, 0.8)
    found = greatest_refuted(lambda mean: wealth_path(values, 0.0, mean), 0.05, 0.0, 1.0)
    assert wealth_path(values, 0.0, found).max() >= 20 > wealth_path(values, 0.0, found + 2e-5).max()
    assert greatest_refuted(lambda mean: wealth_path(np.zeros(0), 0.0, mean), 0.05, -1.0, 1.0) == -1.0
