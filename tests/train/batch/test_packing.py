"""Which sequences go together, and attention that does not cross them: no mask, no padding token in a layer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3NextConfig,
)

from train.batch.packed import PackedBatch, Rollout
from train.batch.packing import balance, fill
from train.batch.prompt_rows import all_rows
from train.model.attention.calls import Packing, like_lengths
from train.model.attention.packed import IMPLEMENTATION, use_packed_attention
from train.model.fsdp import token_log_probs

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
SMALL = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 120, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}
MODELS: dict[str, PretrainedConfig] = {
    "grouped queries": Qwen3Config(**SMALL, tie_word_embeddings=True),
    "sliding window": MistralConfig(**SMALL, sliding_window=6),
    "soft cap": Gemma2Config(**SMALL, sliding_window=6, query_pre_attn_scalar=8),
    "sinks": GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    "learned positions": GPT2Config(**GPT2, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokens_of(parts: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[s] for s in part) for part in parts]


@given(LENGTHS, st.integers(1, 6))
def test_parts_hold_every_sequence_once_none_is_empty_and_they_differ_by_one_sequence_at_most(
    lengths: list[int], parts: int
) -> None:
    parts = min(parts, len(lengths))
    made = balance(lengths, parts)
    assert sorted(s for part in made for s in part) == list(range(len(lengths)))
    assert len(made) == parts
    assert all(made)
    loads = tokens_of(made, lengths)
    assert loads == sorted(loads, reverse=True), "the i-th micro-batches of all ranks should be about equally long"
    assert loads[0] - loads[-1] <= max(lengths)


def test_parts_are_nearer_to_equal_than_the_longest_first_rule_makes_them() -> None:
    generator = torch.Generator().manual_seed(0)
    gap = greedy_gap = 0
    for _ in range(50):
        lengths = torch.randint(20, 200, (24,), generator=generator).tolist()
        made = tokens_of(balance(lengths, 4), lengths)
        gap += made[0] - made[-1]
        greedy = [0] * 4
        for length in sorted(lengths, reverse=True):
            greedy[greedy.index(min(greedy))] += length
        greedy_gap += max(greedy) - min(greedy)
    assert gap < greedy_gap / 3


@given(LENGTHS, st.integers(1, 80), st.integers(1, 40))
def test_micro_batches_keep_the_budget_and_are_as_many_as_asked_for(
    lengths: list[int], budget: int, at_least: int
) -> None:
    groups = fill(lengths, budget, at_least)
    assert sorted(s for group in groups for s in group) == list(range(len(lengths)))
    loads = tokens_of(groups, lengths)
    assert loads == sorted(loads, reverse=True)
    assert all(len(group) == 1 or load <= budget for group, load in zip(groups, loads, strict=True))
    fewest = len(fill(lengths, budget))
    assert len(groups) == min(max(fewest, at_least), len(lengths))


@given(LENGTHS, st.integers(40, 120))
def test_micro_batches_are_no_more_than_the_known_bound_on_best_fit(lengths: list[int], budget: int) -> None:
    assert len(fill(lengths, budget)) <= 11 / 9 * -(-sum(lengths) // budget) * 2 + 4
    filled = tokens_of(fill(lengths, budget), lengths)
    if len(filled) > 1:
        assert filled[-1] + filled[-2] > budget, "two micro-batches that fit into one should be one"


@given(LENGTHS)
def test_calls_of_attention_hold_every_sequence_once_the_longest_first(lengths: list[int]) -> None:
    calls = like_lengths(all_rows(lengths).spans)
    assert sorted(s for call in calls for s in call) == list(range(len(lengths)))
    for call in calls:
        assert lengths[call[0]] == max(lengths[s] for s in call)


def test_sequences_of_one_length_are_computed_in_one_call_without_any_filling() -> None:
    packing = Packing(all_rows([500] * 4).spans, torch.device("cpu"))
    assert [call[:4] for call in packing.calls] == [(4, 500, 0, 0)]
    assert packing.calls[0].kept is None
    assert packing.order is None


@given(LENGTHS)
def test_what_is_laid_out_for_attention_comes_back_in_the_order_of_the_batch(lengths: list[int]) -> None:
    packing = Packing(all_rows(lengths).spans, torch.device("cpu"))
    tokens = torch.arange(sum(lengths))
    laid_out = tokens if packing.order is None else tokens[packing.order]
    assert torch.equal(laid_out[packing.rows], tokens)
    assert len(laid_out) == sum(call.spans * call.length for call in packing.calls)


def batch_of(shapes: list[tuple[int, int, int]]) -> PackedBatch:
    """(prompt, its tokens, tokens of the response) of each sequence; of one name and length, prompts are the same."""
    generator = torch.Generator().manual_seed(1)
    prompts: dict[tuple[int, int], list[int]] = {}

    def tokens(count: int) -> list[int]:
        return torch.randint(2, 120, (count,), generator=generator).tolist()

    return PackedBatch.pack(
        [
            Rollout(prompts.setdefault((name, p), tokens(p)), tokens(r), [0.0] * r, 0.0, i, 1 + i / 10)
            for i, (name, p, r) in enumerate(shapes)
        ]
    )


BATCHES = {
    "prompts of their own": batch_of([(0, 3, 7), (1, 5, 2), (2, 9, 20), (3, 3, 7), (4, 1, 1), (5, 12, 28)]),
    # Two prompts of one length, one of another; responses of one token; one that answers a prompt alone.
    "shared prompts": batch_of(
        [(0, 9, 7), (1, 9, 2), (0, 9, 20), (2, 4, 1), (1, 9, 28), (2, 4, 1), (3, 9, 5), (0, 9, 1), (1, 9, 13)]
    ),
}


@pytest.fixture(scope="module", params=BATCHES)
def batch(request: pytest.FixtureRequest) -> PackedBatch:
    return BATCHES[request.param]


def make(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


def one_by_one(model: nn.Module, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies, float32 [T]: each sequence in a call of its own, by whole logits."""
    result = entropies = torch.zeros(len(batch.tokens))
    for s in range(len(batch)):
        start, end = int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1])
        first = start + int(batch.prompt_lengths[s])
        logits = model(batch.tokens[None, start:end]).logits[0] / batch.temperatures[s]
        log_probs = torch.log_softmax(logits, -1)[first - start - 1 : -1]
        at = (torch.arange(first, end),)
        result = result.index_put(at, log_probs.gather(1, batch.tokens[first:end, None])[:, 0])
        entropies = entropies.index_put(at, -(log_probs.exp() * log_probs).sum(-1))
    return result, entropies


@pytest.mark.parametrize("kind", MODELS)
def test_a_pack_is_scored_and_learned_from_as_its_sequences_are_one_by_one(kind: str, batch: PackedBatch) -> None:
    weights = torch.linspace(-1, 1, len(batch.tokens))
    plain = make(MODELS[kind], "eager")
    expected, entropies = one_by_one(plain, batch)
    ((expected + 0.5 * entropies) * weights).sum().backward()
    model = make(MODELS[kind], "eager")
    assert use_packed_attention(model)
    log_probs, entropy = token_log_probs(model, batch)
    ((log_probs + 0.5 * entropy) * weights).sum().backward()
    torch.testing.assert_close(log_probs, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(entropy, entropies, atol=2e-5, rtol=0)
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        torch.testing.assert_close(b.grad, a.grad, atol=1e-5 * float(a.grad.abs().max()) + 1e-7, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_a_change_in_one_response_leaves_the_others_log_probs_bit_identical(kind: str, batch: PackedBatch) -> None:
    model = make(MODELS[kind], "eager")
    use_packed_attention(model)
    with torch.no_grad():
        before, _ = token_log_probs(model, batch)
        for s in range(len(batch)):
            inside = slice(int(batch.cu_seqlens[s] + batch.prompt_lengths[s]), int(batch.cu_seqlens[s + 1]))
            after, _ = token_log_probs(model, changed(batch, inside))
            others = torch.ones(len(batch.tokens), dtype=torch.bool)
            others[inside] = False
            # Tokens routed to one expert are multiplied together, in a matrix whose height others change.
            rounding = 1e-5 if kind == "sinks" else 0.0
            torch.testing.assert_close(after[others], before[others], atol=rounding, rtol=0)
            assert not torch.allclose(after[inside], before[inside])


@pytest.mark.parametrize("kind", MODELS)
def test_a_change_in_one_prompt_leaves_those_that_shared_it_as_they_were(kind: str, batch: PackedBatch) -> None:
    model = make(MODELS[kind], "eager")
    use_packed_attention(model)
    with torch.no_grad():
        before, _ = token_log_probs(model, batch)
        for s in range(len(batch)):
            inside = slice(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s] + batch.prompt_lengths[s]))
            after, _ = token_log_probs(model, changed(batch, inside))
            own = torch.zeros(len(batch.tokens), dtype=torch.bool)
            own[int(batch.cu_seqlens[s]) : int(batch.cu_seqlens[s + 1])] = True
            torch.testing.assert_close(after[~own], before[~own], atol=1e-5, rtol=0)
            assert not torch.allclose(after[own], before[own])


def changed(batch: PackedBatch, places: slice) -> PackedBatch:
    tokens = batch.tokens.clone()
    tokens[places] = (tokens[places] + 7) % 118 + 2
    return batch.with_(tokens=tokens)


def test_layers_compute_each_prompt_once_and_no_last_token(batch: PackedBatch) -> None:
    model = make(MODELS["grouped queries"], "eager")
    use_packed_attention(model)
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            module.register_forward_hook(lambda _, inputs, __: seen.add(inputs[0].shape[:-1].numel()))
    token_log_probs(model, batch)
    prompts = {
        tuple(batch.tokens[a : a + p].tolist())
        for a, p in zip(batch.cu_seqlens[:-1], batch.prompt_lengths, strict=True)
    }
    assert seen == {sum(map(len, prompts)) + int(batch.response_lengths.sum()) - len(batch)}


def test_without_a_packing_a_model_is_what_it_is_with_sdpa(batch: PackedBatch) -> None:
    plain, model = make(MODELS["grouped queries"], "sdpa"), make(MODELS["grouped queries"], "sdpa")
    use_packed_attention(model)
    assert model.config._attn_implementation == IMPLEMENTATION
    tokens = batch.tokens[:24].view(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    torch.testing.assert_close(
        model(tokens, attention_mask=mask).logits[:, 4:], plain(tokens, attention_mask=mask).logits[:, 4:]
    )


def test_a_model_whose_layers_carry_a_state_is_refused_by_the_kind_of_its_layers() -> None:
    config = Qwen3NextConfig(**SMALL, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="linear_attention; their state would cross"):
        use_packed_attention(model)
