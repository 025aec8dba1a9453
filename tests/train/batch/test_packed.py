"""The packed batch: nothing is padded, lost, doubled or mixed up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train.batch.packed import PackedBatch, Rollout
from train.batch.packing import balance, fill
from train.controller.dispatch import Layout, by_engine, by_tokens, per_token


@st.composite
def rollouts(draw: st.DrawFn) -> list[Rollout]:
    count = draw(st.integers(1, 12))
    made = []
    for i in range(count):
        prompt = draw(st.lists(st.integers(0, 99), min_size=1, max_size=6) | st.sampled_from([[1], [1, 2], [7] * 9]))
        response = draw(st.lists(st.integers(100, 199), min_size=1, max_size=6))
        log_probs = [-(i + 1) - k / 10 for k in range(len(response))]
        made.append(Rollout(prompt, response, log_probs, float(i), draw(st.integers(0, 3)), 1.0 + i / 10))
    return made


@given(rollouts())
def test_packing_keeps_every_token_in_its_place(made: list[Rollout]) -> None:
    batch = PackedBatch.pack(made)
    assert len(batch.tokens) == sum(len(r.prompt) + len(r.response) for r in made)
    for s, r in enumerate(made):
        part = slice(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1]))
        assert batch.tokens[part].tolist() == r.prompt + r.response
        assert batch.position_ids[part].tolist() == list(range(len(r.prompt) + len(r.response)))
        assert batch.response_mask[part].tolist() == [False] * len(r.prompt) + [True] * len(r.response)
        assert batch.behaviour_log_probs[part][len(r.prompt) :].tolist() == pytest.approx(r.log_probs)
    assert batch.tokens[batch.response_mask].min() >= 100


@given(rollouts(), st.randoms())
def test_a_selection_holds_its_sequences_in_the_order_asked_for(made: list[Rollout], random: object) -> None:
    order = list(range(len(made)))
    random.shuffle(order)  # type: ignore[attr-defined]
    order = order[: max(1, len(order) // 2)]
    batch = PackedBatch.pack(made)
    picked, wanted = (
        batch.with_(advantages=batch.behaviour_log_probs * 2).select(order),
        PackedBatch.pack([made[s] for s in order]),
    )
    for name in ("tokens", "cu_seqlens", "prompt_lengths", "temperatures", "rewards", "groups", "behaviour_log_probs"):
        assert torch.equal(getattr(picked, name), getattr(wanted, name)), name
    assert picked.advantages is not None
    assert torch.equal(picked.advantages, wanted.behaviour_log_probs * 2)


@given(rollouts(), st.integers(1, 4))
def test_ranks_get_every_sequence_once_and_about_the_same_number_of_tokens(made: list[Rollout], ranks: int) -> None:
    batch = PackedBatch.pack(made)
    if len(batch) < ranks:
        with pytest.raises(ValueError, match=f"{len(batch)} sequences cannot be split over {ranks} ranks"):
            batch.balanced(ranks)
        return
    parts = batch.balanced(ranks)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(batch)))
    slowest = max(computed_tokens(batch, part) for part in parts)
    alone = balance(batch.lengths.tolist(), ranks)
    assert slowest <= 1.02 * max(int(batch.lengths[part].sum()) for part in alone), "keeping prompts together costs"


@given(rollouts(), st.integers(2, 40), st.integers(1, 5))
def test_micro_batches_keep_the_budget_and_hold_every_sequence_once(
    made: list[Rollout], budget: int, at_least: int
) -> None:
    batch = PackedBatch.pack(made)
    groups = batch.micro_batches(budget, at_least)
    assert sorted(torch.cat(groups).tolist()) == list(range(len(batch)))
    for group in groups:
        assert len(group) == 1 or computed_tokens(batch, group) <= budget
    assert min(at_least, len(batch)) <= len(groups) <= len(fill(batch.lengths.tolist(), budget, at_least))


def test_responses_to_one_prompt_are_computed_together_as_far_as_budget_and_ranks_allow() -> None:
    prompts = [[g] * 30 for g in range(4)]
    made = [Rollout(prompts[i % 4], [9] * 5, [0.0] * 5, 0.0, i % 4) for i in range(32)]
    batch = PackedBatch.pack(made)

    def computed(parts: list[torch.Tensor]) -> list[int]:
        return [computed_tokens(batch, part) for part in parts]

    assert computed(batch.balanced(2)) == [140, 140]
    assert computed(batch.balanced(4)) == [70] * 4
    assert computed(batch.balanced(8)) == [50] * 8
    assert computed(batch.micro_batches(280)) == [280]
    assert computed(batch.micro_batches(140)) == [140, 140]
    assert computed(batch.micro_batches(50)) == [50] * 8
    assert computed(batch.micro_batches(10)) == [35] * 32
    assert computed(batch.micro_batches(280, at_least=8)) == [50] * 8


def computed_tokens(batch: PackedBatch, sequences: torch.Tensor) -> int:
    """Of the responses, and of each prompt once."""
    part = batch.select(sequences)
    starts, lengths = part.cu_seqlens.tolist(), part.prompt_lengths.tolist()
    prompts = {tuple(part.tokens[a : a + n].tolist()) for a, n in zip(starts, lengths, strict=False)}
    return int(part.response_lengths.sum()) + sum(map(len, prompts))


@given(rollouts(), st.integers(1, 4))
def test_minibatches_never_split_a_group(made: list[Rollout], count: int) -> None:
    batch = PackedBatch.pack(made)
    parts = list(batch.minibatches(count))
    assert sum(len(p) for p in parts) == len(batch)
    seen = [set(p.groups.tolist()) for p in parts]
    assert len(set().union(*seen)) == sum(len(s) for s in seen)


@given(rollouts(), st.integers(1, 3))
def test_what_is_split_per_token_comes_back_in_the_order_of_the_batch(made: list[Rollout], ranks: int) -> None:
    batch = PackedBatch.pack(made)
    if len(batch) < ranks:
        return
    layout = Layout(ranks, 1)
    parts, join = per_token(layout, batch)
    answers = [p.behaviour_log_probs for p in parts]
    assert torch.equal(join(answers), batch.behaviour_log_probs)
    assert [p.tokens.tolist() for p in by_tokens(layout, batch)[0]] == [p.tokens.tolist() for p in parts]


@given(st.lists(st.integers()), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
def test_what_is_dealt_out_to_engines_comes_back_in_order(items: list[int], shape: tuple[int, int]) -> None:
    layout = Layout(*shape)
    parts, join = by_engine(layout, items)
    for rank in range(layout.ranks):
        assert parts[rank] == parts[rank // shape[1] * shape[1]], "ranks of one engine must see the same"
    assert join([[x * 2 for x in p] for p in parts]) == [x * 2 for x in items]


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (Rollout([], [1], [0.0], 0.0, 0), "0 prompt and 1 response"),
        (Rollout([1], [], [], 0.0, 0), "1 prompt and 0 response"),
        (Rollout([1], [1, 2], [0.0], 0.0, 0), "1 logprobs for 2 response tokens"),
    ],
)
def test_a_rollout_that_cannot_be_learned_from_is_refused_by_name(rollout: Rollout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedBatch.pack([rollout])
