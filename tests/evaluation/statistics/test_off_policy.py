"""Off-policy estimates against numbers by hand, and on generated traffic whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from evaluation.statistics.off_policy import OffPolicy, estimate

HOW = {"bounds": (0.0, 1.0), "confidence": 0.95}
TOKENS = 12


def success(good: np.ndarray) -> np.ndarray:
    return 0.2 + 0.6 * good / TOKENS


def traffic(rng: np.random.Generator, n: int, noise: float, gain: float) -> dict[str, np.ndarray]:
    """Responses of 12 tokens, some good; the candidate's odds of a good one are e^gain those of the behaviour policy.

    Other tokens change the weights and not the reward. What each would earn is known: ``truth``.
    """
    odds = np.log(rng.beta(4, 4, n))
    old = np.exp(odds) / (1 + np.exp(odds))
    new = 1 / (1 + np.exp(-(np.log(old / (1 - old)) + gain)))
    good = rng.binomial(TOKENS, old)
    behaviour = binom.logpmf(good, TOKENS, old)
    candidate = binom.logpmf(good, TOKENS, new) + noise * rng.normal(size=n) - noise**2 / 2
    truth = 0.2 + 0.6 * new
    return {
        "rewards": (rng.random(n) < success(good)).astype(float),
        "behaviour": behaviour,
        "candidate": candidate,
        "predicted": 0.1 + 0.7 * success(good),  # a reward model with an offset, and too flat
        "expected": 0.1 + 0.7 * truth,
        "truth": truth,
    }


def asked(logged: dict[str, np.ndarray], **more) -> OffPolicy:
    return estimate(**{name: column for name, column in logged.items() if name != "truth"} | HOW | more)


def test_the_estimates_are_those_worked_out_by_hand():
    weights = np.array([2.0, 0.5, 0.5, 1.0])
    found = estimate([1, 0, 1, 1], np.zeros(4), np.log(weights), predicted=[0.5] * 4, expected=[0.6] * 4, **HOW)
    assert found.ips.value == pytest.approx(3.5 / 4)
    assert found.snips.value == pytest.approx(3.5 / 4)
    assert found.doubly_robust is not None
    assert found.doubly_robust.value == pytest.approx(0.6 + (2 * 0.5 - 0.5 * 0.5 + 0.5 * 0.5 + 0.5) / 4)
    assert found.ess == pytest.approx(16 / 5.5)
    assert found.largest_share == 0.5
    assert found.clip == 2.0
    without = [1.5 / 2, 3.5 / 3.5, 3 / 3.5, 2.5 / 3]
    assert found.verdict == "can't tell"
    variance = 3 / 4 * sum((value - np.mean(without)) ** 2 for value in without)
    assert found.snips.high - found.snips.value > 1.96 * variance**0.5  # Student's t on few


def test_a_policy_estimated_on_its_own_traffic_earns_the_mean_reward():
    rewards = np.random.default_rng(0).random(300)
    same = np.random.default_rng(1).normal(-20, 5, 300)
    found = estimate(rewards, same, same, **HOW)
    assert (found.verdict, found.reasons, found.ess) == ("estimated", (), pytest.approx(300))
    half = 1.968 * rewards.std(ddof=1) / 300**0.5
    assert (found.estimate.low, found.estimate.high) == pytest.approx(
        (rewards.mean() - half, rewards.mean() + half), abs=3e-4
    )
    assert found.lower < found.estimate.low


@pytest.mark.parametrize("noise", [0.4, 1.0])
def test_intervals_cover_and_means_are_right_where_the_effective_sample_is_large_enough(noise: float):
    rng = np.random.default_rng(6)
    rows = []
    for _ in range(150):
        logged = traffic(rng, 1500, noise, 0.2)
        found, truth = asked(logged), logged["truth"].mean()
        assert found.verdict == "estimated"
        assert found.doubly_robust is not None
        rows.append(
            [
                found.doubly_robust.value - truth,
                found.snips.value - truth,
                found.doubly_robust.low <= truth <= found.doubly_robust.high,
                found.snips.low <= truth <= found.snips.high,
                found.lower <= truth,
            ]
        )
    errors, covered = np.array(rows)[:, :2], np.array(rows)[:, 2:].mean(axis=0)
    assert np.abs(errors.mean(axis=0)).max() < 0.005
    assert np.abs(errors).mean(axis=0).max() < 0.02
    assert covered.min() > 0.92


def test_a_good_reward_model_narrows_the_interval():
    logged = traffic(np.random.default_rng(2), 2000, 0.8, 0.4)
    graded = np.clip(logged["predicted"] + 0.05 * np.random.default_rng(3).normal(size=2000), 0, 1)
    found = asked(logged | {"rewards": graded})
    assert found.doubly_robust is not None
    assert found.doubly_robust.high - found.doubly_robust.low < 0.8 * (found.snips.high - found.snips.low)


def test_too_small_an_effective_sample_can_not_tell_and_gives_the_counts():
    found = asked(traffic(np.random.default_rng(3), 500, 2.5, 0.2))
    assert found.verdict == "can't tell"
    assert found.reasons[0].startswith(
        f"the effective sample size is {found.ess:.1f} of 500 clusters (500 responses), 100"
    )


def test_ten_thousand_responses_of_one_user_are_one_voice():
    rng = np.random.default_rng(4)
    users = np.concatenate([np.arange(200), np.full(10_000, 200)])
    rewards = np.concatenate([rng.random(200) < 0.5, np.ones(10_000)]).astype(float)
    found = estimate(rewards, np.zeros(len(users)), np.zeros(len(users)), clusters=users, **HOW)
    assert (found.n, found.clusters, found.ess) == (10_200, 201, pytest.approx(201))
    assert found.estimate.value == pytest.approx((rewards[:200].sum() + 1) / 201)
    alone = estimate(rewards, np.zeros(len(users)), np.zeros(len(users)), clusters=np.zeros(len(users)), **HOW)
    assert alone.verdict == "can't tell"


def test_tokens_that_the_behaviour_policy_could_not_sample_show_in_weights_that_average_less_than_one():
    rng = np.random.default_rng(5)
    n, kept = 3000, 0.7  # the candidate says 30 % of the time what top-p cut off before
    logged = traffic(rng, n, 0.5, 0.2)
    logged["candidate"] = logged["candidate"] + np.log(kept)
    found = asked(logged)
    assert found.verdict == "can't tell"
    assert "unequal support: weights average 0." in found.reasons[0]
    assert asked(traffic(rng, n, 0.5, 0.2)).reasons == ()


def test_what_the_candidate_would_never_say_has_no_weight():
    found = estimate([1.0, 0.0, 0.5], np.full(3, -1.0), [-1.0, -np.inf, -1.0], **HOW)
    assert found.snips.value == 0.75
    assert estimate([1.0, 0.0], [-1.0, -1.0], [-np.inf, -np.inf], **HOW).verdict == "can't tell"


def test_one_huge_weight_decides_nothing():
    found = estimate(np.ones(400), np.zeros(400), np.append(np.zeros(399), 5000.0), **HOW)
    assert found.verdict == "can't tell"
    assert found.ess == pytest.approx(1.0)
    assert found.lower < 0.99


def test_a_reward_of_other_bounds_only_shifts_and_stretches():
    logged = traffic(np.random.default_rng(8), 800, 0.5, 0.2)
    plain = asked(logged, predicted=None, expected=None)
    stretched = asked(
        logged | {"rewards": 4 * logged["rewards"] - 2}, predicted=None, expected=None, bounds=(-2.0, 2.0)
    )
    assert stretched.estimate.low == pytest.approx(4 * plain.estimate.low - 2)
    assert stretched.lower == pytest.approx(4 * plain.lower - 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: estimate([], [], [], **HOW), "rewards must be a vector"),
        (lambda: estimate([1.2], [0.0], [0.0], **HOW), r"reward 0 is 1.2, outside \[0, 1\]"),
        (lambda: estimate([1.0, np.nan], [0.0, 0.0], [0.0, 0.0], **HOW), "rewards must be numbers, response 1 has nan"),
        (lambda: estimate([1.0], [-np.inf], [0.0], **HOW), "behaviour log-probabilities must be numbers, response 0"),
        (lambda: estimate([1.0], [0.0, 0.0], [0.0], **HOW), "behaviour log-probabilities must be a vector"),
        (lambda: estimate([1.0], [0.0], [0.0], predicted=[1.0], **HOW), "needs both predicted and expected"),
        (lambda: estimate([1.0], [0.0], [0.0], clusters=["a", "b"], **HOW), "clusters must have one name"),
    ],
)
def test_what_can_not_be_estimated_is_refused_with_the_reason(call, words: str):
    with pytest.raises(ValueError, match=words):
        call()
