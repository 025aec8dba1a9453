"""Win rates and strengths against scipy's optimiser, numbers worked out by hand, and judges of known habits."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit

from evaluation.statistics import pairwise
from evaluation.statistics.pairwise import bradley_terry, win_rate

HOW = {"confidence": 0.95}


def both_orders(first: np.ndarray, second: np.ndarray, **lengths: np.ndarray) -> pairwise.WinRate:
    n = len(first)
    return win_rate(
        np.concatenate([first, second]),
        np.repeat([True, False], n),
        items=np.tile(np.arange(n), 2),
        **{name: np.tile(column, 2) for name, column in lengths.items()},
        **HOW,
    )


def judged(rng: np.random.Generator, n: int, quality: float, first: float, length: float, longer: float):
    """(preference shown first, shown second, lengths of both) by a judge of these habits, in log odds."""
    ours, theirs = rng.lognormal(4 + longer, 0.5, n), rng.lognormal(4, 0.5, n)
    term = np.tanh((ours - theirs) / np.sqrt(((ours - theirs) ** 2).mean())) * length
    draws = rng.random((2, n))
    return draws[0] < expit(quality + first + term), draws[1] < expit(quality - first + term), ours, theirs


def test_identical_texts_give_exactly_one_half_whatever_the_judge_said():
    found = win_rate([1, 1, 1, 0.9], [True, False, True, False], items=[0, 0, 1, 1], identical=[True] * 4, **HOW)
    assert (found.value, found.raw, found.items, found.identical) == (0.5, 0.5, 2, 2)


def test_a_judge_that_always_takes_the_first_gives_exactly_one_half():
    found = both_orders(np.ones(200), np.zeros(200))
    assert found.value == pytest.approx(0.5, abs=1e-12)
    assert found.first > 0.99


def test_without_habits_the_win_rate_is_the_share_of_wins_but_for_one_tie():
    wins = np.repeat([1.0, 0.0], [30, 10])
    found = win_rate(wins, np.tile([True, False], 20), items=np.arange(40), **HOW)
    assert found.value == pytest.approx(30.5 / 41, abs=1e-3)  # 30 wins of 40 and a tie
    assert found.raw == 0.75
    half = 1.96 / np.sqrt(40 * 0.75 * 0.25)
    assert (found.low, found.high) == pytest.approx(tuple(expit(logit(30.5 / 41) + np.array([-half, half]))), abs=0.01)


def test_the_position_of_the_answers_is_taken_out_where_the_mean_of_both_orders_is_not_enough():
    rng = np.random.default_rng(1)
    first, second, *_ = judged(rng, 40_000, float(logit(0.6)), float(logit(0.7)), 0.0, 0.0)
    found = both_orders(first, second)
    assert found.raw == pytest.approx(0.5845, abs=0.006)  # (expit(1.252) + expit(-0.442)) / 2
    assert found.value == pytest.approx(0.6, abs=0.008)
    assert found.first == pytest.approx(0.7, abs=0.008)


def test_a_taste_for_length_is_taken_out():
    rng = np.random.default_rng(2)
    first, second, ours, theirs = judged(rng, 40_000, float(logit(0.6)), 0.0, 1.0, 0.4)
    found = both_orders(first, second, candidate_lengths=ours, baseline_lengths=theirs)
    assert found.raw > 0.64
    assert found.value == pytest.approx(0.6, abs=0.01)
    assert found.longer == pytest.approx(float(expit(np.tanh(1.0))), abs=0.02)


def test_the_interval_covers_with_both_orders_of_an_item_as_one_observation():
    rng = np.random.default_rng(3)
    truth = float(expit(np.random.default_rng(0).normal(0.3, 2.0, 400_000)).mean())
    covered = 0
    for _ in range(200):
        item = expit(rng.normal(0.3, 2.0, 150))  # a judge that mostly repeats itself when the order turns
        first = rng.random(150) < item
        second = np.where(rng.random(150) < 0.9, first, rng.random(150) < item)
        found = both_orders(first, second)
        covered += found.low <= truth <= found.high
    assert covered / 200 > 0.92


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(1, 60), st.integers(1, 60)), min_size=1))
def test_swapping_the_sides_turns_the_win_rate_round(rows: list[tuple[int, bool, int, int]]):
    wins = np.array([row[0] for row in rows]) / 4
    first, ours, theirs = (np.array([row[at] for row in rows]) for at in (1, 2, 3))
    wins, ours, theirs = np.append(wins, [0.5] * 4), np.append(ours, [9, 5, 3, 4]), np.append(theirs, [5, 9, 4, 3])
    first = np.append(first, [True, False, False, True])
    items = np.arange(len(wins)) // 2
    one = win_rate(wins, first, items=items, candidate_lengths=ours, baseline_lengths=theirs, **HOW)
    other = win_rate(1 - wins, ~first, items=items, candidate_lengths=theirs, baseline_lengths=ours, **HOW)
    assert one.value == pytest.approx(1 - other.value, abs=1e-8)
    assert (one.low, one.high) == pytest.approx((1 - other.high, 1 - other.low), abs=1e-8)
    assert 0 <= one.low <= one.value <= one.high <= 1


def test_strengths_are_the_likeliest_ones_by_scipys_optimiser(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pairwise, "_TIES", 0.0)
    monkeypatch.setattr(pairwise, "_RIDGE", 1e-9)
    rng = np.random.default_rng(4)
    names, truth = ["a", "b", "c", "d"], np.array([0.0, 0.5, 1.0, -0.7])
    i = rng.integers(0, 4, 600)
    j = (i + rng.integers(1, 4, 600)) % 4
    wins = (rng.random(600) < expit(truth[i] - truth[j] + 0.6)).astype(float)
    found = bradley_terry([names[at] for at in i], [names[at] for at in j], wins, items=np.arange(600))

    def loss(beta: np.ndarray) -> float:
        logits = np.append(beta[:3], 0.0)[i] - np.append(beta[:3], 0.0)[j] + beta[3]
        return -float((wins * logits - np.logaddexp(0, logits)).sum())

    theirs = np.append(scipy.optimize.minimize(loss, np.zeros(4), tol=1e-12).x[:3], 0.0)
    assert found.strengths == pytest.approx(theirs - theirs.mean(), abs=1e-4)
    assert found.comparisons.sum() == 1200
    share, low, high = found.win_rate("c", "d", **HOW)
    assert low < expit(1.7) < high
    assert share == pytest.approx(1 - found.win_rate("d", "c", **HOW)[0])


def test_intervals_of_strengths_cover():
    rng = np.random.default_rng(5)
    truth = np.array([0.4, 0.0, -0.4])
    covered = 0
    for _ in range(200):
        i = rng.integers(0, 3, 300)
        j = (i + rng.integers(1, 3, 300)) % 3
        wins = (rng.random(300) < expit(truth[i] - truth[j] + 0.8)).astype(float)
        found = bradley_terry(
            np.array(list("abc"))[i].tolist(), np.array(list("abc"))[j].tolist(), wins, items=np.arange(300)
        )
        _, low, high = found.strength("a", **HOW)
        covered += low <= 0.4 <= high
    assert covered / 200 > 0.91


def test_a_policy_that_always_wins_has_a_finite_strength():
    found = bradley_terry(["a", "b"] * 10, ["b", "a"] * 10, np.tile([1.0, 0.0], 10), items=np.arange(20))
    assert 1 < found.strength("a", **HOW)[0] < 10


def test_a_candidate_that_always_wins_has_an_interval_about_as_wide_as_wilsons():
    found = both_orders(np.ones(40), np.ones(40))
    assert found.low == pytest.approx(0.91, abs=0.04)  # Wilson's for 40 of 40
    assert found.value > 0.97


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: win_rate([], [], items=[], **HOW), "one value or more"),
        (lambda: win_rate([0.5, 1.5], [True, False], items=[0, 0], **HOW), "judgement 1 has 1.5"),
        (lambda: win_rate([np.nan], [True], items=[0], **HOW), "judgement 0 has nan"),
        (lambda: win_rate([1.0], [True, False], items=[0], **HOW), "candidate_first must have one entry for each of 1"),
        (
            lambda: win_rate([1.0, 0.0], [True, False], items=[0, 0], confidence=95),
            "confidence must lie between 0 and 1",
        ),
        (lambda: win_rate([1.0, 0.0], [True, True], items=[0, 1], **HOW), "judge each pair in both orders"),
        (lambda: bradley_terry(["a"] * 2, ["b"] * 2, [1.0, 0.0], items=[0, 1]), "judge each pair in both orders"),
        (lambda: bradley_terry(["a"], ["a"], [1.0], items=[0]), "policy a is compared with itself"),
        (lambda: bradley_terry(["a"], ["b", "c"], [1.0], items=[0]), "1 preferences between 1 and 2 policies"),
        (lambda: bradley_terry(["a", "c"], ["b", "d"], [1.0, 0.0], items=[0, 1]), "no common scale: a, b; c, d"),
    ],
)
def test_what_can_not_be_compared_is_refused_with_the_reason(call, words: str):
    with pytest.raises(ValueError, match=words):
        call()
