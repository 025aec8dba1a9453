"""How many items a gain needs, against plays of the test itself and what theory gives."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evaluation.statistics import betting, power

NO_BETTER = betting.Hypothesis(0.0, -1.0, 1.0)


def test_three_points_have_the_mean_and_the_share_that_were_asked_for():
    outcomes = power.three_points(0.03, 0.1, 0.5)
    assert outcomes.values.tolist() == [-0.5, 0.0, 0.5]
    assert outcomes.probabilities.tolist() == pytest.approx([0.02, 0.9, 0.08])
    assert outcomes.mean == pytest.approx(0.03)


def test_a_gain_that_no_such_items_can_give_is_refused():
    with pytest.raises(ValueError, match=r"lies within ±0\.05"):
        power.three_points(0.06, 0.1, 0.5)


def test_past_differences_keep_their_values_and_get_the_gains_mean():
    past = np.random.default_rng(0).choice([-1.0, -0.5, 0.0, 0.5, 1.0], 500, p=[0.1, 0.1, 0.6, 0.1, 0.1])
    outcomes = power.tilted(past, 0.07)
    assert outcomes.mean == pytest.approx(0.07, abs=1e-9)
    assert outcomes.probabilities.sum() == pytest.approx(1)
    shares = {value: np.mean(past == value) for value in outcomes.values}
    ratios = {v: p / shares[v] for v, p in zip(outcomes.values, outcomes.probabilities, strict=True)}
    # Exponential tilting: log ratios are linear in the value.
    slope = math.log(ratios[1.0] / ratios[0.0])
    assert math.log(ratios[0.5] / ratios[-0.5]) == pytest.approx(slope)


@pytest.mark.parametrize("gain", [0.0, 1.0, -2.0])
def test_a_gain_outside_of_past_differences_is_refused(gain):
    with pytest.raises(ValueError, match="can't come from past differences"):
        power.tilted([0.0, 0.5, 1.0], gain)
    with pytest.raises(ValueError, match="within none"):
        power.tilted([], gain)


def test_the_number_of_items_gives_the_power_on_draws_of_its_own():
    outcomes = power.three_points(0.1, 0.3)
    need = power.items_needed(outcomes, NO_BETTER, 0.001, power=0.9)
    assert need.items is not None
    assert need.median is not None
    assert need.median < need.items
    drawn = np.random.default_rng(99).choice(outcomes.values, (1000, need.items), p=outcomes.probabilities)
    share = np.mean(betting.rejects(betting.bet(betting.start((1000,)), drawn, NO_BETTER), 0.001))
    assert share == pytest.approx(0.9, abs=0.04)
    # No test can need fewer than the expected log-likelihood ratio of the best bet says for half of the runs.
    rate = sum(p * math.log1p(v / 3) for v, p in zip(outcomes.values, outcomes.probabilities, strict=True))
    assert need.median > 0.8 * math.log(1000) / rate


def test_smaller_gains_and_smaller_levels_need_more():
    def items(gain, alpha):
        return power.items_needed(power.three_points(gain, 0.3), NO_BETTER, alpha).items

    assert items(0.2, 0.05) < items(0.1, 0.05) < items(0.1, 0.0005)


def test_what_can_be_shown_by_no_number_of_items_says_so():
    need = power.items_needed(power.three_points(0.0, 0.1), NO_BETTER, 1e-6, max_items=500)
    assert need.items is None
    assert need.median is None


def test_a_power_or_a_level_that_is_no_probability_is_refused():
    for wrong in ({"power": 1.0, "alpha": 0.05}, {"power": 0.9, "alpha": 0.0}):
        with pytest.raises(ValueError, match="between 0 and 1"):
            power.items_needed(power.three_points(0.1, 0.3), NO_BETTER, **wrong)


def test_the_first_guess_of_a_gain_is_near():
    gain = power.detectable_gain(2800, 0.1, 5e-5)
    need = power.items_needed(power.three_points(gain, 0.1), NO_BETTER, 5e-5, max_items=10_000)
    assert need.median == pytest.approx(2800, rel=0.3)
