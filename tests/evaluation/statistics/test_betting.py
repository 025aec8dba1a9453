"""Tests by betting against exact sums over all paths, plain loops, and worlds whose mean is known."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.statistics import betting
from evaluation.statistics.betting import FRACTIONS, Hypothesis, OutOfBounds, Wealth, bet, rejects, start

NO_BETTER = Hypothesis(0.0, -1.0, 1.0)


def by_hand(values, mean, low):
    """Wealth of the even mixture after each value, from the paper's formula, in a plain loop."""
    bets = [1 / 16] * 16
    e_values = []
    for value in values:
        for k in range(16):
            largest = 1 / (mean - low)
            bets[k] *= 1 + ((k + 0.5) / 16) ** 2 * largest * (value - mean)
        e_values.append(sum(bets))
    return e_values


def test_wealth_is_that_of_the_formula():
    values = np.random.default_rng(0).uniform(-1, 1, 40)
    e_values = by_hand(values, 0.1, -1.0)
    wealth = bet(start(), values, Hypothesis(0.1, -1.0, 1.0))
    assert float(wealth.e_value) == pytest.approx(e_values[-1], rel=1e-12)
    assert float(wealth.peak) == pytest.approx(max(1.0, *e_values), rel=1e-12)
    assert wealth.n == 40
    assert float(wealth.mean) == pytest.approx(values.mean())


def test_one_win_earns_the_mean_of_the_fractions_and_one_loss_costs_it():
    # The mean of ((k + 1/2) / 16)^2 over k = 0..15 is 1/3 - 1/(12 * 256).
    mean = 1 / 3 - 1 / 3072
    assert float(bet(start(), [1.0], NO_BETTER).e_value) == pytest.approx(1 + mean)
    assert float(bet(start(), [-1.0], NO_BETTER).e_value) == pytest.approx(1 - mean)
    assert float(bet(start(), [0.0] * 9, NO_BETTER).e_value) == 1.0


def test_the_other_alternative_mirrors_the_first():
    values = np.random.default_rng(1).uniform(-1, 0.5, 60)
    greater = bet(start(), values, Hypothesis(-0.2, -1.0, 1.0))
    less = bet(start(), -values, Hypothesis(0.2, -1.0, 1.0, "less"))
    assert float(less.e_value) == float(greater.e_value)


@pytest.mark.parametrize("mean", [0.0, 0.3])
@pytest.mark.parametrize("alternative", ["greater", "less"])
def test_the_expected_e_value_is_exactly_1_where_the_mean_is_that_of_the_hypothesis(mean, alternative):
    # All 3^7 paths of seven observations of -1, 0 and 1, with their probabilities.
    up = 0.3 + mean / 2
    down = up - mean
    paths = np.array(list(itertools.product([-1.0, 0.0, 1.0], repeat=7)))
    probabilities = np.prod(np.where(paths > 0, up, np.where(paths < 0, down, 1 - up - down)), axis=1)
    wealth = bet(start((len(paths),)), paths, Hypothesis(mean, -1.0, 1.0, alternative))
    assert float(probabilities @ wealth.e_value) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda rng, shape: rng.choice([-1.0, 0.0, 1.0], shape, p=[0.2, 0.6, 0.2]), id="binary"),
        pytest.param(lambda rng, shape: rng.random(shape) - rng.random(shape), id="graded"),
        pytest.param(lambda rng, shape: np.where(rng.random(shape) < 0.02, -1.0, 0.0204), id="skewed"),
    ],
)
def test_looking_after_every_item_rejects_no_more_often_than_the_level_says(draw):
    rng = np.random.default_rng(7)
    wealth = bet(start((1000,)), draw(rng, (1000, 1000)), NO_BETTER)
    rejected = int(rejects(wealth, 0.05).sum())
    # 0.05 of 1,000 is 50; a level that held exactly would give more than 70 in 2 of 1,000 seeds.
    assert rejected <= scipy.stats.binom.ppf(0.998, 1000, 0.05)
    assert rejected >= 5  # and it is no test that never rejects


def test_the_skewed_candidate_that_the_bootstrap_passes_does_not_pass():
    rng = np.random.default_rng(3)
    for n in (50, 100):
        values = np.where(rng.random((1000, n)) < 0.02, -1.0, 0.0204)
        assert rejects(bet(start((1000,)), values, NO_BETTER), 0.025).mean() <= 0.025


def test_bets_are_within_a_factor_of_the_best_constant_bet_in_hindsight():
    values = np.random.default_rng(4).choice([-1.0, 0.0, 1.0], 4200, p=[0.035, 0.9, 0.065])
    best = max(float(np.log1p(fraction * values).sum()) for fraction in np.linspace(0.01, 0.99, 99))
    assert math.log(float(bet(start(), values, NO_BETTER).e_value)) > best - 3


values_and_cuts = st.integers(0, 2**32 - 1).flatmap(
    lambda seed: st.tuples(st.just(seed), st.integers(1, 300), st.lists(st.integers(0, 300), max_size=5))
)


@given(values_and_cuts, st.sampled_from(["greater", "less"]))
@settings(max_examples=60, deadline=None)
def test_going_on_from_a_record_gives_the_very_floats_of_one_pass(case, alternative):
    seed, n, cuts = case
    rng = np.random.default_rng(seed)
    values = rng.choice([-1.0, 0.0, 0.25, 0.7, 1.0], n) * rng.choice([1.0, rng.random()])
    hypothesis = Hypothesis(0.25, -1.0, 1.0, alternative)
    wealth = start()
    for part in np.split(values, sorted(cut for cut in cuts if cut < n)):
        wealth = Wealth.of(json.loads(json.dumps(bet(wealth, part, hypothesis).record())))
    assert wealth.record() == bet(start(), values, hypothesis).record()


def test_a_batch_gives_the_very_floats_of_its_tests_one_by_one():
    values = np.random.default_rng(5).choice([-1.0, 0.0, 1.0], (200, 700))
    batch = bet(bet(start((200,)), values[:, :333], NO_BETTER), values[:, 333:], NO_BETTER)
    for row, one in enumerate(values):
        single = bet(start(), one, NO_BETTER)
        assert (float(single.e_value), float(single.peak)) == (batch.e_value[row], batch.peak[row])


def test_wealth_beyond_the_largest_float_stays_evidence_and_has_a_record():
    wealth = bet(start(), np.ones(3000), NO_BETTER)
    assert math.isfinite(wealth.e_value)
    assert rejects(wealth, 1e-300)
    record = json.loads(json.dumps(wealth.record(), allow_nan=False))
    more = bet(Wealth.of(record), [-1.0] * 10, NO_BETTER)
    assert more.record() == bet(start(), [1.0] * 3000 + [-1.0] * 10, NO_BETTER).record()


def test_wealth_that_is_lost_stays_lost_and_does_not_fail():
    wealth = bet(start(), -np.ones(30_000), NO_BETTER)
    assert 0 <= float(wealth.e_value) < 1e-10
    assert float(wealth.peak) == 1.0


def test_a_record_with_another_number_of_bets_is_refused():
    record = {**start().record(), "bets": [0.5, 0.5]}
    with pytest.raises(ValueError, match="2 bets and this version makes 16"):
        Wealth.of(record)


def test_a_batch_has_no_record():
    with pytest.raises(ValueError, match="one by one"):
        start((3,)).record()


@pytest.mark.parametrize("bad", [1.5, -1.01, math.nan, math.inf])
def test_a_value_outside_the_bounds_is_refused_with_its_item_named(bad):
    with pytest.raises(OutOfBounds, match=r"item 'q17' has the value .*outside the bounds \[-1, 1\]"):
        bet(start(), [0.0, 1.0, bad, 0.0], NO_BETTER, ["q15", "q16", "q17", "q18"])
    wealth = bet(start(), [0.0] * 10, NO_BETTER)
    with pytest.raises(OutOfBounds, match="item 12 has"):
        bet(wealth, [0.0, bad], NO_BETTER)


def test_a_reward_outside_its_bounds_is_refused_before_it_is_a_difference():
    with pytest.raises(OutOfBounds, match="item 'b' has the value 2"):
        betting.paired_differences([1, 0], [1, 2], 0, 1, ["a", "b"])
    with pytest.raises(ValueError, match="pairs need one of each"):
        betting.paired_differences([1, 0, 1], [1, 0], 0, 1, ["a", "b"])
    assert betting.paired_differences([1, 0], [0.25, 1], 0, 1, ["a", "b"]).tolist() == [0.75, -1.0]


@pytest.mark.parametrize(("mean", "low", "high"), [(0, 0, 1), (1, 0, 1), (2, 0, 1), (0, -math.inf, 1)])
def test_a_mean_that_the_bounds_leave_nothing_to_test_about_is_refused(mean, low, high):
    with pytest.raises(ValueError, match="must lie within"):
        Hypothesis(mean, low, high)


def test_values_of_another_shape_than_the_tests_are_refused():
    with pytest.raises(ValueError, match="shape"):
        bet(start((3,)), np.zeros((2, 5)), NO_BETTER)
    with pytest.raises(ValueError, match="shape"):
        bet(start(), 0.5, NO_BETTER)


def test_a_level_of_0_rejects_nothing():
    assert not rejects(bet(start(), np.ones(3000), NO_BETTER), 0.0)


def test_bounds_and_tests_say_the_same():
    values = np.random.default_rng(6).normal(0.1, 0.3, 400).clip(-1, 1)
    lower = betting.lower_bounds(values, -1, 1, 0.05)
    upper = betting.upper_bounds(values, -1, 1, 0.05)
    step = 2 / 32**3
    for n in (1, 10, 100, 400):
        for mean, alternative, bound in ((lower[n - 1], "greater", lower), (upper[n - 1], "less", upper)):
            inside = mean + (1e-9 if alternative == "less" else -1e-9)
            if -1 < inside < 1:
                assert rejects(bet(start(), values[:n], Hypothesis(inside, -1, 1, alternative)), 0.05), bound
    beyond = lower[-1] + 1.001 * step
    assert not rejects(bet(start(), values, Hypothesis(beyond, -1, 1)), 0.05)
    beyond = upper[-1] - 1.001 * step
    assert not rejects(bet(start(), values, Hypothesis(beyond, -1, 1, "less")), 0.05)


def test_a_confidence_sequence_only_narrows_and_encloses_the_mean():
    values = np.random.default_rng(8).beta(2, 5, 1400)
    lower, upper = betting.confidence_sequence(values, 0, 1, 0.05)
    assert (np.diff(lower) >= 0).all()
    assert (np.diff(upper) <= 0).all()
    assert (lower < 2 / 7).all()
    assert (upper > 2 / 7).all()
    assert betting.interval(values, 0, 1, 0.05) == (lower[-1], upper[-1])
    # The price of looking always: within twice the interval of one look (Student's t, for these nearly normal means).
    t = scipy.stats.t.interval(0.95, 1399, values.mean(), scipy.stats.sem(values))
    assert t[1] - t[0] < upper[-1] - lower[-1] < 2 * (t[1] - t[0])


def test_a_confidence_sequence_covers_at_all_times_as_often_as_it_says():
    rng = np.random.default_rng(9)
    missed = 0
    for _ in range(150):
        lower, upper = betting.confidence_sequence(rng.choice([0.0, 0.5, 1.0], 150, p=[0.1, 0.3, 0.6]), 0, 1, 0.1)
        missed += bool((lower > 0.75).any() or (upper < 0.75).any())
    assert missed <= scipy.stats.binom.ppf(0.999, 150, 0.1)


def test_without_values_the_interval_is_that_of_the_bounds():
    assert betting.interval([], -1, 1, 0.05) == (-1, 1)


def test_one_value_rules_out_only_means_that_make_it_a_wonder():
    # Of "at most m", 0 is a 40-fold win when 1 + mean(FRACTIONS) * ((0 + 1) / (m + 1) - 1) = 40.
    lower, upper = betting.confidence_sequence([0.0], -1, 1, 0.05)
    m = 1 / (39 / (1 / 3 - 1 / 3072) + 1) - 1
    assert (lower[0], upper[0]) == pytest.approx((m, -m), abs=2 / 32**3)


def test_constant_values_are_enclosed_even_at_a_bound():
    lower, upper = betting.interval(np.ones(500), 0, 1, 0.05)
    assert 0.98 < lower < upper == 1
    lower, upper = betting.interval(np.zeros(500), 0, 1, 0.05)
    assert 0 == lower < upper < 0.02


@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=60),
    st.floats(-0.9, 0.9),
    st.floats(-0.9, 0.9),
)
@settings(max_examples=100, deadline=None)
def test_wealth_falls_as_the_mean_of_the_hypothesis_rises(values, one, other):
    low, high = min(one, other), max(one, other)
    smaller = bet(start(), values, Hypothesis(high, -1, 1))
    larger = bet(start(), values, Hypothesis(low, -1, 1))
    assert float(smaller.peak) <= float(larger.peak) * (1 + 1e-9)


def test_items_of_a_cluster_are_one_observation_in_order_of_appearance():
    means, names = betting.cluster_means([1.0, 0.0, 0.5, 1.0, 0.0], ["b", "a", "b", "b", "c"])
    assert names == ["b", "a", "c"]
    assert means.tolist() == pytest.approx([2.5 / 3, 0.0, 0.0])
    batch, _ = betting.cluster_means([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5]], ["a", "b", "b"])
    assert batch.tolist() == [[1.0, 0.0], [0.0, 0.75]]


def test_rounding_carries_no_mean_of_a_cluster_out_of_its_bounds():
    means, _ = betting.cluster_means([0.1] * 3, ["a"] * 3)
    assert means.tolist() == [0.1]  # 0.1 + 0.1 + 0.1 is more than 0.3


def test_a_cluster_that_was_counted_before_is_refused_by_name():
    with pytest.raises(ValueError, match="cluster 'chat 7' has been counted before"):
        betting.cluster_means([1.0, 0.0], ["chat 8", "chat 7"], counted={"chat 7"})
    with pytest.raises(ValueError, match="1 values for 2 names"):
        betting.cluster_means([1.0], ["a", "b"])


def test_what_is_dependent_within_clusters_is_tested_at_the_level_by_their_means():
    rng = np.random.default_rng(11)
    clusters = np.repeat(np.arange(40), 25).tolist()
    values = np.repeat(rng.choice([-1.0, 1.0], (500, 40)), 25, axis=1)
    means, _ = betting.cluster_means(values, clusters)
    assert rejects(bet(start((500,)), means, NO_BETTER), 0.05).mean() <= 0.07
    # Counted as items they would seem 25 times as many: the test would be false in half of all cases.
    assert rejects(bet(start((500,)), values, NO_BETTER), 0.05).mean() > 0.3


def test_how_many_more_items_are_needed_is_about_right():
    rng = np.random.default_rng(12)
    values = rng.choice([-1.0, 0.0, 1.0], 2000, p=[0.035, 0.9, 0.065])
    wealth = bet(start(), values, NO_BETTER)
    needed = betting.more_items(wealth, 1e-6)
    assert needed is not None
    # Items like those so far: the same, drawn again.
    enough = [rejects(bet(wealth, rng.choice(values, needed), NO_BETTER), 1e-6) for _ in range(40)]
    assert 0.3 < np.mean(enough) < 0.9
    assert betting.more_items(bet(start(), np.ones(100), NO_BETTER), 1e-6) == 0


def test_no_number_of_items_is_promised_where_nothing_was_earned():
    assert betting.more_items(start(), 0.05) is None
    assert betting.more_items(bet(start(), [-1.0] * 20, NO_BETTER), 0.05) is None
    assert betting.more_items(bet(start(), [1.0] * 5, NO_BETTER), 0.0) is None


def test_the_fractions_leave_every_bet_something():
    assert (FRACTIONS > 0).all()
    assert (FRACTIONS < 1).all()
