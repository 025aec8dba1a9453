"""Advantages, losses, KL and corrections, against plain loops in float64 and finite differences."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train.advantages import group_relative, uninformative
from train.algorithms.grpo import GRPO
from train.batch import PackedBatch, Rollout
from train.config import AlgorithmConfig
from train.corrections import truncated_importance
from train.kl import k1, k2, k3
from train.losses import clipped_surrogate

REWARDS = st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5, width=32)), min_size=1, max_size=20)


@given(REWARDS, st.booleans())
def test_group_relative_is_what_a_loop_over_groups_gives(pairs: list[tuple[int, float]], normalise: bool) -> None:
    groups, rewards = [g for g, _ in pairs], [r for _, r in pairs]
    result = group_relative(torch.tensor(rewards), torch.tensor(groups), normalise_by_std=normalise).tolist()
    for i, (group, reward) in enumerate(pairs):
        mates = [r for g, r in pairs if g == group]
        expected = reward - statistics.fmean(mates)
        if normalise:
            expected /= (statistics.stdev(mates) if len(mates) > 1 else 0.0) + 1e-6
        assert result[i] == pytest.approx(expected, abs=2e-2 if normalise else 1e-5)


@given(REWARDS)
def test_advantages_of_a_group_sum_to_zero(pairs: list[tuple[int, float]]) -> None:
    groups, rewards = torch.tensor([g for g, _ in pairs]), torch.tensor([r for _, r in pairs])
    advantages = group_relative(rewards, groups, normalise_by_std=False)
    for group in groups.unique():
        assert float(advantages[groups == group].sum()) == pytest.approx(0, abs=1e-4)


def test_a_group_whose_rewards_are_all_equal_is_uninformative_and_no_other() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0]), torch.tensor([5, 5, 2, 2, 9])
    assert uninformative(rewards, groups).tolist() == [True, True, False, False, True]
    assert group_relative(rewards, groups, normalise_by_std=True)[[0, 1, 4]].tolist() == [0.0, 0.0, 0.0]


@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(-3, 3))
def test_the_clipped_surrogate_is_ppos(log_prob: float, old: float, advantage: float) -> None:
    ratio = math.exp(log_prob - old)
    loss, clipped = clipped_surrogate(
        *(torch.tensor([x], dtype=torch.float64) for x in (ratio, advantage)), clip_low=0.2, clip_high=0.28
    )
    bounded = min(max(ratio, 0.8), 1.28)
    assert float(loss) == pytest.approx(-min(ratio * advantage, bounded * advantage))
    assert bool(clipped) == (bounded * advantage < ratio * advantage)


@pytest.mark.parametrize(
    ("advantage", "log_prob", "moves"), [(1.0, 0.5, False), (1.0, -0.5, True), (-1.0, -0.5, False), (-1.0, 0.5, True)]
)
def test_the_clip_stops_the_gradient_only_where_it_would_go_further_off(
    advantage: float, log_prob: float, moves: bool
) -> None:
    x = torch.tensor([log_prob], requires_grad=True)
    loss, _ = clipped_surrogate(x.exp(), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28)
    loss.sum().backward()
    assert x.grad is not None
    assert bool(x.grad.abs() > 0) == moves


def test_kl_estimators_average_to_the_kl_of_two_known_distributions() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    for estimator in (k1, k3):  # both unbiased: their expectation under p is the KL
        assert float((p * estimator(p.log(), q.log())).sum()) == pytest.approx(exact)
    assert bool((k3(p.log(), q.log()) >= 0).all())
    assert float((p * k2(p.log(), q.log())).sum()) == pytest.approx(exact, rel=0.1)


def test_importance_weights_of_equal_policies_are_one_and_of_others_are_capped() -> None:
    log_probs = torch.tensor([-1.0, -1.0, -1.0])
    weights = truncated_importance(log_probs, torch.tensor([-1.0, -3.0, -0.5]), cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-0.5)])


def grpo_batch(advantages: list[float]) -> PackedBatch:
    rollouts = [Rollout([1, 2], [3, 4, 5], [-1.0, -0.5, -2.0], a, i) for i, a in enumerate(advantages)]
    batch = PackedBatch.pack(rollouts)
    noise = torch.linspace(-0.1, 0.1, len(batch.tokens))
    return batch.with_(
        old_log_probs=batch.behaviour_log_probs + noise,
        ref_log_probs=batch.behaviour_log_probs - noise,
        advantages=batch.per_token(torch.tensor(advantages)),
    )


def test_grpo_is_its_formula_token_by_token() -> None:
    config = AlgorithmConfig.model_validate(
        {"kl": {"coefficient": 0.3}, "correction": {"cap": 1.05}, "clip_high": 0.28}
    )
    batch = grpo_batch([1.5, -0.7])
    assert batch.old_log_probs is not None
    log_probs = batch.old_log_probs + torch.linspace(-0.5, 0.5, len(batch.tokens))
    loss, health = GRPO(config).loss(log_probs, batch)
    expected = 0.0
    for t in batch.response_mask.nonzero().flatten().tolist():
        now, old, mu, ref, a = (
            float(x[t])
            for x in (log_probs, batch.old_log_probs, batch.behaviour_log_probs, batch.ref_log_probs, batch.advantages)  # type: ignore[index]
        )
        ratio, weight = math.exp(now - old), min(math.exp(old - mu), 1.05)
        surrogate = -min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
        kl = math.exp(ref - now) - 1 - (ref - now)
        expected += (weight * surrogate + 0.3 * kl) / 3  # each response has three tokens
        assert float(health["importance_weight"][t]) == pytest.approx(weight, abs=1e-5)
    assert float(loss) == pytest.approx(expected, abs=1e-5)
    assert GRPO(config).count(batch) == 2.0


def test_grpos_gradient_is_that_of_finite_differences() -> None:
    batch = grpo_batch([1.5, -0.7])
    assert batch.old_log_probs is not None
    algorithm = GRPO(AlgorithmConfig.model_validate({"kl": {"coefficient": 0.3}}))
    doubled = batch.with_(
        **{
            n: getattr(batch, n).double()
            for n in ("old_log_probs", "ref_log_probs", "behaviour_log_probs", "advantages")
        }
    )
    start = (batch.old_log_probs + 0.03).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: algorithm.loss(x, doubled)[0], (start,))
