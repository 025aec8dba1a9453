"""Intervals against scipy, brute force and simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats

from evaluation.statistics.intervals import best_of, bootstrap_mean, bootstrap_ratio, paired_bootstrap, wilson

HOW = {"confidence": 0.95, "resamples": 20_000, "seed": 3}


def test_the_interval_of_a_mean_is_that_of_scipys_percentile_bootstrap():
    values = np.random.default_rng(0).gamma(1.0, size=60)
    mean, low, high = bootstrap_mean(values, **HOW)
    theirs = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert mean == pytest.approx(values.mean())
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=0.02 * values.std())


def test_few_distinct_values_give_the_quantiles_of_all_possible_resamples():
    values = np.array([0.0, 0.0, 1.0, 1.0, 3.0])
    everything = [np.mean(draw) for draw in itertools.product(values, repeat=len(values))]
    _, low, high = bootstrap_mean(values, **HOW)
    exact = np.quantile(everything, [0.025, 0.975], method="inverted_cdf")
    assert (low, high) == pytest.approx(tuple(exact), abs=0.21)  # one step between neighbouring means is 0.2


def test_pairing_compares_item_by_item_and_so_narrows_the_interval():
    rng = np.random.default_rng(5)
    incumbent = rng.normal(0, 10, 200)
    candidate = incumbent + rng.normal(0.5, 1, 200)
    difference, low, high = paired_bootstrap(candidate, incumbent, **HOW)
    assert difference == pytest.approx((candidate - incumbent).mean())
    assert low > 0
    assert high - low < 0.5


def test_equal_scores_give_an_interval_without_width():
    assert paired_bootstrap([1, 0, 1], [1, 0, 1], **HOW) == (0.0, 0.0, 0.0)


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    values = np.random.default_rng(0).normal(size=50)
    assert bootstrap_mean(values, **HOW) == bootstrap_mean(values, **HOW)
    assert bootstrap_mean(values, **HOW) != bootstrap_mean(values, **{**HOW, "seed": 4})


def test_an_interval_that_needs_several_chunks_is_still_right(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("evaluation.statistics.intervals._CHUNK", 1000)
    values = np.random.default_rng(0).normal(size=300)
    mean, low, high = bootstrap_mean(values, **HOW)
    half = 1.96 * values.std() / np.sqrt(300)
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.05 * half)


@pytest.mark.parametrize("changed", [0.02, 0.1, 0.4])
def test_a_candidate_that_is_no_better_rarely_gets_an_interval_above_zero(changed: float):
    rng = np.random.default_rng(7)
    above = 0
    for seed in range(600):
        differences = rng.choice([1.0, -1.0, 0.0], p=[changed / 2, changed / 2, 1 - changed], size=100)
        above += bootstrap_mean(differences, confidence=0.95, resamples=400, seed=seed)[1] > 0
    assert above / 600 < 0.045  # 2.5 % is aimed at; the simulation's own error is 0.6 %


def test_a_ratio_is_over_the_sums_and_its_interval_resamples_whole_clusters():
    rng = np.random.default_rng(2)
    tokens = rng.integers(1, 20, 80).astype(float)
    sums = tokens * rng.normal(2.0, 0.3, 80)
    ratio, low, high = bootstrap_ratio(sums, tokens, **HOW)
    draws = [rng.integers(0, 80, 80) for _ in range(4000)]
    plain = np.quantile([sums[draw].sum() / tokens[draw].sum() for draw in draws], [0.025, 0.975])
    assert ratio == pytest.approx(sums.sum() / tokens.sum())
    assert (low, high) == pytest.approx(tuple(plain), abs=0.01)


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (3, 10), (10, 10), (41, 300), (1, 2)])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_wilson_is_scipys_wilson(successes: int, n: int, confidence: float):
    theirs = scipy.stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    assert wilson(successes, n, confidence=confidence) == pytest.approx((successes / n, theirs.low, theirs.high))


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_best_of_k_is_the_mean_over_all_sets_of_k_and_over_equal_ones(k: int):
    rng = np.random.default_rng(k)
    proxy, scores = rng.integers(0, 3, (20, 5)).astype(float), rng.normal(size=(20, 5))  # many are equal
    for rewards, values, found in zip(proxy, scores, best_of(proxy, scores, k), strict=True):
        sets = [[values[i] for i in some if rewards[i] == max(rewards[j] for j in some)] for some in subsets(k)]
        assert found == pytest.approx(np.mean([np.mean(best) for best in sets]))


def subsets(k: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(5), k))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bootstrap_mean([], **HOW), "values must be a vector with one value or more"),
        (lambda: bootstrap_mean([1.0, float("nan")], **HOW), "values must be finite, found nan"),
        (lambda: paired_bootstrap([1.0, 2.0], [1.0], **HOW), "the candidate has 2 scores and the incumbent 1"),
        (lambda: bootstrap_ratio([1.0], [0.0], **HOW), "denominators must be above 0, found 0"),
        (lambda: wilson(4, 3, confidence=0.95), "4 successes of 3"),
        (lambda: best_of([[1.0, 2.0]], [[0.0, 1.0]], 3), r"best of 3 from rewards of shape \(1, 2\)"),
        (lambda: best_of([[1.0, 2.0]], [[0.0]], 1), r"scores of shape \(1, 1\)"),
        (lambda: wilson(1, 3, confidence=95), "confidence must lie between 0 and 1, got 95"),
    ],
)
def test_what_has_no_interval_is_refused_with_the_reason(call, words: str):
    with pytest.raises(ValueError, match=words):
        call()
