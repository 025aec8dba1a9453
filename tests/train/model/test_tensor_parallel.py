"""Tensor parallelism in two and four ranks over gloo: what is computed is what one rank computes, to rounding.

In float64 with norms in float64 too (transformers' compute in float32, where a last bit may flip) that is 1e-12.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.train.ranks import run_ranks
from tests.train.tiny_models import SIZES, gpt_neox, mixture, own_part, some_batch
from train.batch.packed import PackedBatch, Rollout
from train.checkpoint.dcp import load
from train.checkpoint.folders import aside_of, begin_aside, make_whole, name_of
from train.config.sections import LoraConfig
from train.config.training import TrainConfig
from train.export.model_folder import export
from train.model.fsdp import build, causal_lm, token_log_probs
from train.model.hf_io import held, own_slice, plain_name, stored_in, whole_tensor
from train.model.lora import merged_parameters
from train.model.mesh import make_meshes, mesh_sizes
from train.model.scalar_head import build_with_scalar_head, sequence_scores, token_values
from train.weight_sync.fsdp_shards import placed, shards
from train.workers.actor import ActorWorker
from train.workers.model_worker import copies_of
from train.workers.reference import ReferenceWorker

TOKENS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
COMMON = {**SIZES, **TOKENS, "num_key_value_heads": 2, "head_dim": 8}
WINDOW = {"sliding_window": 5}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**{**COMMON, "vocab_size": 64}, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**COMMON, tie_word_embeddings=True),
    "mistral": MistralConfig(**COMMON, **WINDOW),
    "gemma": GemmaConfig(**COMMON),
    "gemma2": Gemma2Config(**COMMON, **WINDOW, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(**COMMON, **WINDOW, query_pre_attn_scalar=8),
}
FOUR: dict[str, dict[str, int]] = {
    "fsdp": {},
    "ulysses": {"sequence_parallel_size": 2},
    "replicas": {"replicas": 2},
    "engines of four": {"tensor_parallel_size": 4},
}
LORA = LoraConfig(rank=4, dropout=0.5)
STEPS = 10


class ExactNorm(nn.Module):
    """A root-mean-square norm in the type of its input."""

    def __init__(self, weight: Tensor, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.empty_like(weight)), eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.offset + self.weight)


def in_float64(config: PretrainedConfig) -> PreTrainedModel:
    model = causal_lm(config).double()
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            eps = getattr(module, "variance_epsilon", None) or module.eps
            parent, _, own = name.rpartition(".")
            norm = ExactNorm(module.weight, eps, float("Gemma" in type(module).__name__))
            setattr(model.get_submodule(parent), own, norm)
    return model


# ----------------------------------------------------------------------------------------------- in the ranks


def in_a_rank(rank: int, folder: Path, policies: Path) -> dict[str, Any]:
    """On one rank alone; on two the ranks share all layers; on four they do other things beside."""
    ranks = torch.distributed.get_world_size()
    t = 1 if ranks == 1 else 2
    meshes: dict[str, dict[str, int]] = FOUR if ranks == 4 else {"": {}}
    found: dict[str, Any] = {
        "scores": {
            (family, mesh): scores(policies / family, tensor_parallel=t, **sizes)
            for family in FAMILIES
            for mesh, sizes in meshes.items()
        },
        "steps": {mesh: steps(policies / "qwen3", t, sizes) for mesh, sizes in meshes.items() if "engines" not in mesh},
        "values": values(policies / "qwen3", t),
    }
    if ranks == 4:
        found["slices"] = {
            (t, engine): slices(policies / "llama", t, engine) for t, engine in itertools.product((2, 4), (1, 2, 4))
        }
        return found
    found["adapted"] = scores(policies / "llama", tensor_parallel=t, lora=LORA)
    found["recomputed"] = scores(policies / "llama", tensor_parallel=t, lora=LORA, activation_checkpointing=True)
    found["bfloat16"] = log_probs_in(policies / "qwen3", torch.bfloat16, t)
    found["lora steps"] = steps(policies / "qwen3", t, {}, lora={"rank": 4})
    if ranks == 2:
        found["exported"] = exported(policies / "qwen2")
        found["refused"] = {name: refusal(policies / name) for name in ("mixture", "gpt-neox", "one kv head")}
        found["refused output layer"] = refusal(policies / "llama", lora=LoraConfig(target_modules=["lm_head"]))
    return found


def scores(policy: Path, lora: LoraConfig | None = None, activation_checkpointing: bool = False, **sizes: int) -> Any:
    """Log-probabilities, entropies, and whole gradients of a weighted sum of them over the batch, in float64."""
    meshes = make_meshes("cpu", **sizes)
    how: dict[str, Any] = {"lora": lora, "activation_checkpointing": activation_checkpointing}
    model = build(policy, dtype=torch.float64, meshes=meshes, make=in_float64, **how)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(plain_name(name))))
            parameter.data.to_local().copy_(values[own_slice(parameter)])
    batch = shared_prompts()
    model.train()
    torch.manual_seed(5)
    log_probs, entropy = token_log_probs(model, batch)
    weights = torch.linspace(-1, 1, len(batch.tokens), dtype=torch.float64)
    loss = ((log_probs + 0.5 * entropy) * weights).sum()
    loss.backward()
    return {
        "loss": loss.detach(),
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "gradients": {
            plain_name(name): p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None
        },
    }


def shared_prompts() -> PackedBatch:
    """Groups of responses to one prompt, beside prompts of their own."""
    generator = torch.Generator().manual_seed(4)

    def some(count: int) -> list[int]:
        return torch.randint(1, 60, (count,), generator=generator).tolist()

    prompts = [some(length) for length in (5, 3)]
    rollouts = [Rollout(prompts[i // 3], some(2 + i), [-3.0] * (2 + i), 0.0, i // 3, 0.7 + i / 10) for i in range(6)]
    return PackedBatch.pack([*rollouts, Rollout(some(4), some(7), [-3.0] * 7, 0.0, 2)])


def steps(policy: Path, t: int, sizes: dict[str, int], **more: Any) -> dict[str, Any]:
    """Ten updates of an actor in float32: losses and norms, and the weights after them."""
    fsdp = {
        "tensor_parallel": t,
        "replicas": sizes.get("replicas", 1),
        "sequence_parallel": sizes.get("sequence_parallel_size", 1),
    }
    config = settings(fsdp=fsdp, **more)
    actor = ActorWorker(policy=policy, config=config, peers={})
    batch = some_batch()
    part = batch.select(own_part(batch, **mesh_sizes(config, actor.world_size)))
    metrics = [actor.update(part) for _ in range(STEPS)]
    reference = ReferenceWorker(policy=policy, config=config, peers={"actor": actor})
    return {
        "metrics": metrics,
        "weights": {name: whole(tensor) for name, tensor in merged_parameters(actor.model)},
        "reference": reference.log_probs(batch),
        "usage": actor.usage(),
    }


def settings(**more: Any) -> TrainConfig:
    ranks = torch.distributed.get_world_size()
    optimizer = {"learning_rate": 1e-3, "warmup_steps": 0, "max_grad_norm": 0.05}
    return TrainConfig.model_validate(
        {"ranks": ranks, "dtype": "float32", "micro_batch_tokens": 64, "optimizer": optimizer, **more}
    )


def values(policy: Path, t: int) -> dict[str, Any]:
    """Of a model with one output in place of the vocabulary: values, scores and gradients."""
    model = build_with_scalar_head(policy, dtype=torch.float32, meshes=make_meshes("cpu", tensor_parallel=t))
    with torch.no_grad():
        head = model.score.weight  # type: ignore[union-attr]
        local = torch.linspace(-1, 1, head.numel()).view(head.shape)[own_slice(head)]
        head.to_local().copy_(local)
    batch = shared_prompts()
    values, of_sequences = token_values(model, batch), sequence_scores(model, batch)
    (values.square().sum() + of_sequences.sum()).backward()
    gradients = {plain_name(name): p.grad.full_tensor() for name, p in model.named_parameters()}
    return {"values": values.detach(), "scores": of_sequences.detach(), "gradients": gradients}


def log_probs_in(policy: Path, dtype: torch.dtype, t: int) -> Tensor:
    model = build(policy, dtype=dtype, meshes=make_meshes("cpu", tensor_parallel=t))
    with torch.no_grad():
        return token_log_probs(model, shared_prompts())[0]


def slices(policy: Path, t: int, engine: int) -> bool:
    """Whether each rank holds what its place says, of every tensor, and of those cut in slices what it generates with;
    None if the model can't be cut in so many."""
    rank = torch.distributed.get_rank()
    meshes = make_meshes("cpu", tensor_parallel=t, tensor_parallel_size=engine)
    wide = policy if t == 2 else policy.with_name("llama of four")
    model = build(wide, dtype=torch.float32, meshes=meshes)
    holders = placed(model)
    for (name, shard), tensor in zip(shards(model), (tensor for _, tensor in merged_parameters(model)), strict=True):
        everything = whole(tensor)
        box = next((box for box, ranks in holders[name].shards if rank in ranks), None)
        if box is None:
            assert shard.numel() == 0
            continue
        assert torch.equal(shard, everything[tuple(slice(*span) for span in box)]), name
        assert copies_of(tensor) == len(next(ranks for own, ranks in holders[name].shards if own == box))
        column = ".o_proj.weight" in name or ".down_proj.weight" in name
        if column or any(part in name for part in ("q_proj.weight", "gate_proj.weight", "up_proj.weight")):
            dim = int(column)
            width = everything.shape[dim] // engine
            assert {index // width for index in range(*box[dim])} == {rank % engine}, (name, box)
    return True


def exported(policy: Path) -> bool:
    out = policy.with_name("exported")
    if torch.distributed.get_rank() == 0:
        out.mkdir()
    meshes = make_meshes("cpu", tensor_parallel=2)
    export(build(policy, dtype=torch.float32, meshes=meshes), policy, out, file_bytes=20_000)
    return True


def refusal(policy: Path, **how: Any) -> str:
    try:
        build(policy, dtype=torch.float32, meshes=make_meshes("cpu", tensor_parallel=2), **how)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def whole(tensor: Any) -> Tensor:
    """A copy of the values, which go on changing."""
    return whole_tensor(tensor.detach()).clone()


def kept(rank: int, folder: Path, home: Path, t: int, start: str | None, save: str) -> dict[str, Any]:
    """An actor that goes on from the checkpoint ``start``, or the policy, takes a step and is saved."""
    config = settings(fsdp={"tensor_parallel": t})
    actor = ActorWorker(policy=home / "qwen3", config=config, peers={})
    if start is not None:
        load(home / start / name_of(1), "actor", actor.model, actor.optimizer, actor.schedule)
    found = {"loaded": state(actor)}
    batch = some_batch()
    actor.update(batch.select(own_part(batch, **mesh_sizes(config, actor.world_size))))
    found["after"] = state(actor)
    if rank == 0:
        begin_aside(home / save, 1, "{}")
    torch.distributed.barrier()
    actor.save_checkpoint(aside_of(home / save, 1) / "actor", step=1)
    assert [saved.error for saved in actor.saved(True)] == [None]
    if rank == 0:
        make_whole(home / save, 1)
    torch.distributed.barrier()
    return found


def state(actor: ActorWorker) -> dict[str, Tensor]:
    """Weights and moments, whole."""
    found = {plain_name(name): whole(tensor) for name, tensor in held(actor.model)}
    for name, parameter in actor.model.named_parameters():
        for key, value in actor.optimizer.state[parameter].items():
            found[f"{plain_name(name)} {key}"] = whole(value)
    return found


# ------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies")
    torch.manual_seed(3)
    wide = {**COMMON, "num_key_value_heads": 4}
    other = {
        "llama of four": LlamaConfig(**wide),
        "one kv head": LlamaConfig(**{**COMMON, "num_key_value_heads": 1}),
    }
    for name, config in (FAMILIES | other).items():
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.2)
        model.save_pretrained(folder / name)
    mixture().save_pretrained(folder / "mixture")
    gpt_neox().save_pretrained(folder / "gpt-neox")
    return folder


def run(count: int, function: Callable[..., Any], tmp: pytest.TempPathFactory, *arguments: Any) -> list[Any]:
    return run_ranks(count, function, tmp.mktemp("ranks"), *arguments)


@pytest.fixture(scope="module")
def one(policies: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = run(1, in_a_rank, tmp_path_factory, policies)[0]
    return found


@pytest.fixture(scope="module")
def two(policies: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(2, in_a_rank, tmp_path_factory, policies)


@pytest.fixture(scope="module")
def four(policies: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(4, in_a_rank, tmp_path_factory, policies)


def same_scores(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["gradients"].keys() == expected["gradients"].keys()
    for key in ("loss", "log_probs", "entropy"):
        torch.testing.assert_close(found[key], expected[key], atol=1e-12, rtol=1e-12, msg=key)
    for name, gradient in expected["gradients"].items():
        bar = 1e-12 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found["gradients"][name], gradient, atol=bar, rtol=0, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_what_one_does_in_float64(
    one: dict[str, Any], two: list[dict[str, Any]], family: str
) -> None:
    for rank in two:
        same_scores(rank["scores"][family, ""], one["scores"][family, ""])


@pytest.mark.long
@pytest.mark.parametrize("mesh", FOUR)
@pytest.mark.parametrize("family", FAMILIES)
def test_four_ranks_compute_what_one_does_in_float64(
    one: dict[str, Any], four: list[dict[str, Any]], family: str, mesh: str
) -> None:
    for rank in four:
        same_scores(rank["scores"][family, mesh], one["scores"][family, ""])


@pytest.mark.parametrize("how", ["adapted", "recomputed"])
def test_adapters_and_their_dropout_are_those_of_one_rank(
    one: dict[str, Any], two: list[dict[str, Any]], how: str
) -> None:
    for rank in two:
        same_scores(rank[how], one["adapted"])


def test_ten_steps_end_where_one_rank_ends(
    one: dict[str, Any], two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    expected = one["steps"][""]
    assert any(m["grad_norm"] > 0.05 for m in expected["metrics"]), "some gradients must be clipped"
    for rank in (*two, *four):
        for found in rank["steps"].values():
            same_steps(found, expected)


def test_ten_steps_of_adapters_end_where_one_rank_ends(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for rank in two:
        same_steps(rank["lora steps"], one["lora steps"])


def same_steps(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-4)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, atol=1e-5, rtol=0, msg=name)
    torch.testing.assert_close(found["reference"], expected["reference"], atol=1e-5, rtol=0)


def test_the_ranks_of_a_group_count_the_same_sequences(one: dict[str, Any], four: list[dict[str, Any]]) -> None:
    for mesh, parts in {"fsdp": 2, "ulysses": 4, "replicas": 2}.items():
        rows = sum(rank["steps"][mesh]["usage"].rows for rank in four)
        assert rows == parts * one["steps"][""]["usage"].rows


def test_a_head_of_one_output_reads_the_same_values(
    one: dict[str, Any], two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    for rank in (*two, *four):
        for key in ("values", "scores"):
            torch.testing.assert_close(rank["values"][key], one["values"][key], atol=1e-5, rtol=1e-5)
        for name, gradient in one["values"]["gradients"].items():
            bar = 2e-5 * float(gradient.abs().max()) + 1e-6
            torch.testing.assert_close(rank["values"]["gradients"][name], gradient, atol=bar, rtol=1e-4, msg=name)


def test_in_bfloat16_log_probs_differ_by_rounding(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    exact = one["scores"]["qwen3", ""]["log_probs"]
    alone, shared = (float((found["bfloat16"] - exact).abs().max()) for found in (one, two[0]))
    assert 0 < shared < 2 * alone


def test_each_rank_holds_a_part_of_what_it_generates_with(four: list[dict[str, Any]]) -> None:
    for rank in four:
        assert all(rank["slices"].values())


def test_an_export_is_its_parent_again(policies: Path, two: list[dict[str, Any]]) -> None:
    from safetensors.torch import load_file

    assert two[0]["exported"]
    before, after = stored_in(policies / "qwen2"), stored_in(policies / "exported")
    assert before.keys() == after.keys()
    for key, path in before.items():
        assert torch.equal(load_file(after[key])[key], load_file(path)[key]), key


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("mixture", "mixtures of experts are not"),
        ("gpt-neox", "model_type 'gpt_neox' is not one of llama"),
        ("one kv head", "it does not divide num_key_value_heads=1"),
    ],
)
def test_what_can_not_be_cut_is_refused_by_name(two: list[dict[str, Any]], policy: str, why: str) -> None:
    refused = two[0]["refused"][policy]
    assert refused.startswith("train.fsdp.tensor_parallel=2 is not for ")
    assert why in refused


def test_adapters_of_the_output_layer_are_refused(two: list[dict[str, Any]]) -> None:
    assert "its output layer has adapters" in two[0]["refused output layer"]


@pytest.mark.long
def test_a_checkpoint_goes_on_with_other_sizes(policies: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tensor-parallel on two ranks, then one rank, four tensor-parallel, two without, two tensor-parallel again."""
    turns = [(2, 2), (1, 1), (4, 2), (2, 1), (2, 2)]
    before: str | None = None
    after: dict[str, Tensor] | None = None
    for turn, (ranks, t) in enumerate(turns):
        found = run(ranks, kept, tmp_path_factory, policies, t, before, f"turn {turn}")
        for rank in found:
            for name, value in (after or {}).items():
                assert torch.equal(rank["loaded"][name], value), name
        before, after = f"turn {turn}", found[0]["after"]
    alone = run(1, several, tmp_path_factory, policies, len(turns))[0]
    assert after is not None
    for name, value in alone.items():
        torch.testing.assert_close(after[name], value, atol=1e-5, rtol=1e-4, msg=name)


def several(rank: int, folder: Path, home: Path, count: int) -> dict[str, Tensor]:
    actor = ActorWorker(policy=home / "qwen3", config=settings(), peers={})
    for _ in range(count):
        actor.update(some_batch())
    return state(actor)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"ranks": 3, "fsdp": {"tensor_parallel": 2}}, "tensor_parallel=2 does not divide the 3 ranks"),
        ({"ranks": 4, "fsdp": {"tensor_parallel": 4, "replicas": 2}}, "does not divide the 2 ranks of a replica"),
        ({"ranks": 6, "fsdp": {"tensor_parallel": 3}, "rollout": {"tensor_parallel_size": 2}}, "neither divides"),
        ({"ranks": 4, "fsdp": {"tensor_parallel": 2, "sequence_parallel": 4}}, "sequence_parallel=4 times"),
    ],
)
def test_sizes_that_do_not_suit_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TrainConfig.model_validate(settings)
