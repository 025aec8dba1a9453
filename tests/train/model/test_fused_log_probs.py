"""Log-probabilities and entropies by tiles, against whole logits: values, gradients, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    PretrainedConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
)

from train.model.fused_log_probs import IDENTITY, LogitTransform, log_probs_and_entropy, scored_by_head, transform_of


def whole(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor,
    scale: float = 1.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    logits = functional.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32)) * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    distribution = torch.log_softmax(logits / temperatures[:, None], -1)
    return distribution.gather(1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


def inputs(tokens: int, vocabulary: int, width: int, seed: int, with_bias: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    return {
        "hidden": normal(tokens, width),
        "weight": normal(vocabulary, width),
        "bias": normal(vocabulary) if with_bias else None,
        "targets": torch.randint(0, vocabulary, (tokens,), generator=generator),
        "temperatures": torch.rand(tokens, generator=generator) + 0.5,
    }


def gradients(given: dict[str, Any], scores: tuple[Tensor, Tensor], entropy: float) -> list[Tensor]:
    weights = torch.linspace(-1, 1, len(scores[0]), dtype=scores[0].dtype)
    loss = (scores[0] * weights).sum() + entropy * (scores[1] * weights.flip(0)).sum()
    wanted = [given[name] for name in ("hidden", "weight", "bias") if given[name] is not None]
    return list(torch.autograd.grad(loss, wanted))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(1, 40),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.sampled_from([(1.0, None), (0.3, None), (1.0, 2.0), (2.0, 5.0)]),
    st.sampled_from([0.0, 0.7]),
    st.booleans(),
    st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_whole_logits_whatever_the_tile(
    tokens: int,
    vocabulary: int,
    tile: tuple[int, int],
    transform: tuple[float, float | None],
    entropy: float,
    with_bias: bool,
    seed: int,
) -> None:
    made = inputs(tokens, vocabulary, 5, seed, with_bias)
    scores = log_probs_and_entropy(**made, transform=LogitTransform(*transform), tile=tile)
    exact = dict(made)
    for name in ("hidden", "weight", "bias"):
        exact[name] = None if made[name] is None else made[name].detach().double().requires_grad_()
    expected = whole(**exact, scale=transform[0], cap=transform[1])
    for a, b in zip(scores, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)
    for a, b in zip(gradients(made, scores, entropy), gradients(exact, expected, entropy), strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-4, rtol=1e-3)


def test_in_bfloat16_the_error_is_at_most_half_again_that_of_whole_logits_in_bfloat16() -> None:
    made = inputs(200, 3000, 64, 1, False)
    made["weight"] = (made["weight"].detach() * 0.1).requires_grad_()
    half = {n: x.detach().bfloat16().requires_grad_() if n in ("hidden", "weight") else x for n, x in made.items()}
    exact = {n: half[n].detach().double().requires_grad_() if n in ("hidden", "weight") else x for n, x in made.items()}
    truth = whole(**exact)
    tiled, naive = log_probs_and_entropy(**half, tile=(64, 256)), whole(**half)
    truths = [*truth, *gradients(exact, truth, 0.3)]
    for t, a, b in zip(
        truths, [*tiled, *gradients(half, tiled, 0.3)], [*naive, *gradients(half, naive, 0.3)], strict=True
    ):
        tiled_error, naive_error = (float((x.detach().double() - t.detach()).norm()) for x in (a, b))
        assert tiled_error <= 1.5 * naive_error + 1e-6
        assert a.dtype == b.dtype


def test_a_frozen_head_gets_no_gradient_and_hidden_states_do() -> None:
    made = inputs(4, 9, 3, 2, False)
    made["weight"].requires_grad_(False)
    log_probs, _ = log_probs_and_entropy(**made, tile=(2, 4))
    log_probs.sum().backward()
    assert made["weight"].grad is None
    assert made["hidden"].grad is not None


def test_logits_far_apart_give_finite_values_and_gradients() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(hidden, weight, None, torch.tensor([0, 0]), torch.ones(2), tile=(1, 1))
    (log_probs + entropy).sum().backward()
    assert log_probs.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        (lambda x: x, IDENTITY),
        (lambda x: x * 0.0625, LogitTransform(0.0625)),
        (lambda x: x / 8, LogitTransform(1 / 8)),
        (lambda x: 30 * torch.tanh(x / 30), LogitTransform(1.0, 30.0)),
        (lambda x: 15 * torch.tanh(x * 2 / 15), LogitTransform(2.0, 15.0)),
    ],
)
def test_what_a_model_does_to_logits_is_seen_from_known_values(done: Any, expected: LogitTransform) -> None:
    from train.model.fused_log_probs import _PROBES

    found = transform_of(done(torch.tensor(_PROBES)), "model")
    assert found.scale == pytest.approx(expected.scale, rel=1e-4)
    assert found.cap == (None if expected.cap is None else pytest.approx(expected.cap, rel=1e-4))


def test_what_is_neither_a_scale_nor_a_cap_is_refused_by_the_models_name() -> None:
    from train.model.fused_log_probs import _PROBES

    with pytest.raises(ValueError, match="OddForCausalLM does something to its logits that is neither"):
        transform_of(torch.tensor(_PROBES) + 1, "OddForCausalLM")


SMALL = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("lora", [False, True], ids=["plain head", "wrapped head"])
@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SMALL, tie_word_embeddings=True),
        CohereConfig(**SMALL, logit_scale=0.25),
        GraniteConfig(**SMALL, logits_scaling=3.0),
        Gemma2Config(**SMALL, final_logit_softcapping=2.0),
        RecurrentGemmaConfig(**SMALL, logits_soft_cap=3.0, lru_width=32, block_types=["recurrent", "attention"]),
    ],
    ids=lambda config: config.model_type,
)
def test_a_models_scores_are_those_of_its_own_logits(config: PretrainedConfig, lora: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    if lora:
        model.lm_head = nn.Sequential(model.lm_head)
        model.get_output_embeddings = lambda: model.lm_head
    tokens = torch.randint(2, 90, (1, 12))
    positions, targets, temperatures = torch.tensor([1, 4, 10]), torch.tensor([5, 6, 7]), torch.tensor([0.5, 1.0, 2.0])
    logits = model(tokens, use_cache=False).logits[0, positions].float()
    expected = torch.log_softmax(logits / temperatures[:, None], -1)
    wanted = list(model.parameters())
    chosen = expected.gather(1, targets[:, None])[:, 0]
    expected_gradients = torch.autograd.grad(chosen.sum(), wanted, retain_graph=True, allow_unused=True)
    with scored_by_head(model, positions, targets, temperatures):
        scores = model(tokens, use_cache=False).logits
    torch.testing.assert_close(scores[:, 0], chosen, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores[:, 1], -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=1e-5)
    for a, b in zip(
        torch.autograd.grad(scores[:, 0].sum(), wanted, allow_unused=True), expected_gradients, strict=True
    ):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-5 * (1 + float(b.abs().max())), rtol=1e-4)
    assert model(tokens, use_cache=False).logits.shape == (1, 12, 90), "outside, the model is as it was"


@pytest.mark.long
def test_peak_memory_at_152k_vocabulary_is_under_a_twentieth_of_that_of_whole_logits() -> None:
    command = [
        sys.executable,
        "-m",
        "deploy.examples.bench.training.vocabulary",
        "--tokens",
        "512",
        "--width",
        "32",
        "--rounds",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["vocabulary"] == 151_936
    whole_logits = 512 * 151_936 * 4
    assert figures["naive_bytes"] > 2 * whole_logits, "the measure must see the whole logits"
    assert figures["tiled_bytes"] < figures["naive_bytes"] / 20
