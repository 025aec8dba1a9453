"""KL estimators: their values and gradients against exact ones, and the control of the KL's weight."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from train.config.algorithms import AlgorithmConfig
from train.objectives.kl import ESTIMATORS, LARGEST_K3_LOG_RATIO, adapted_coefficient, k1, k2, k3, k3_unbiased

LOGITS = st.lists(st.floats(-3, 3), min_size=3, max_size=3)


def log_softmax(logits: list[float]) -> Tensor:
    return torch.tensor(logits, dtype=torch.float64).log_softmax(0)


def kl(a: Tensor, b: Tensor) -> Tensor:
    """KL of one distribution to another, by their logarithms."""
    return (a.exp() * (a - b)).sum()


@given(LOGITS, LOGITS)
def test_k1_and_k3_average_to_the_kl_and_only_k1_is_ever_negative(policy: list[float], reference: list[float]) -> None:
    p, q = log_softmax(policy), log_softmax(reference)
    for estimator in (k1, k3, k3_unbiased):
        assert float((p.exp() * estimator(p, q)).sum()) == pytest.approx(float(kl(p, q)), abs=1e-9)
    for estimator in (k2, k3, k3_unbiased):
        assert bool((estimator(p, q) >= -1e-12).all())
    torch.testing.assert_close(k3_unbiased(p, q), k3(p, q))


@pytest.mark.parametrize(
    ("shift", "name", "bias", "deviation"),
    [
        (0.1, "k1", 0.0, 20.0),
        (0.1, "k2", 0.002, 1.42),
        (0.1, "k3", 0.0, 1.42),
        (1.0, "k1", 0.0, 2.0),
        (1.0, "k2", 0.25, 1.73),
        (1.0, "k3", 0.0, 1.7),
    ],
)
def test_bias_and_deviation_are_those_of_schulmans_table(
    shift: float, name: str, bias: float, deviation: float
) -> None:
    """Samples of N(0, 1), the other distribution N(shift, 1); both numbers over the true KL, shift² / 2."""
    x = torch.linspace(-12, 12, 24_001, dtype=torch.float64)
    log_p, log_q = -0.5 * x**2, -0.5 * (x - shift) ** 2
    weights = log_p.softmax(0)
    values = ESTIMATORS[name](log_p, log_q)
    mean = (weights * values).sum()
    true = shift**2 / 2
    assert float(mean / true - 1) == pytest.approx(bias, abs=1e-3)
    assert float((weights * (values - mean) ** 2).sum().sqrt() / true) == pytest.approx(deviation, rel=0.01)


def expected_gradient(estimator: Callable[[Tensor, Tensor], Tensor], policy: list[float], ref: Tensor) -> Tensor:
    """Over all tokens that the policy can sample, of the estimator's gradient by the policy's logits."""
    logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(0)
    (gradient,) = torch.autograd.grad((log_probs.exp().detach() * estimator(log_probs, ref)).sum(), logits)
    return gradient


def gradient_of(function: Callable[[Tensor], Tensor], policy: list[float]) -> Tensor:
    logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(function(logits.log_softmax(0)), logits)
    return gradient


@given(LOGITS, LOGITS)
def test_what_each_estimator_optimises_in_the_loss(policy: list[float], reference: list[float]) -> None:
    ref = log_softmax(reference)
    towards = gradient_of(lambda p: kl(p, ref), policy)
    for estimator in (k2, k3_unbiased):
        torch.testing.assert_close(expected_gradient(estimator, policy, ref), towards, atol=1e-9, rtol=1e-6)
    backwards = gradient_of(lambda p: kl(ref, p), policy)
    torch.testing.assert_close(expected_gradient(k3, policy, ref), backwards, atol=1e-9, rtol=1e-6)
    nothing = torch.zeros(3, dtype=torch.float64)
    torch.testing.assert_close(expected_gradient(k1, policy, ref), nothing, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_the_gradient_of_an_estimator_is_that_of_finite_differences(name: str) -> None:
    start = torch.tensor([-1.0, -0.2, -3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ESTIMATORS[name](x, torch.full_like(x, -0.9)), (start,))


def test_k1_in_the_loss_is_refused_since_it_would_do_nothing() -> None:
    with pytest.raises(ValidationError, match=r"train\.algorithm\.kl\.estimator=k1"):
        AlgorithmConfig.model_validate({"kl": {"coefficient": 0.1, "estimator": "k1"}})
    AlgorithmConfig.model_validate({"kl": {"coefficient": 0.1, "estimator": "k1", "placement": "reward"}})


# -------------------------------------------------------------------------------------------------- its control


def adapted(coefficient: float, measured: float, horizon: int = 10) -> float:
    return adapted_coefficient(coefficient, measured, target=0.02, horizon=horizon, minimum=0.001, maximum=1.0)


def test_the_controller_is_that_of_the_paper() -> None:
    """arXiv 1909.08593, section 2.2, with K_beta = 0.1: the error is relative, and clipped to ±0.2."""
    assert adapted(0.5, 0.02) == 0.5
    assert adapted(0.5, 0.022) == pytest.approx(0.5 * 1.01)
    assert adapted(0.5, 0.2) == pytest.approx(0.5 * 1.02)
    assert adapted(0.5, 0.018) == pytest.approx(0.5 * 0.99)
    assert adapted(0.5, -1.0) == pytest.approx(0.5 * 0.98)


@given(st.floats(0.001, 1.0), st.floats(-1, 1), st.integers(1, 50))
def test_the_coefficient_stays_in_its_bounds_and_moves_against_the_error(
    coefficient: float, measured: float, horizon: int
) -> None:
    after = adapted(coefficient, measured, horizon)
    assert 0.001 <= after <= 1.0
    assert (after - coefficient) * (measured - 0.02) >= 0
    for _ in range(horizon - 1):
        after = adapted(after, measured, horizon)
    assert after <= coefficient * math.exp(0.2) * (1 + 1e-9)


def test_a_kl_that_is_no_number_is_not_taken_for_one() -> None:
    assert math.isnan(adapted(0.5, math.nan))


@pytest.mark.parametrize("log_ratio", [-200.0, -21.0, -20.0, -19.0, -12.0, -7.5, -7.0, -3.0, -0.1, 0.1, 3.0, 21.0])
def test_the_gradient_of_k3_is_bounded_has_the_right_sign_everywhere_and_is_unchanged_inside_the_bound(
    log_ratio: float,
) -> None:
    """``log_ratio``: log policy / reference. The policy is to become likelier where it is below the reference."""
    log_prob = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    value = k3(log_prob, torch.tensor(0.0, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(value, log_prob)
    assert float(value.detach()) >= 0
    assert math.copysign(1, float(gradient)) == math.copysign(1, log_ratio)
    assert abs(float(gradient)) <= math.e**7
    if log_ratio >= -LARGEST_K3_LOG_RATIO:
        assert float(gradient) == pytest.approx(1 - math.exp(-log_ratio))
        assert float(value.detach()) == pytest.approx(math.exp(-log_ratio) - 1 + log_ratio)


def test_k3_rises_without_a_jump_across_its_bound() -> None:
    log_probs = torch.linspace(-6.99, -7.01, 201, dtype=torch.float64)
    values = k3(log_probs, torch.zeros(()))
    steps = values.diff()
    assert bool((steps > 0).all())
    torch.testing.assert_close(steps, torch.full_like(steps, math.expm1(7) * 1e-4), rtol=0.02, atol=0)
