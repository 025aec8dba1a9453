"""Logprobs of requests that share a step, each of which asks for others."""

from __future__ import annotations

import math

import pytest
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from serve.vllm.per_request_logprobs import PerRequestLogprobs

VOCABULARY = 50


def sample(logits: torch.Tensor, asked: dict[int, list[int]], most: int | None) -> LogprobsTensors:
    """Greedily, one row a request; ``asked``: certain tokens by row; ``most``: likeliest ones, of any row."""
    rows = len(logits)
    metadata = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=most,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(rows),
        presence_penalties=torch.zeros(rows),
        repetition_penalties=torch.ones(rows),
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        logprob_token_ids=asked,
    )
    tensors = PerRequestLogprobs("processed_logprobs")(logits.clone(), metadata).logprobs_tensors
    assert tensors is not None
    return tensors


@pytest.mark.parametrize("asked", [{0: [7]}, {0: [7, 3], 2: [4, 4, 9, 0, 1, 2, 3, 5, 6, 8]}])
@pytest.mark.parametrize("most", [1, 4, 20])
def test_each_row_of_a_step_has_the_logprobs_that_its_request_asked_for(asked: dict[int, list[int]], most: int) -> None:
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits[1, 0] = logits[3, 0] = 9.0  # they sample token 0
    logits[3, 1:] = -math.inf
    expected = logits.log_softmax(-1)
    tensors = sample(logits, asked, most)
    for row in range(4):
        wanted = asked.get(row) or expected[row].topk(most).indices.tolist()
        width = 1 + len(wanted)
        tokens = tensors.logprob_token_ids[row, :width].tolist()
        assert tokens[0] == expected[row].argmax()
        assert row == 3 or tokens[1:] == wanted
        torch.testing.assert_close(tensors.logprobs[row, :width], expected[row][tokens], rtol=0, atol=1e-5)
        assert all(
            value == expected[row, 0] for token, value in zip(tokens, tensors.logprobs[row], strict=False) if token == 0
        )


def test_where_only_sampled_tokens_logprobs_are_asked_for_they_are_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not looked for among all others."""
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(3))
    vllms = Sampler.gather_logprobs(logits.log_softmax(-1), 0, logits.argmax(-1))
    monkeypatch.setattr("vllm.v1.sample.sampler.batched_count_greater_than", None)
    ours = sample(logits, {}, 0)
    torch.testing.assert_close(ours.logprobs, vllms.logprobs, rtol=0, atol=0)
    for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
        assert getattr(ours, name).shape == getattr(vllms, name).shape
        assert getattr(ours, name).dtype == getattr(vllms, name).dtype
    assert ours.logprob_token_ids.tolist() == vllms.logprob_token_ids.tolist()


def test_the_rank_of_a_prompts_token_is_counted_still() -> None:
    logprobs = torch.tensor([[0.0, -1.0, -2.0]])
    found = PerRequestLogprobs("processed_logprobs").gather_logprobs(logprobs, 0, torch.tensor([2]))
    assert found.selected_token_ranks.tolist() == [3]
