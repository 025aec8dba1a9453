"""Sequence parallelism in four ranks over gloo: values, gradients and updates are those of ranks that share nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, MistralConfig, PretrainedConfig, Qwen3Config

from tests.train.ranks import run_ranks
from tests.train.tiny_models import own_part
from train.algorithms import load
from train.batch.packed import PackedBatch, Rollout
from train.config.sections import FsdpConfig
from train.config.training import TrainConfig
from train.model.fsdp import build, token_log_probs
from train.model.mesh import make_meshes
from train.model.ulysses import Ulysses
from train.workers.actor import ActorWorker

RANKS = 4
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MODELS: dict[str, PretrainedConfig] = {
    "grouped queries": Qwen3Config(**SIZES, num_attention_heads=4, tie_word_embeddings=True),
    "sliding window": MistralConfig(**SIZES, num_attention_heads=4, sliding_window=5),
    "sinks": GptOssConfig(**SIZES, num_attention_heads=4, num_local_experts=2, num_experts_per_tok=1, sliding_window=5),
    "six heads": Qwen3Config(**SIZES, num_attention_heads=6),
}
CASES = [(kind, sp) for kind in ("grouped queries", "sliding window", "sinks") for sp in (2, 4)] + [("six heads", 2)]


def some_batch() -> PackedBatch:
    generator = torch.Generator().manual_seed(4)

    def some(count: int) -> list[int]:
        return torch.randint(2, 97, (count,), generator=generator).tolist()

    shapes = [(5, 8), (5, 5), (5, 12), (5, 2), (6, 9), (6, 8), (6, 1), (2, 11)]
    prompts = {p: some(p) for p in (5, 6, 2)}
    batch = PackedBatch.pack(
        [Rollout(prompts[p], some(r), [-3.0] * r, float(i % 3), i // 4, 1 + i / 10) for i, (p, r) in enumerate(shapes)]
    )
    algorithm = load(TrainConfig().algorithm)
    old = batch.behaviour_log_probs - 0.1
    return batch.with_(old_log_probs=old, ref_log_probs=old, advantages=algorithm.advantages(batch))


# ----------------------------------------------------------------------------------------------- in the ranks


def in_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    found = {
        "scores": {(kind, sp): scores(folder / kind, sp) for kind, sp in [*CASES, *((kind, 1) for kind in MODELS)]},
        "bfloat16": {sp: scores(folder / "grouped queries", sp, dtype=torch.bfloat16) for sp in (1, 4)},
        "recomputed": scores(folder / "grouped queries", 4, activation_checkpointing=True),
        "updates": {sp: updates(folder / "grouped queries", sp) for sp in (1, 2, 4)},
        "two tokens": two_tokens(folder / "grouped queries"),
        "heads": heads_and_back(rank),
        "refused heads": refusal(folder / "six heads", {}),
        "refused attention": refusal(folder / "sinks", {"attention": "eager"}),
    }
    return found


def scores(policy: Path, sp: int, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    """Log-probabilities and entropies of the batch, and the gradients of a weighted sum of both."""
    meshes = make_meshes("cpu", sequence_parallel_size=sp)
    model = build(policy, dtype=dtype, meshes=meshes, **options)
    whole = some_batch()
    part = own_part(whole, sequence_parallel_size=sp)
    batch = whole.select(part)
    log_probs, entropy = token_log_probs(model, batch)
    weights = torch.linspace(-1, 1, len(whole.tokens))[whole.token_index(part)]
    ((log_probs + 0.5 * entropy) * weights).sum().backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    # FSDP averages over ranks; every rank of a group has the loss of the same tokens.
    return {
        "tokens": whole.token_index(part),
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "gradients": {name: g * RANKS / sp for name, g in gradients.items()},
    }


def updates(policy: Path, sp: int) -> tuple[list[dict[str, float]], Tensor]:
    """What the actor says of two updates, and its log-probabilities of rank 0's sequences after them."""
    config = TrainConfig.model_validate(
        {
            "ranks": RANKS,
            "dtype": "float32",
            "micro_batch_tokens": 24,
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
            "algorithm": {"kl": {"coefficient": 0.1}},
            "fsdp": {"sequence_parallel": sp},
        }
    )
    actor = ActorWorker(policy=policy, config=config, peers={})
    whole = some_batch()
    batch = whole.select(whole.balanced(RANKS // sp)[actor.rank // sp])
    said = [actor.update(batch) for _ in range(2)]
    return said, actor.log_probs(whole)


def two_tokens(policy: Path) -> tuple[Tensor, Tensor]:
    """Fewer tokens than ranks: some have no token at all."""
    result = []
    for sp in (1, 4):
        model = build(policy, dtype=torch.float32, meshes=make_meshes("cpu", sequence_parallel_size=sp))
        log_probs, _ = token_log_probs(model, PackedBatch.pack([Rollout([5], [6], [0.0], 0.0, 0)]))
        log_probs.sum().backward()
        result.append(log_probs.detach())
    return result[0], result[1]


def heads_and_back(rank: int) -> bool:
    """What goes out by heads comes back by tokens, and each rank had its heads of all tokens meanwhile."""
    group = torch.distributed.group.WORLD
    assert group is not None
    whole = torch.arange(10 * 4 * 3.0).view(10, 4, 3)
    shared = Ulysses(group, tokens=10)
    q, k, v = shared.heads_for_tokens(whole[shared.own], whole[shared.own, :2], whole[shared.own, :2, :1])
    right = [
        torch.equal(q, whole[:, rank : rank + 1]),
        torch.equal(k, whole[:, rank // 2 : rank // 2 + 1]),
        torch.equal(v, whole[:, rank // 2 : rank // 2 + 1, :1]),
        torch.equal(shared.tokens_for_heads(q), whole[shared.own]),
    ]
    return all(right)


def refusal(policy: Path, options: dict[str, Any]) -> str:
    meshes = make_meshes("cpu", sequence_parallel_size=4)
    try:
        build(policy, dtype=torch.float32, meshes=meshes, options=FsdpConfig.model_validate(options))
    except ValueError as error:
        return str(error)
    return "not refused"


# ------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ulysses")
    torch.manual_seed(0)
    for kind, config in MODELS.items():
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.2)
        model.save_pretrained(folder / kind)
    return run_ranks(RANKS, in_a_rank, folder)


def joined(ranks: list[dict[str, Any]], name: str) -> Tensor:
    result = torch.zeros(len(some_batch().tokens))
    for found_by_rank in ranks:
        result[found_by_rank["tokens"]] = found_by_rank[name]
    return result


@pytest.mark.parametrize(("kind", "sp"), CASES)
def test_log_probs_entropies_and_gradients_are_those_of_ranks_that_share_nothing(
    found: list[dict[str, Any]], kind: str, sp: int
) -> None:
    alone = [f["scores"][kind, 1] for f in found]
    shared = [f["scores"][kind, sp] for f in found]
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(joined(shared, name), joined(alone, name), atol=2e-5, rtol=0)
    for rank in range(RANKS):
        assert torch.equal(shared[rank]["log_probs"], shared[rank // sp * sp]["log_probs"])
    for name, gradient in alone[0]["gradients"].items():
        bar = 2e-5 * float(gradient.abs().max()) + 1e-7
        torch.testing.assert_close(shared[0]["gradients"][name], gradient, atol=bar, rtol=1e-4, msg=name)


def test_activations_can_be_recomputed(found: list[dict[str, Any]]) -> None:
    kept, recomputed = found[0]["scores"]["grouped queries", 4], found[0]["recomputed"]
    for a, b in zip(kept["gradients"].values(), recomputed["gradients"].values(), strict=True):
        torch.testing.assert_close(a, b)


def test_in_bfloat16_log_probs_differ_by_rounding(found: list[dict[str, Any]]) -> None:
    alone, shared = (joined([f["bfloat16"][sp] for f in found], "log_probs") for sp in (1, 4))
    exact = joined([f["scores"]["grouped queries", 1] for f in found], "log_probs")
    assert float((shared - exact).abs().max()) < 2 * float((alone - exact).abs().max())


@pytest.mark.parametrize("sp", [2, 4])
def test_an_actor_makes_the_updates_of_one_whose_ranks_share_nothing(found: list[dict[str, Any]], sp: int) -> None:
    said_alone, after_alone = found[0]["updates"][1]
    said, after = found[0]["updates"][sp]
    for a, b in zip(said_alone, said, strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(after, after_alone, atol=1e-3, rtol=0)


def test_a_batch_with_fewer_tokens_than_ranks_is_scored(found: list[dict[str, Any]]) -> None:
    for f in found:
        torch.testing.assert_close(*f["two tokens"])


def test_each_rank_has_its_share_of_the_heads_and_of_those_they_ask(
    found: list[dict[str, Any]],
) -> None:
    assert all(f["heads"] for f in found)


def test_heads_that_the_ranks_do_not_divide_are_refused_with_both_numbers(found: list[dict[str, Any]]) -> None:
    assert "sequence_parallel=4 does not divide the 6 attention heads" in found[0]["refused heads"]
    assert "set train.fsdp.attention to auto" in found[0]["refused attention"]


def test_ranks_that_sequence_parallelism_does_not_divide_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValidationError, match=r"train\.fsdp\.sequence_parallel=2 does not divide train\.ranks=3"):
        TrainConfig.model_validate({"ranks": 3, "fsdp": {"sequence_parallel": 2}})
