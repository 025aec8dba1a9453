"""Ratios, surrogates and aggregations, against plain loops in float64 and finite differences."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.train.policy_batches import batches, by_response, flat, moved, responses_of, some_responses
from train.batch.packed import PackedBatch
from train.objectives.kl import k3
from train.objectives.losses import (
    AGGREGATIONS,
    clipped_surrogate,
    clipped_weight,
    constant_length,
    reinforce,
    sequence_ratio,
    token_ratio,
)

LOG_RATIOS = st.floats(-2, 2)
ADVANTAGES = st.floats(-3, 3).filter(lambda a: a == 0 or abs(a) > 1e-6)


def one(x: float) -> Tensor:
    return torch.tensor([x], dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------- ratios


@given(batches(), st.integers(0, 99))
def test_a_sequences_ratio_is_the_geometric_mean_of_its_tokens_and_equal_on_all(batch: PackedBatch, seed: int) -> None:
    now = moved(batch, seed)
    assert batch.old_log_probs is not None
    ratios = by_response(batch, sequence_ratio(now, batch.old_log_probs, batch))
    tokens = by_response(batch, token_ratio(now, batch.old_log_probs))
    for of_the_sequence, of_the_tokens in zip(ratios, tokens, strict=True):
        assert len(set(of_the_sequence)) == 1
        assert of_the_sequence[0] == pytest.approx(statistics.geometric_mean(of_the_tokens))


def test_the_gradient_of_a_sequences_ratio_is_the_ratio_over_the_length_at_each_token() -> None:
    batch = some_responses(3)
    assert batch.old_log_probs is not None
    now = moved(batch, 4).requires_grad_()
    ratio = sequence_ratio(now, batch.old_log_probs, batch)
    first_of_each = batch.cu_seqlens[:-1] + batch.prompt_lengths
    (gradient,) = torch.autograd.grad(ratio[first_of_each].sum(), now)
    expected = batch.response_mask * (ratio / batch.per_token(batch.response_lengths)).detach()
    torch.testing.assert_close(gradient, expected)
    assert torch.autograd.gradcheck(lambda x: sequence_ratio(x, batch.old_log_probs, batch), (now,))


# --------------------------------------------------------------------------------------------------- surrogates


@given(LOG_RATIOS, ADVANTAGES, st.sampled_from([None, 3.0]))
def test_the_clipped_surrogate_is_ppos_and_with_a_dual_clip_bounded(
    log_ratio: float, advantage: float, dual_clip: float | None
) -> None:
    ratio = math.exp(log_ratio)
    loss, clipped = clipped_surrogate(one(ratio), one(advantage), clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    objective = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    if dual_clip is not None and advantage < 0:
        objective = max(objective, dual_clip * advantage)
    assert float(loss) == pytest.approx(-objective)
    assert bool(clipped) == (not math.isclose(objective, ratio * advantage, abs_tol=1e-15))


@pytest.mark.parametrize(
    ("advantage", "log_prob", "dual_clip", "moves"),
    [
        (1.0, 0.5, None, False),
        (1.0, -0.5, None, True),
        (-1.0, -0.5, None, False),
        (-1.0, 0.5, None, True),
        (-1.0, 1.5, None, True),
        (-1.0, 1.5, 3.0, False),
        (-1.0, 1.0, 3.0, True),
        (1.0, -1.5, 3.0, True),
    ],
)
def test_a_clip_stops_the_gradient_only_where_it_would_go_further_off(
    advantage: float, log_prob: float, dual_clip: float | None, moves: bool
) -> None:
    x = torch.tensor([log_prob], requires_grad=True)
    loss, clipped = clipped_surrogate(
        x.exp(), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28, dual_clip=dual_clip
    )
    loss.sum().backward()
    assert x.grad is not None
    assert bool(x.grad.abs() > 0) == moves
    assert bool(clipped) != moves


@given(LOG_RATIOS, ADVANTAGES.filter(bool), st.floats(-3, -0.1))
def test_a_clipped_weight_never_takes_a_tokens_gradient_away(log_ratio: float, advantage: float, now: float) -> None:
    log_prob = one(now).requires_grad_()
    loss, clipped = clipped_weight(one(math.exp(log_ratio)), log_prob, one(advantage), clip_low=1.0, clip_high=4.0)
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    weight = min(math.exp(log_ratio), 5.0)
    assert float(loss.detach()) == pytest.approx(-weight * advantage * now)
    assert float(gradient) == pytest.approx(-weight * advantage)
    assert float(gradient) * advantage < 0
    assert bool(clipped) == (math.exp(log_ratio) > 5.0)


@given(ADVANTAGES)
def test_until_the_policy_moves_all_surrogates_have_one_gradient(advantage: float) -> None:
    now, a = one(-1.3).requires_grad_(), one(advantage)
    ratio = token_ratio(now, one(-1.3))
    for loss, clipped in (
        clipped_surrogate(ratio, a, clip_low=0.2, clip_high=0.2),
        clipped_weight(ratio, now, a, clip_low=0.2, clip_high=0.2),
        reinforce(ratio, now, a),
    ):
        (gradient,) = torch.autograd.grad(loss.sum(), now, retain_graph=True)
        assert float(gradient) == pytest.approx(-advantage)
        assert not clipped.any()


# ------------------------------------------------------------------------------------------------- aggregations


@given(batches())
def test_an_aggregation_is_the_mean_that_its_name_says(batch: PackedBatch) -> None:
    assert batch.advantages is not None  # any numbers do as losses
    responses = [r.advantages for r in responses_of(batch)]
    expected = {
        "token_mean": statistics.fmean(flat(responses)),
        "sequence_mean": statistics.fmean(statistics.fmean(r) for r in responses),
        "constant_length": statistics.fmean(sum(r) / 7 for r in responses),
    }
    for name, aggregation in AGGREGATIONS.items():
        weights, count = aggregation(batch, 7)
        assert float((batch.advantages * weights).sum()) / count == pytest.approx(expected[name], abs=1e-6)
        assert not weights[~batch.response_mask].any()


def test_a_constant_length_that_nobody_gave_is_asked_for_by_name() -> None:
    with pytest.raises(ValueError, match=r"needs train\.algorithm\.max_tokens"):
        constant_length(some_responses(0), None)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_token_that_two_policies_are_200_nats_apart_on_overflows_nothing(advantage: float) -> None:
    log_probs = torch.tensor([-1.0], requires_grad=True)
    far = torch.tensor([-201.0])
    loss, _ = clipped_surrogate(token_ratio(log_probs, far), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2)
    (loss + k3(log_probs - 200, far + 200)).sum().backward()
    assert bool(loss.isfinite())
    assert log_probs.grad is not None
    assert bool(log_probs.grad.isfinite())
