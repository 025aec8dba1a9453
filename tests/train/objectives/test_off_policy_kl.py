"""The KL on tokens that another policy sampled: expectations over all responses there are, in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from train.algorithms import load
from train.algorithms.base import PolicyGradient
from train.batch.packed import PackedBatch, Rollout
from train.config.algorithms import AlgorithmConfig
from train.objectives.kl import k3
from train.observe.health import at_end, kl_to_reference

LOGITS = st.lists(st.floats(-2, 2), min_size=4, max_size=4)
POLICY, OLD = [0.4, 0.7, 0.9, 1.3], [0.7, 1.3, -1.4, -0.1]
BEHAVIOUR, REF = [1.3, 0.4, 1.2, -1.2], [-0.1, -0.8, 0.1, 0.2]
COEFFICIENT = 0.5


def log_softmax(logits: list[float]) -> Tensor:
    return torch.tensor(logits, dtype=torch.float64).log_softmax(0)


def kl(a: Tensor, b: Tensor) -> Tensor:
    return (a.exp() * (a - b)).sum()


def algorithm(estimator: str, **correction: Any) -> PolicyGradient:
    """The sum over a response's tokens is its loss; no weight is capped."""
    settings = {
        "aggregation": "constant_length",
        "max_tokens": 1,
        "kl": {"coefficient": COEFFICIENT, "placement": "loss", "estimator": estimator},
        "correction": {"cap": 1e9, **correction},
    }
    made = load(AlgorithmConfig.model_validate(settings))
    assert isinstance(made, PolicyGradient)
    return made


def at_tokens(log_probs: Tensor) -> Tensor:
    """[n] of responses of one token, as of a batch whose prompts are of one token too: [2 n]."""
    return torch.stack([torch.zeros_like(log_probs), log_probs], 1).flatten()


def every_token(old: Tensor, behaviour: Tensor, ref: Tensor) -> PackedBatch:
    """Each token that there is as a response, with nothing to learn from it but the KL."""
    batch = PackedBatch.pack([Rollout([9], [token], [0.0], 0.0, token) for token in range(len(old))])
    return batch.with_(
        advantages=torch.zeros(len(batch.tokens), dtype=torch.float64),
        old_log_probs=at_tokens(old),
        behaviour_log_probs=at_tokens(behaviour),
        ref_log_probs=at_tokens(ref),
    )


def expected(made: PolicyGradient, policy: list[float], batch: PackedBatch, behaviour: Tensor) -> tuple[float, Tensor]:
    """Over the tokens that the behaviour policy samples: the loss, and its gradient by the policy's logits."""
    logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    log_probs = at_tokens(logits.log_softmax(0))
    losses = [
        made.loss(log_probs[2 * token : 2 * token + 2], batch.select([token]))[0] for token in range(len(behaviour))
    ]
    loss = (behaviour.exp() * torch.stack(losses)).sum()
    return float(loss.detach()), torch.autograd.grad(loss, logits)[0]


def exact(policy: list[float], ref: Tensor) -> tuple[float, Tensor]:
    logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    value = COEFFICIENT * kl(logits.log_softmax(0), ref)
    return float(value.detach()), torch.autograd.grad(value, logits)[0]


@given(LOGITS, LOGITS, LOGITS, LOGITS)
def test_the_weighed_kl_of_another_policys_tokens_is_that_of_the_policy_and_so_is_its_gradient(
    policy: list[float], old: list[float], behaviour: list[float], ref: list[float]
) -> None:
    sampled, parent = log_softmax(behaviour), log_softmax(ref)
    batch = every_token(log_softmax(old), sampled, parent)
    value, gradient = exact(policy, parent)
    for estimator, same_value in (("k2", False), ("k3_unbiased", True)):
        for proximal in ("old", "behaviour"):
            found, direction = expected(algorithm(estimator, proximal=proximal), policy, batch, sampled)
            torch.testing.assert_close(direction, gradient, atol=1e-9, rtol=1e-6)
            assert not same_value or found == pytest.approx(value, abs=1e-9)
    assert expected(algorithm("k3"), policy, batch, sampled)[0] == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("estimator", ["k2", "k3_unbiased"])
@pytest.mark.parametrize("policy", [OLD, POLICY])
def test_without_a_correction_it_is_neither(estimator: str, policy: list[float]) -> None:
    sampled, parent = log_softmax(BEHAVIOUR), log_softmax(REF)
    found, gradient = expected(
        algorithm(estimator, form="none"), policy, every_token(log_softmax(OLD), sampled, parent), sampled
    )
    value, wanted = exact(policy, parent)
    assert abs(found - value) > 0.3 * value
    assert float((gradient - wanted).norm()) > float(wanted.norm())


def test_later_minibatches_of_the_policys_own_samples_need_no_correction() -> None:
    old, parent = log_softmax(OLD), log_softmax(REF)
    found, gradient = expected(algorithm("k3_unbiased", form="none"), POLICY, every_token(old, old, parent), old)
    value, wanted = exact(POLICY, parent)
    assert found == pytest.approx(value)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_of_sequences_give_the_kl_of_whole_responses_and_those_of_tokens_at_prefixes_as_sampled(
    level: str,
) -> None:
    """Responses of two tokens, the second one's distribution by the first."""
    draw = torch.Generator().manual_seed(1)
    first = {name: torch.randn(3, generator=draw, dtype=torch.float64).log_softmax(0) for name in ("pi", "mu", "ref")}
    then = {name: torch.randn(3, 3, generator=draw, dtype=torch.float64).log_softmax(1) for name in first}
    responses = list(itertools.product(range(3), repeat=2))
    batch = PackedBatch.pack([Rollout([9], list(r), [0.0, 0.0], 0.0, i) for i, r in enumerate(responses)])

    def of(name: str) -> Tensor:
        return torch.stack([torch.stack([torch.tensor(0.0), first[name][a], then[name][a, b]]) for a, b in responses])

    pi, mu, ref = (of(name).flatten() for name in ("pi", "mu", "ref"))
    batch = batch.with_(advantages=0 * pi, old_log_probs=pi, behaviour_log_probs=mu, ref_log_probs=ref)
    made = algorithm("k3", level=level)
    losses = [made.loss(pi[3 * i : 3 * i + 3], batch.select([i]))[0] for i in range(len(responses))]
    found = sum(float(of("mu")[i].sum().exp() * loss) for i, loss in enumerate(losses))
    visits = first["pi" if level == "sequence" else "mu"].exp()
    later = sum(visits[a] * kl(then["pi"][a], then["ref"][a]) for a in range(3))
    assert found == pytest.approx(float(COEFFICIENT * (kl(first["pi"], first["ref"]) + later)))


# ------------------------------------------------------------------------------------------------------ as a metric


def logged(tokens: list[int], policy: Tensor, behaviour: Tensor, ref: Tensor, *, fresh: bool = False) -> PackedBatch:
    batch = PackedBatch.pack([Rollout([9], [token], [0.0], 0.0, i, fresh=fresh) for i, token in enumerate(tokens)])
    of = {"old_log_probs": policy, "behaviour_log_probs": behaviour, "ref_log_probs": ref}
    return batch.with_(**{name: at_tokens(log_probs[torch.tensor(tokens)]) for name, log_probs in of.items()})


@pytest.mark.parametrize("fresh", [True, False])
def test_the_metric_is_the_kl_of_the_policy_whoever_sampled(fresh: bool) -> None:
    """Of tokens as often as the behaviour policy samples them, the mean is the expectation."""
    behaviour = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    policy, ref = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.2, 0.7, 0.1], [0.3, 0.3, 0.4]))
    batch = logged([0, 0, 1, 2], policy, behaviour, ref, fresh=fresh)
    assert batch.old_log_probs is not None
    assert kl_to_reference(batch, batch.old_log_probs) == pytest.approx(float(kl(policy, ref)))
    assert at_end(batch, batch.old_log_probs)["kl_ref_at_end"] == pytest.approx(float(kl(policy, ref)))
    unweighed = float(k3(policy, ref)[torch.tensor([0, 0, 1, 2])].mean())
    assert abs(unweighed - float(kl(policy, ref))) > 0.1


def test_a_logged_token_that_has_become_unlikely_does_not_blow_up_the_metric() -> None:
    """Its part is at most reference over behaviour, where k3 alone is reference over policy, e^49 here."""
    log_probs = (torch.tensor([p], dtype=torch.float64) for p in (-50.0, -1.0, -1.0))
    batch = logged([0], *log_probs)
    assert batch.old_log_probs is not None
    assert kl_to_reference(batch, batch.old_log_probs) == pytest.approx(1.0)
    assert math.isfinite(kl_to_reference(batch, batch.old_log_probs - 500))
