"""Advantages and rewards, against plain loops in float64 and exact expectations."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.policy_batches import batches, by_response, flat, responses_of, some_responses
from train.batch.packed import PackedBatch
from train.objectives.advantages import (
    gae,
    greedy_baseline,
    group_relative,
    leave_one_out,
    response_rewards,
    returns_to_go,
    token_rewards,
    whiten,
)
from train.objectives.shaping import soft_overlong_punishment

REWARDS = st.lists(st.tuples(st.integers(0, 5), st.floats(-5, 5, width=32)), min_size=1, max_size=20)
Rewards = list[tuple[int, float]]


def compared_with(pairs: Rewards, i: int) -> list[int]:
    """Who is in the group of response i, itself included; or who has no group, as it has none."""
    size = {group: sum(g == group for g, _ in pairs) for group, _ in pairs}
    if size[pairs[i][0]] > 1:
        return [j for j, (g, _) in enumerate(pairs) if g == pairs[i][0]]
    return [j for j, (g, _) in enumerate(pairs) if size[g] == 1]


def tensors(pairs: Rewards) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([r for _, r in pairs]), torch.tensor([g for g, _ in pairs])


# ------------------------------------------------------------------------------------------------- per response


@given(REWARDS, st.booleans())
def test_group_relative_is_what_a_loop_over_groups_gives(pairs: Rewards, normalise: bool) -> None:
    result = group_relative(*tensors(pairs), normalise_by_std=normalise).tolist()
    for i, (_, reward) in enumerate(pairs):
        mates = [pairs[j][1] for j in compared_with(pairs, i)]
        expected = reward - statistics.fmean(mates)
        if normalise:
            expected /= (statistics.stdev(mates) if len(mates) > 1 else 0.0) + 1e-6
        assert result[i] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@given(REWARDS)
def test_leave_one_out_is_what_a_loop_over_the_others_gives(pairs: Rewards) -> None:
    result = leave_one_out(*tensors(pairs)).tolist()
    for i, (_, reward) in enumerate(pairs):
        others = [pairs[j][1] for j in compared_with(pairs, i) if j != i]
        expected = reward - statistics.fmean(others) if others else 0.0
        assert result[i] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@given(REWARDS, st.sampled_from([group_relative, leave_one_out]))
def test_advantages_of_a_group_sum_to_zero(pairs: Rewards, estimator: object) -> None:
    options = {"normalise_by_std": True} if estimator is group_relative else {}
    advantages = estimator(*tensors(pairs), **options)  # type: ignore[operator]
    for i in range(len(pairs)):
        assert float(advantages[compared_with(pairs, i)].sum()) == pytest.approx(0, abs=1e-4)


@given(REWARDS)
def test_rewards_that_are_all_equal_have_an_advantage_of_exactly_zero(pairs: Rewards) -> None:
    equal = [len({pairs[j][1] for j in compared_with(pairs, i)}) == 1 for i in range(len(pairs))]
    for advantages in (group_relative(*tensors(pairs), normalise_by_std=True), leave_one_out(*tensors(pairs))):
        assert not advantages[torch.tensor(equal)].any()


def test_responses_without_a_group_are_compared_with_each_other_and_not_with_themselves() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 3.0, 5.0, 10.0]), torch.tensor([0, 0, 7, 8, 9])
    assert group_relative(rewards, groups, normalise_by_std=False).tolist() == [0.5, -0.5, -3.0, -1.0, 4.0]
    assert leave_one_out(rewards, groups).tolist() == [1.0, -1.0, -4.5, -1.5, 6.0]


def test_group_relative_advantages_of_two_right_answers_in_four() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, standard deviation (unbiased) sqrt(1/3)."""
    advantages = group_relative(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4), normalise_by_std=True)
    assert advantages.tolist() == pytest.approx([math.sqrt(3) / 2 * s for s in (1, -1, -1, 1)], rel=1e-5)


@pytest.mark.parametrize("k", [2, 3])
def test_the_leave_one_out_gradient_is_in_expectation_that_of_the_expected_reward(k: int) -> None:
    """Over all k-tuples that a softmax over three responses can draw; the group's own mean gives (k - 1) / k of it."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    (exact,) = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)
    one_group = torch.zeros(k)
    for estimator, share in ((leave_one_out, 1.0), (group_relative, (k - 1) / k)):
        options = {"normalise_by_std": False} if estimator is group_relative else {}
        expectation = torch.zeros(3, dtype=torch.float64)
        for drawn in itertools.product(range(3), repeat=k):
            log_probs = logits.log_softmax(0)[list(drawn)]
            advantages = estimator(rewards[list(drawn)], one_group, **options)  # type: ignore[operator]
            (gradient,) = torch.autograd.grad((advantages * log_probs).mean(), logits)
            expectation += float(log_probs.detach().sum().exp()) * gradient
        torch.testing.assert_close(expectation, share * exact)


def test_the_greedy_responses_reward_is_the_baseline_of_remax() -> None:
    assert greedy_baseline(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.5])).tolist() == [0.75, -0.5]


# ---------------------------------------------------------------------------------------------------- per token


@given(batches(), st.sampled_from([0.0, 0.3]))
def test_a_tokens_reward_is_the_responses_at_its_end_less_the_kl_of_each(batch: PackedBatch, kl: float) -> None:
    expected = []
    for r in responses_of(batch):
        last = len(r.old) - 1
        expected.append([(r.reward if t == last else 0.0) - kl * (r.old[t] - r.ref[t]) for t in range(len(r.old))])
    rewards = token_rewards(batch, kl, "k1")
    assert flat(by_response(batch, rewards)) == pytest.approx(flat(expected))
    assert not rewards[~batch.response_mask].any()
    assert response_rewards(batch, kl, "k1").tolist() == pytest.approx([sum(numbers) for numbers in expected])


def test_a_kl_in_the_reward_without_logprobs_is_refused_and_without_weight_needs_none() -> None:
    batch = some_responses(0).with_(ref_log_probs=None)
    with pytest.raises(ValueError, match="old_log_probs and ref_log_probs"):
        token_rewards(batch, 0.1, "k1")
    assert response_rewards(batch, 0.0, "k1").tolist() == batch.rewards.tolist()


@given(batches(), st.floats(0, 1))
def test_returns_to_go_are_the_discounted_rewards_from_each_token_on(batch: PackedBatch, gamma: float) -> None:
    assert batch.advantages is not None  # any numbers do as rewards
    returns = returns_to_go(batch.advantages, batch, gamma)
    expected = [
        [sum(gamma**k * x for k, x in enumerate(r.advantages[t:])) for t in range(len(r.advantages))]
        for r in responses_of(batch)
    ]
    assert flat(by_response(batch, returns)) == pytest.approx(flat(expected))
    assert not returns[~batch.response_mask].any()


@given(batches(), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_discounted_sum_of_td_errors(batch: PackedBatch, gamma: float, lam: float) -> None:
    assert batch.advantages is not None
    assert batch.values is not None
    expected = []
    for r in responses_of(batch):
        n = len(r.values)
        after = [*r.values[1:], 0.0]
        delta = [r.advantages[t] + gamma * after[t] - r.values[t] for t in range(n)]
        expected.append([sum((gamma * lam) ** k * delta[t + k] for k in range(n - t)) for t in range(n)])
    whatever = batch.values + 9.0 * ~batch.response_mask  # at prompts, which have no value
    advantages = gae(batch.advantages, whatever, batch, gamma, lam)
    assert flat(by_response(batch, advantages)) == pytest.approx(flat(expected))
    assert not advantages[~batch.response_mask].any()


@given(batches())
def test_gae_with_lambda_one_is_the_return_less_the_value_and_with_lambda_zero_the_td_error(batch: PackedBatch) -> None:
    assert batch.values is not None
    rewards, mask = token_rewards(batch, 0.1, "k1"), batch.response_mask
    to_the_end = gae(rewards, batch.values, batch, 1.0, 1.0)
    torch.testing.assert_close(to_the_end, (returns_to_go(rewards, batch) - batch.values) * mask)
    after = by_response(batch, batch.values)
    one_step = [
        [r + v_next - v for r, v, v_next in zip(rs, vs, [*vs[1:], 0.0], strict=True)]
        for rs, vs in zip(by_response(batch, rewards), after, strict=True)
    ]
    assert flat(by_response(batch, gae(rewards, batch.values, batch, 1.0, 0.0))) == pytest.approx(flat(one_step))


@given(batches())
def test_whitened_advantages_have_mean_zero_and_deviation_one_over_response_tokens(batch: PackedBatch) -> None:
    assert batch.advantages is not None
    whitened, mask = whiten(batch.advantages, batch.response_mask), batch.response_mask
    numbers = batch.advantages[mask].tolist()
    mean, deviation = statistics.fmean(numbers), statistics.pstdev(numbers)
    assert whitened[mask].tolist() == pytest.approx([(x - mean) / (deviation + 1e-6) for x in numbers], abs=1e-9)
    assert not whitened[~mask].any()


@given(st.floats(-5, 5, width=32), st.integers(1, 1000))
def test_advantages_that_are_all_equal_whiten_to_zero(value: float, count: int) -> None:
    assert not whiten(torch.full((count,), value), torch.ones(count, dtype=torch.bool)).any()


# ------------------------------------------------------------------------------------------------------ shaping


def test_the_overlong_punishment_of_the_dapo_paper() -> None:
    """Expected length 16384, and a buffer of 4096 tokens (section 4.1)."""
    lengths = torch.tensor([1, 16_384, 17_408, 18_432, 20_480, 30_000])
    sizes = {"max_tokens": 20_480, "overlong_buffer": 4096}
    punished = soft_overlong_punishment(lengths, **sizes, overlong_penalty=1.0)
    assert punished.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert soft_overlong_punishment(lengths, **sizes, overlong_penalty=2.0).tolist() == (2 * punished).tolist()


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 30), st.data())
def test_the_overlong_punishment_is_equation_13(length: int, max_tokens: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(0, max_tokens))
    if buffer == 0 or length <= max_tokens - buffer:
        expected = 0.0
    elif length <= max_tokens:
        expected = ((max_tokens - buffer) - length) / buffer
    else:
        expected = -1.0
    punished = soft_overlong_punishment(
        torch.tensor([length]), max_tokens=max_tokens, overlong_buffer=buffer, overlong_penalty=1.0
    )
    assert float(punished) == pytest.approx(expected)
