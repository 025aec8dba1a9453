"""Adapters over weights in NF4 (QLoRA), in two ranks over gloo and in one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from tests.train.ranks import found_by, run_ranks, save_part
from tests.train.tiny_models import gpt2, own_part, plain_log_probs, qwen3, some_batch
from train.batch.packed import PackedBatch
from train.config.sections import LoraConfig
from train.config.training import TrainConfig
from train.model.fsdp import build, skeleton
from train.model.hf_io import own_slice, plain_name, remember_names, whole_tensor
from train.model.lora import add_adapters, merged_parameters
from train.model.low_precision.nf4 import base_weights, is_packed, unpacked
from train.model.mesh import make_meshes
from train.workers.actor import ActorWorker
from train.workers.critic import CriticWorker
from train.workers.reference import ReferenceWorker

pytest.importorskip("peft")

LORA = {"rank": 3, "alpha": 6, "base": "nf4", "publish_adapter": True}
FLAT = "model.layers.1.self_attn.q_proj.weight"
CODES = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
CODES += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
"""QLoRA, appendix E."""


# ----------------------------------------------------------------------------------------------- in the ranks


def whole(tensor: Tensor) -> Tensor:
    return whole_tensor(tensor.detach()).clone()


def actor_of(policy: Path, ranks: int, **settings: Any) -> ActorWorker:
    config = {
        "ranks": ranks,
        "dtype": "float32",
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0, "max_grad_norm": 1e9},
        "lora": LORA,
        **settings,
    }
    return ActorWorker(policy=policy, config=TrainConfig.model_validate(config), peers={})


def fill_adapters(model: Any) -> None:
    """Values for B, which begins as zero, that depend on the parameter's name alone."""
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            seed = sum(plain_name(name).encode())
            values = 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data.to_local().copy_(values[own_slice(parameter)])


def a_run(rank: int, policy: Path, ranks: int, **settings: Any) -> dict[str, Any]:
    """An update; before it the whole base, and what the reference, the engine and the store get."""
    actor = actor_of(policy, ranks, **settings)
    reference = ReferenceWorker(policy=policy, config=actor.config, peers={"actor": actor})
    base = {name: whole(t) for name, t in merged_parameters(actor.model)}
    fill_adapters(actor.model)
    adapters = {plain_name(n): whole(p) for n, p in actor.model.named_parameters() if p.requires_grad}
    kept: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        trained = ((n, p) for n, p in actor.model.named_parameters() if p.grad is not None)
        kept.update({plain_name(name): whole(p.grad) for name, p in trained})

    actor.optimizer.register_step_pre_hook(keep)
    batch = some_batch()
    part = own_part(batch)
    mine = batch.select(part)
    out = policy.with_name(f"{policy.name} candidate of {ranks}") / "merged"
    out.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    actor.export(out)
    packed = [p for p in actor.model.parameters() if is_packed(p)]
    found = {
        "base": base,
        "adapters": adapters,
        "tokens": batch.token_index(part),
        "reference": reference.log_probs(mine),
        "shared": reference.model is actor.model,
        "log_probs": actor.log_probs(mine),
        "merged": {name: whole(t) for name, t in merged_parameters(actor.model)},
        "packed": len(packed),
        "bytes": sum(bytes_of(p) for p in packed) / sum(p.numel() for p in packed),
    }
    metrics = actor.update(mine)
    return {**found, "metrics": metrics, "gradients": kept}


def bytes_of(packed: Any) -> int:
    """What this rank holds of a weight, over the share of it that it has."""
    local = packed.to_local() if hasattr(packed, "to_local") else packed
    parts = (local.quantized_data, local.quantized_scalers, local.quantization_factor)
    return sum(part.nbytes for part in parts) * packed.numel() // local.numel()


def updated(actor: ActorWorker) -> dict[str, float]:
    batch = some_batch()
    return actor.update(batch.select(own_part(batch)))


def state(actor: ActorWorker) -> dict[str, Tensor]:
    return {plain_name(n): whole(p) for n, p in actor.model.named_parameters() if p.requires_grad}


def saved(policy: Path, folder: Path) -> dict[str, Any]:
    actor = actor_of(policy, 2)
    updated(actor)
    ended = save_part(actor, "actor", folder, 1)
    at_save = state(actor)
    return {"error": ended.error, "state": at_save, "next": updated(actor), "after": state(actor)}


def gone_on(policy: Path, folder: Path, ranks: int) -> dict[str, Any]:
    actor = actor_of(policy, ranks)
    actor.load_checkpoint(folder / "step-00000001", part="actor")
    return {"state": state(actor), "next": updated(actor), "after": state(actor)}


def a_critic(policy: Path) -> dict[str, Any]:
    lora = {"rank": 3, "base": "nf4"}
    config = {
        "ranks": 2,
        "dtype": "bfloat16",
        "algorithm": {"name": "ppo", "critic": {"lora": lora, "learning_rate": 1e-2}},
        "optimizer": {"warmup_steps": 0},
    }
    critic = CriticWorker(policy=policy, config=TrainConfig.model_validate(config), peers={})
    batch = some_batch()
    mine = batch.select(own_part(batch))
    mine = mine.with_(values=critic.values(mine), returns=mine.advantages)
    return {
        "losses": [critic.update(mine)["value_loss"] for _ in range(6)],
        "trained": {plain_name(n) for n, p in critic.model.named_parameters() if p.requires_grad},
        "packed": sum(is_packed(p) for p in critic.model.parameters()),
    }


def flat_weight(policy: Path) -> Tensor:
    model = build(policy, dtype=torch.float32, lora=LoraConfig(base="nf4"))
    return {name: whole(t) for name, t in merged_parameters(model)}[FLAT]


def in_two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    replicas = make_meshes("cpu", replicas=2)
    whole_on_each = build(folder / "qwen3", dtype=torch.float32, meshes=replicas, lora=LoraConfig(base="nf4"))
    return {
        "run": a_run(rank, folder / "qwen3", 2),
        "recomputed": a_run(rank, folder / "again", 2, activation_checkpointing=True, micro_batch_tokens=16),
        "whole on each": {name: whole(t) for name, t in merged_parameters(whole_on_each)},
        "saved": saved(folder / "qwen3", folder / "checkpoints"),
        "again": gone_on(folder / "qwen3", folder / "checkpoints", 2),
        "critic": a_critic(folder / "qwen3"),
        "flat": flat_weight(folder / "flat"),
    }


def in_one_rank(rank: int, folder: Path) -> dict[str, Any]:
    policy = folder.parent / "qwen3"
    return {"run": a_run(rank, policy, 1), "of two": gone_on(policy, folder.parent / "checkpoints", 1)}


# ------------------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nf4")
    torch.manual_seed(3)
    model = qwen3()
    for name in ("qwen3", "again", "flat"):
        model.save_pretrained(folder / name)
    file = folder / "flat" / "model.safetensors"
    tensors = load_file(file)
    tensors[FLAT] = torch.full((32, 32), -0.25)
    save_file(tensors, file, metadata={"format": "pt"})
    run_ranks(2, in_two_ranks, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return found_by(2, folder)


@pytest.fixture(scope="module")
def alone(folder: Path, found: list[dict[str, Any]]) -> dict[str, Any]:
    (folder / "alone").mkdir()
    [seen] = run_ranks(1, in_one_rank, folder / "alone")
    return seen


@pytest.fixture
def runs(found: list[dict[str, Any]], alone: dict[str, Any]) -> list[dict[str, Any]]:
    return [found[0]["run"], found[1]["run"], found[0]["recomputed"], found[1]["recomputed"], alone["run"]]


def targets(weights: dict[str, Tensor]) -> set[str]:
    return {name for name in weights if ".layers." in name and name.endswith("_proj.weight")}


def test_each_weight_is_the_nearest_of_sixteen_values_of_its_block_and_all_else_is_as_stored(
    folder: Path, runs: list[dict[str, Any]]
) -> None:
    stored = load_file(folder / "qwen3" / "model.safetensors")
    codes = torch.tensor(CODES, dtype=torch.float64)
    middles = (codes[1:] + codes[:-1]) / 2
    for seen in runs:
        assert seen["packed"] == len(targets(stored)) == 14
        for name, weight in stored.items():
            if name not in targets(stored):
                assert torch.equal(seen["base"][name], weight), name
                continue
            blocks = weight.double().view(-1, 64)
            largest = blocks.abs().amax(1, keepdim=True)
            expected = codes[torch.bucketize(blocks / largest, middles)] * largest
            # The scales are rounded too, to 8 bits between the least and the greatest.
            spread = float(largest.max() - largest.min())
            torch.testing.assert_close(
                seen["base"][name].double().view(-1, 64), expected, atol=spread / 128, rtol=1e-5, msg=name
            )


def test_a_value_takes_half_a_byte_and_its_share_of_the_scales(runs: list[dict[str, Any]]) -> None:
    for seen in runs:
        assert 0.5 + 1 / 64 < seen["bytes"] < 0.54  # scales of few blocks: these weights are tiny


def by_a_plain_loop(folder: Path, seen: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of the whole batch, and gradients of GRPO's loss, of whole merged weights in float64."""
    from train.algorithms import load

    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float64)
    adapters = {name: t.double().requires_grad_() for name, t in seen["adapters"].items()}
    merged = {name: tensor.double() for name, tensor in seen["base"].items()}
    for name in targets(merged):
        a, b = (adapters[f"{name.removesuffix('.weight')}.lora_{side}.default.weight"] for side in "AB")
        merged[name] = merged[name] + LORA["alpha"] / LORA["rank"] * b @ a  # type: ignore[operator]
    batch: PackedBatch = some_batch()
    log_probs = torch.zeros(len(batch.tokens), dtype=torch.float64)
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.tokens[start:end]
        logits = functional_call(model, merged, (tokens[None],)).logits[0, :-1]
        scored = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        log_probs = log_probs.index_put((torch.arange(start + 1, end),), scored)
    log_probs = log_probs * batch.response_mask
    algorithm = load(TrainConfig().algorithm)
    loss, _ = algorithm.loss(log_probs, batch.with_(entropy=torch.zeros(len(batch.tokens))))
    (loss / algorithm.count(batch)).backward()
    return log_probs.detach(), {name: tensor.grad for name, tensor in adapters.items()}  # type: ignore[misc]


def test_logprobs_and_gradients_are_those_of_a_plain_loop_over_the_rounded_weights(
    folder: Path, runs: list[dict[str, Any]]
) -> None:
    for seen in runs:
        log_probs, gradients = by_a_plain_loop(folder, seen)
        torch.testing.assert_close(seen["log_probs"].double(), log_probs[seen["tokens"]], atol=2e-5, rtol=0)
        assert seen["gradients"].keys() == gradients.keys()
        assert len(gradients) == 2 * 14
        for name, gradient in gradients.items():
            assert gradient.any(), name
            torch.testing.assert_close(seen["gradients"][name].double(), gradient, atol=2e-6, rtol=1e-3, msg=name)


def test_the_reference_is_the_rounded_parent_and_generation_gets_what_was_trained(
    folder: Path, runs: list[dict[str, Any]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32)
    exact = plain_log_probs(model, some_batch()).detach()
    for seen in runs:
        assert seen["shared"]
        for weights, log_probs in ((seen["base"], seen["reference"]), (seen["merged"], seen["log_probs"])):
            model.load_state_dict(weights, strict=False)
            expected = plain_log_probs(model, some_batch()).detach()[seen["tokens"]]
            torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
        assert float((seen["reference"] - exact[seen["tokens"]]).abs().max()) > 1e-3, "rounding must have been seen"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_published_is_the_stored_parent_with_the_adapters(
    folder: Path, found: list[dict[str, Any]], alone: dict[str, Any], ranks: int
) -> None:
    from peft import PeftModel

    seen = alone["run"] if ranks == 1 else found[0]["run"]
    out = folder / f"qwen3 candidate of {ranks}"
    published = load_file(out / "merged" / "model.safetensors")
    stored = load_file(folder / "qwen3" / "model.safetensors")
    assert published.keys() == stored.keys()
    for name in targets(stored):
        learned = seen["merged"][name].double() - seen["base"][name].double()
        torch.testing.assert_close(published[name].double() - stored[name].double(), learned, atol=1e-6, rtol=0)
    base = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, out / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    with torch.no_grad():
        expected = plain_log_probs(adapted, some_batch())
        torch.testing.assert_close(plain_log_probs(merged, some_batch()), expected, atol=1e-5, rtol=0)


def test_replicas_that_hold_all_of_it_hold_the_same(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for ranks_own in found:
        for name, weight in ranks_own["whole on each"].items():
            assert torch.equal(weight, alone["run"]["base"][name]), name


def test_a_run_goes_on_from_a_checkpoint_bit_for_bit_and_on_one_rank_too(
    found: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    for ranks_own in found:
        went_on, again = ranks_own["saved"], ranks_own["again"]
        assert went_on["error"] is None
        assert went_on["next"] == again["next"]
        for key in ("state", "after"):
            assert all(torch.equal(went_on[key][name], again[key][name]) for name in went_on[key])
    before, after = found[0]["saved"], alone["of two"]
    assert all(torch.equal(before["state"][name], after["state"][name]) for name in before["state"])
    # Scales are rounded in groups, which more ranks may cut smaller: the bases differ by as much.
    assert after["next"]["loss"] == pytest.approx(before["next"]["loss"], abs=1e-3)


def test_a_critic_learns_by_adapters_over_a_body_in_nf4(found: list[dict[str, Any]]) -> None:
    for ranks_own in found:
        seen = ranks_own["critic"]
        assert seen["packed"] == 14
        assert seen["losses"][-1] < seen["losses"][0]
        assert len(seen["trained"]) == 2 * 14 + 1


def test_a_weight_of_one_value_keeps_it(found: list[dict[str, Any]]) -> None:
    for ranks_own in found:
        assert torch.equal(ranks_own["flat"], torch.full((32, 32), -0.25))


def adapted(make: Any, folder: Path) -> Any:
    original = make()
    original.save_pretrained(folder)
    model = skeleton(original.config)
    remember_names(model, folder)
    add_adapters(model, LoraConfig(base="nf4"))
    return model


def test_weights_that_can_not_be_shared_out_or_multiplied_are_refused_by_name(tmp_path: Path) -> None:
    model = adapted(qwen3, tmp_path / "qwen3")
    assert len(base_weights(model, 4, "train.lora.base=nf4")) == 14
    for shards in (3, 32):  # no whole rows; rows of half a block
        message = rf"train\.lora\.base=nf4: .* of 32 times 32 .*to {shards} ranks.*train\.ranks"
        with pytest.raises(ValueError, match=message):
            base_weights(model, shards, "train.lora.base=nf4")
    with pytest.raises(ValueError, match=r"base=nf4: transformer\.h\.0\.attn\.c_attn\.weight is of Conv1D"):
        base_weights(adapted(gpt2, tmp_path / "gpt2"), 1, "train.lora.base=nf4")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 2, "fsdp": {"tensor_parallel": 2}}, r"can't be cut.*train\.fsdp\.tensor_parallel=2"),
        ({"fsdp": {"cpu_offload": True}}, r"stay on their device; take out train\.fsdp\.cpu_offload=True"),
        ({"fsdp": {"compile_layers": "inductor"}}, r"take out train\.fsdp\.compile_layers=inductor"),
        ({"fp8": {"training": "rowwise"}}, r"unpacked to train\.dtype; take out train\.fp8\.training=rowwise"),
    ],
)
@pytest.mark.parametrize("whose", ["train.lora", "train.algorithm.critic.lora"])
def test_settings_that_can_not_be_had_together_are_refused_by_name(
    settings: dict[str, Any], message: str, whose: str
) -> None:
    lora = {"base": "nf4"}
    adapters = {"lora": lora} if whose == "train.lora" else {"algorithm": {"name": "ppo", "critic": {"lora": lora}}}
    with pytest.raises(ValidationError, match=rf"{whose}\.base=nf4: weights of 4 bits .*{message}"):
        TrainConfig.model_validate({**adapters, **settings})


def test_a_base_that_torchao_has_not_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"lora\.base[\s\S]*nf4"):
        TrainConfig.model_validate({"lora": {"base": "int4"}})


def test_what_is_not_packed_is_taken_as_it_is() -> None:
    weight = torch.ones(2, 2)
    assert unpacked(weight) is weight
    assert not is_packed(weight)
