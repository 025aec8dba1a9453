"""Transformers' generation on a model sharded by FSDP2 over gloo, on one rank and on two."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from tests.train.ranks import run_ranks
from tests.train.tiny_models import SIZES, gpt2, qwen3
from train.config.sections import LoraConfig
from train.model.fsdp import build
from train.model.generation import Generated, Sampling, drawn, generate

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17], [18, 19, 20, 21]]
STOP = frozenset({3, 4, 40, 41, 42, 43, 44, 45})
SAMPLED = {
    "whole": Sampling(8, temperature=0.7),
    "cut": Sampling(8, temperature=1.3, top_p=0.8, top_k=20),
}


def gemma2() -> Any:
    """Caps scores and logits, and has a window of fewer tokens than are generated."""
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 2.0}
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **sizes))


MODELS = {"qwen3": qwen3, "gpt2": lambda: gpt2().float(), "gemma2": gemma2}


def rank(number: int, folder: Path, policies: dict[str, Path]) -> dict[str, list[Generated]]:
    """What this rank generates: prompts and seeds are dealt out as the driver would."""
    size = torch.distributed.get_world_size()
    prompts, seeds = PROMPTS[number::size], [7 + i for i in range(len(PROMPTS))][number::size]
    found = {}
    for name, policy in policies.items():
        model = build(policy, dtype=torch.float32, lora=LoraConfig(rank=2) if name == "qwen3" else None)
        if name == "qwen3":
            for parameter_name, parameter in model.named_parameters():
                if ".lora_B." in parameter_name:
                    torch.nn.init.constant_(parameter, 0.05)
        hows = ["whole"] if name == "qwen3" else ["whole", "cut"]
        for how in hows:
            found[f"{name} {how}"] = generate(model, prompts, seeds, SAMPLED[how], STOP, lambda length: 64)
        if name != "qwen3":
            found[f"{name} greedy"] = generate(model, prompts, None, SAMPLED["whole"], STOP, lambda length: 64)
        else:
            found["few at once"] = generate(model, prompts, seeds, SAMPLED["whole"], STOP, lambda length: 30 // length)
            first, numbers = (PROMPTS[:1], [7]) if number == size - 1 else ([], [])
            found["one rank alone"] = generate(model, first, numbers, SAMPLED["whole"], STOP, lambda length: 64)
    return found


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(2)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)  # so that tokens differ in their probability
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def by_ranks(policies: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What one rank, and what two together, generated, in the order of the prompts."""
    found: dict[int, dict[str, Any]] = {}
    for size in (1, 2):
        compared = policies if size == 2 else {"qwen3": policies["qwen3"]}
        ranks = run_ranks(size, rank, tmp_path_factory.mktemp(f"ranks{size}"), compared)
        found[size] = {"one rank alone": ranks[-1].pop("one rank alone")}
        for name, own in ranks[-1].items():
            found[size][name] = [ranks[i % size][name][i // size] for i in range(len(PROMPTS))]
            assert len(own) == len(PROMPTS) // size
    return found


def whole_model(policies: dict[str, Path], name: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(policies[name], dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def distributions(model: Any, prompt: list[int], response: list[int], sampling: Sampling) -> torch.Tensor:
    """[response tokens, V]: logprobs, one pass over the whole sequence, cut by a plain loop."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    found = []
    for row in logits / sampling.temperature:
        order = row.sort(descending=True, stable=True).indices.tolist()
        kept = order[: sampling.top_k or len(order)]
        probability = row[kept].softmax(-1)
        count = next(i + 1 for i in range(len(kept)) if probability[: i + 1].sum() >= sampling.top_p - 1e-9)
        cut = torch.full_like(row, -torch.inf)
        cut[kept[:count]] = row[kept[:count]].log_softmax(-1)
        found.append(cut)
    return torch.stack(found)


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
@pytest.mark.parametrize("how", SAMPLED)
def test_logprobs_are_those_of_the_distribution_that_was_sampled(
    name: str, how: str, policies: dict[str, Path], by_ranks: dict[int, dict[str, Any]]
) -> None:
    model = whole_model(policies, name)
    for prompt, found in zip(PROMPTS, by_ranks[2][f"{name} {how}"], strict=True):
        expected = distributions(model, prompt, found.token_ids, SAMPLED[how])
        chosen = expected[range(len(found.token_ids)), found.token_ids]
        torch.testing.assert_close(torch.tensor(found.log_probs).double(), chosen, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_greedy_tokens_are_the_likeliest_and_their_logprobs_of_no_temperature(
    name: str, policies: dict[str, Path], by_ranks: dict[int, dict[str, Any]]
) -> None:
    model = whole_model(policies, name)
    for prompt, found in zip(PROMPTS, by_ranks[2][f"{name} greedy"], strict=True):
        expected = distributions(model, prompt, found.token_ids, Sampling(1))
        assert expected.argmax(-1).tolist() == found.token_ids
        torch.testing.assert_close(torch.tensor(found.log_probs).double(), expected.max(-1).values, atol=1e-4, rtol=0)


def test_a_seed_gives_the_same_response_on_any_number_of_ranks_and_in_any_batch(
    by_ranks: dict[int, dict[str, Any]],
) -> None:
    for name, alone in by_ranks[1].items():
        assert [found.token_ids for found in alone] == [found.token_ids for found in by_ranks[2][name]], name
    one = by_ranks[2]
    assert [f.token_ids for f in one["few at once"]] == [f.token_ids for f in one["qwen3 whole"]]
    assert one["one rank alone"][0].token_ids == one["qwen3 whole"][0].token_ids
    assert len({tuple(f.token_ids) for f in one["qwen3 whole"]}) == len(PROMPTS)


def test_a_response_ends_with_the_first_stop_token_or_at_the_longest_length(
    by_ranks: dict[int, dict[str, Any]],
) -> None:
    every = [found for of in by_ranks[2].values() for found in of]
    assert {found.stopped for found in every} == {True, False}
    for found in every:
        assert len(found.token_ids) == len(found.log_probs)
        assert [token in STOP for token in found.token_ids] == [False] * (len(found.token_ids) - 1) + [found.stopped]
        assert found.stopped or len(found.token_ids) == 8


def test_tokens_are_drawn_as_often_as_they_are_likely_and_never_where_they_can_not_be() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    uniform[0], uniform[-1] = 0.0, 1 - 2.0**-53
    counts = Counter(drawn(probabilities.log().expand(1000, -1), uniform).tolist())
    assert counts.keys() == {1, 3, 4}
    for token, count in counts.items():
        assert abs(count / 1000 - float(probabilities[token])) < 2e-3
