"""LoRA in two ranks over gloo: what is trained, what generation and the store get, and what the reference is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.train.ranks import found_by, run_ranks
from tests.train.tiny_models import gpt2, plain_log_probs, qwen3, whole
from train.algorithms import load
from train.batch.packed import PackedBatch, Rollout
from train.config.sections import LoraConfig
from train.config.training import TrainConfig
from train.model.fsdp import build
from train.model.hf_io import stored_in
from train.model.lora import merged_parameters
from train.model.mesh import make_meshes
from train.workers.actor import ActorWorker
from train.workers.reference import ReferenceWorker

pytest.importorskip("peft")

RANKS = 2
MODELS = {"qwen3": qwen3, "gpt2 in bfloat16": gpt2}


def some_batch() -> PackedBatch:
    """Eight responses; those with a 7 in them are good."""
    generator = torch.Generator().manual_seed(2)
    rollouts = []
    for i in range(8):
        response = torch.randint(8, 60, (6,), generator=generator).tolist()
        if i % 2:
            response[3] = 7
        rollouts.append(Rollout([5, 6 + i // 4], response, [-4.2] * 6, float(i % 2), i // 4))
    batch = PackedBatch.pack(rollouts)
    return batch.with_(advantages=load(TrainConfig().algorithm).advantages(batch))


# ----------------------------------------------------------------------------------------------- in the ranks


def in_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {name: a_run(rank, folder / name) for name in MODELS}
    found["first values"] = {
        name: first_values(folder / "qwen3", **sizes)
        for name, sizes in {"in two shards": {}, "whole on each": {"replicas": 2}}.items()
    }
    found["refusals"] = {target: refusal(folder / "qwen3", target) for target in ("nothing_like_it", "lm_head", "norm")}
    return found


def a_run(rank: int, policy: Path) -> dict[str, Any]:
    """A few steps of GRPO, as a job would run them."""
    config = TrainConfig.model_validate(
        {
            "ranks": RANKS,
            "dtype": "float32" if policy.name == "qwen3" else "bfloat16",
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
            "algorithm": {"kl": {"coefficient": 0.01}},
            "activation_checkpointing": policy.name == "qwen3",
            "lora": {"rank": 3, "alpha": 6, "publish_adapter": True},
        }
    )
    actor = ActorWorker(policy=policy, config=config, peers={})
    reference = ReferenceWorker(policy=policy, config=config, peers={"actor": actor})
    batch = some_batch()
    part = batch.select([rank, rank + 2, rank + 4, rank + 6])
    before = actor.log_probs(part)
    part = part.with_(old_log_probs=before, ref_log_probs=reference.log_probs(part))
    metrics = [actor.update(part) for _ in range(4)]
    out = policy.with_name(policy.name + " candidate") / "merged"
    out.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    actor.export(out)
    return {
        "shared": reference.model is actor.model,
        "trained": {name for name, p in actor.model.named_parameters() if p.requires_grad},
        "held in": {str(p.dtype) for p in actor.model.parameters() if not p.requires_grad},
        "with gradients": sum(len(s) for s in actor.optimizer.state.values()) > 0,
        "optimized": sum(len(group["params"]) for group in actor.optimizer.param_groups),
        "before": before,
        "reference after": reference.log_probs(part),
        "after": actor.log_probs(part),
        "batch": part,
        "loss": [m["loss"] for m in metrics],
        "merged": {n: whole(t) for n, t in merged_parameters(actor.model)},
    }


def refusal(policy: Path, target: str) -> str:
    try:
        build(policy, dtype=torch.float32, lora=LoraConfig(target_modules=[target]))
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def first_values(policy: Path, **sizes: int) -> dict[str, torch.Tensor]:
    meshes = make_meshes("cpu", **sizes)
    model = build(policy, dtype=torch.float32, meshes=meshes, lora=LoraConfig(rank=3, target_modules=["o_proj"]))
    return {name: whole(p) for name, p in model.named_parameters() if ".lora_" in name}


# ------------------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    torch.manual_seed(3)
    for name, make in MODELS.items():
        make().save_pretrained(folder / name)
    run_ranks(RANKS, in_a_rank, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return found_by(RANKS, folder)


def by_transformers(model: Any, batch: PackedBatch) -> torch.Tensor:
    with torch.no_grad():
        return plain_log_probs(model, batch)


@pytest.mark.parametrize("name", MODELS)
def test_only_adapters_are_trained_and_they_start_from_the_parent(
    folder: Path, found: list[dict[str, Any]], name: str
) -> None:
    parent = AutoModelForCausalLM.from_pretrained(folder / name, dtype="auto")
    atol = 1e-5 if name == "qwen3" else 0.05
    for seen in (ranks_own[name] for ranks_own in found):
        assert all(".lora_" in n for n in seen["trained"])
        assert seen["optimized"] == len(seen["trained"]) == 2 * (14 if name == "qwen3" else 8)
        torch.testing.assert_close(seen["before"], by_transformers(parent, seen["batch"]), atol=atol, rtol=0)
        assert seen["held in"] == {"torch.float32" if name == "qwen3" else "torch.bfloat16"}


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_of_a_lora_run_is_the_actor_with_its_adapters_off(found: list[dict[str, Any]], name: str) -> None:
    for seen in (ranks_own[name] for ranks_own in found):
        assert seen["shared"]
        torch.testing.assert_close(seen["reference after"], seen["before"], atol=0, rtol=0)
        assert float((seen["after"] - seen["before"]).abs().max()) > 0.05, "training must have changed the policy"
        assert seen["loss"][-1] < seen["loss"][0]


@pytest.mark.parametrize("name", MODELS)
def test_the_merged_policy_and_the_adapter_compute_what_was_trained(
    folder: Path, found: list[dict[str, Any]], name: str
) -> None:
    from peft import PeftModel

    out = folder / f"{name} candidate"
    assert stored_in(out / "merged").keys() == stored_in(folder / name).keys()
    merged = AutoModelForCausalLM.from_pretrained(out / "merged", dtype="auto")
    base = AutoModelForCausalLM.from_pretrained(folder / name, dtype="auto")
    adapted = PeftModel.from_pretrained(base, out / "adapter")
    atol = 1e-5 if name == "qwen3" else 0.1
    for seen in (ranks_own[name] for ranks_own in found):
        torch.testing.assert_close(by_transformers(merged, seen["batch"]), seen["after"], atol=atol, rtol=0)
        torch.testing.assert_close(by_transformers(adapted, seen["batch"]), seen["after"], atol=atol, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_generation_gets_each_weight_of_the_parent_once_with_adapters_merged(
    folder: Path, found: list[dict[str, Any]], name: str
) -> None:
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, folder / f"{name} candidate" / "adapter").merge_and_unload().state_dict()
    for seen in (ranks_own[name] for ranks_own in found):
        assert seen["merged"].keys() == stored_in(folder / name).keys()
        for key, tensor in seen["merged"].items():
            torch.testing.assert_close(
                tensor, expected[key].to(tensor.dtype), atol=1e-6, rtol=1e-2 if "gpt2" in name else 1e-5
            )


def test_an_adapter_is_written_as_safetensors_only(folder: Path) -> None:
    written = {path.name for path in (folder / "qwen3 candidate" / "adapter").iterdir()}
    assert written == {"adapter_config.json", "adapter_model.safetensors"}
    tensors = load_file(folder / "qwen3 candidate" / "adapter" / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (3, 32)


def test_first_values_do_not_depend_on_how_many_shards_there_are(found: list[dict[str, Any]]) -> None:
    a, b = (found[0]["first values"][name] for name in ("in two shards", "whole on each"))
    assert a.keys() == b.keys()
    assert len(a) == 4
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], atol=0, rtol=0)
        assert bool((tensor == 0).all()) == (".lora_B." in name)
    layers = [tensor for name, tensor in a.items() if ".lora_A." in name]
    assert not torch.equal(*layers)


def test_target_modules_that_fit_nothing_are_refused_with_the_names_there_are(found: list[dict[str, Any]]) -> None:
    for ranks_own in found:
        for word in ("nothing_like_it", "down_proj", "q_proj", "all-linear"):
            assert word in ranks_own["refusals"]["nothing_like_it"]


def test_a_target_that_could_not_be_merged_is_refused(found: list[dict[str, Any]]) -> None:
    for ranks_own in found:
        assert "that of lm_head is tied" in ranks_own["refusals"]["lm_head"]
        assert "train.lora.target_modules=['norm'] fits no layer" in ranks_own["refusals"]["norm"]
