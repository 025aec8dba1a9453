"""Mixtures of experts, which checkpoints store one by one: read in shards, trained, exported as they were stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import Chunk, Transpose, WeightConverter

from tests.train.ranks import run_ranks
from tests.train.tiny_models import SIZES, own_part, some_batch
from train.export.model_folder import export
from train.model import hf_io
from train.model.fsdp import build, causal_lm, skeleton, token_log_probs
from train.model.hf_io import held, own_slice, plain_name, stored_in, whole_tensor
from train.weight_sync.fsdp_shards import placed, shards

COMMON = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3-moe": Qwen3MoeConfig(**COMMON, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    # Fewer than ranks would share evenly; a layer without experts.
    "three experts": Qwen3MoeConfig(
        **COMMON, moe_intermediate_size=16, num_experts=3, num_experts_per_tok=2, mlp_only_layers=[0]
    ),
    # Experts are stored under other names than transformers has for the layer.
    "mixtral": MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    # All experts of a layer are stored in one tensor.
    "gpt-oss": GptOssConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
}
STEPS = 5


def in_float64(config: PretrainedConfig) -> PreTrainedModel:
    model = causal_lm(config).double()
    model.set_experts_implementation("eager")  # torch's product of groups has no float64
    return model


def in_a_rank(rank: int, folder: Path, policies: Path) -> dict[str, Any]:
    return {name: a_mixture(policies / name, folder / f"{name} exported") for name in CONFIGS} | {
        "refused": refused(lambda: build(policies / "lacking", dtype=torch.float32)),
    }


def a_mixture(policy: Path, exported: Path) -> dict[str, Any]:
    model = build(policy, dtype=torch.float64, make=in_float64)
    loaded = {plain_name(name): (own_slice(t), local_part(t)) for name, t in held(model)}
    of_rank = {
        name: (place, part.clone())
        for (name, place), (_, part) in zip(placed(model).items(), shards(model), strict=True)
    }
    assert list(of_rank) == [name for name, _ in shards(model)]
    if torch.distributed.get_rank() == 0:
        exported.mkdir()
    export(model, policy, exported, file_bytes=20_000)
    batch = some_batch()
    part = batch.select(own_part(batch))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        log_probs, entropy = token_log_probs(model, part)
        # FSDP takes the mean over ranks.
        loss = -(log_probs + 0.1 * entropy).sum() / 50 * torch.distributed.get_world_size()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = {plain_name(name): whole_tensor(t.detach()) for name, t in held(model)}
    return {"loaded": loaded, "shards": of_rank, "trained": trained, "exported": exported}


def local_part(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach().clone()


def refused(make: Callable[[], Any]) -> str:
    try:
        make()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


# ------------------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies")
    torch.manual_seed(5)
    for name, config in CONFIGS.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    (folder / "lacking").mkdir()
    tensors = load_file(folder / "qwen3-moe" / "model.safetensors")
    assert "model.layers.1.mlp.experts.2.up_proj.weight" in tensors
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, folder / "lacking" / "model.safetensors", metadata={"format": "pt"})
    (folder / "lacking" / "config.json").write_text((folder / "qwen3-moe" / "config.json").read_text())
    return folder


@pytest.fixture(scope="module")
def found(policies: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By the number of ranks, what each found."""
    homes = {count: tmp_path_factory.mktemp(f"{count} ranks") for count in (1, 2)}
    return {count: run_ranks(count, in_a_rank, home, policies) for count, home in homes.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_rank_reads_its_part_of_what_transformers_makes(
    found: dict[int, list[dict[str, Any]]], policies: Path, name: str
) -> None:
    whole = dict(AutoModelForCausalLM.from_pretrained(policies / name).named_parameters())
    for ranks in found.values():
        for of_rank in ranks:
            for parameter, (place, part) in of_rank[name]["loaded"].items():
                if parameter in whole:
                    assert torch.equal(part, whole[parameter].detach()[place].double()), parameter
    halves = [sum(part.numel() for _, part in rank[name]["loaded"].values()) for rank in found[2]]
    assert max(halves) < 0.55 * sum(p.numel() for p in whole.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_are_those_of_the_checkpoints_own_tensors(
    found: dict[int, list[dict[str, Any]]], policies: Path, name: str
) -> None:
    stored = load_file(policies / name / "model.safetensors")
    for ranks in found.values():
        for rank, of_rank in enumerate(ranks):
            assert set(of_rank[name]["shards"]) == set(stored)
            for key, (held_at, part) in of_rank[name]["shards"].items():
                assert held_at.shape == tuple(stored[key].shape)
                covered = sum(stored[key][tuple(slice(*span) for span in box)].numel() for box, _ in held_at.shards)
                assert covered == stored[key].numel()
                own = next((box for box, holders in held_at.shards if rank in holders), None)
                expected = stored[key].new_empty(0) if own is None else stored[key][tuple(slice(*s) for s in own)]
                assert torch.equal(part, expected.double()), key


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_is_the_checkpoint_again(found: dict[int, list[dict[str, Any]]], policies: Path, name: str) -> None:
    stored = load_file(policies / name / "model.safetensors")
    for ranks in found.values():
        files = stored_in(ranks[0][name]["exported"])
        assert files.keys() == stored.keys()
        for file in set(files.values()):
            for key, tensor in load_file(file).items():
                assert torch.equal(tensor, stored[key]), key


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_train_what_one_does(found: dict[int, list[dict[str, Any]]], name: str) -> None:
    """In float64, but for the routers' softmax and the norms, which transformers computes in float32."""
    (alone,), pair = found[1], found[2]
    first = {name: part for name, (_, part) in alone[name]["loaded"].items()}
    for rank in pair:
        for parameter, values in rank[name]["trained"].items():
            torch.testing.assert_close(values, alone[name]["trained"][parameter], rtol=0, atol=1e-6, msg=parameter)
    moved = {p: float((alone[name]["trained"][p] - first[p]).abs().max()) for p in first}
    assert all(moved[p] > 1e-5 for p in moved if "experts" in p or "router" in p or "gate" in p), moved


def test_an_expert_that_is_missing_is_refused_with_the_parameter_that_lacks_it(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    for ranks in found.values():
        for of_rank in ranks:
            assert "model.layers.1.mlp.experts.gate_up_proj" in of_rank["refused"]
            assert "are not all of its shape [4, 32, 32]" in of_rank["refused"]


def test_what_is_more_than_put_together_is_left_to_transformers(
    policies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that are stored transposed, and two layers in one tensor, as transformers knows them of other models."""
    stored = load_file(policies / "three experts" / "model.safetensors")
    expected = AutoModelForCausalLM.from_pretrained(policies / "three experts").state_dict()
    gate, up = (stored.pop(f"model.layers.0.mlp.{name}_proj.weight") for name in ("gate", "up"))
    stored["model.layers.0.mlp.both.weight"] = torch.cat([gate, up])
    down = [stored.pop(f"model.layers.1.mlp.experts.{e}.down_proj.weight") for e in range(3)]
    stored["model.layers.1.mlp.experts.turned"] = torch.stack(down).transpose(1, 2).contiguous()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    known = hf_io.get_model_conversion_mapping

    def mapping(model: PreTrainedModel) -> list[Any]:
        turned = WeightConverter("mlp.experts.turned", "mlp.experts.down_proj", [Transpose(1, 2)])
        both = WeightConverter("mlp.both.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(0)])
        return [turned, both, *known(model)]

    monkeypatch.setattr(hf_io, "get_model_conversion_mapping", mapping)
    model = skeleton(CONFIGS["three experts"])
    hf_io.remember_names(model, tmp_path)
    hf_io.load(model, tmp_path, torch.device("cpu"))
    loaded = dict(held(model))
    assert loaded.keys() == expected.keys()
    for name, values in loaded.items():
        assert torch.equal(values, expected[name]), name
    turned = ((name, values) for name, values in loaded.items() if name.endswith("experts.down_proj"))
    (again,) = hf_io.stored_tensors(model, turned)
    assert again[0] == "model.layers.1.mlp.experts.turned"
    assert torch.equal(again[1], stored[again[0]])


# ------------------------------------------------------------------------------------------------------ memory


def loading(rank: int, folder: Path, policy: Path) -> dict[str, int]:
    build(policy, dtype=torch.float32)  # what is made once, of another size
    del rank
    with most_memory() as peak:
        model = build(policy.with_name("large"), dtype=torch.float32)
    return {"peak": peak[0], "own": sum(local_part(p).nbytes for p in model.parameters())}


@contextmanager
def most_memory() -> Iterator[list[int]]:
    """Bytes of memory of this process's own, at most, beyond what there was; files that are mapped do not count."""
    began, peak, done = own_memory(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], own_memory() - began)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    yield peak
    peak[0] = max(peak[0], own_memory() - began)
    done.set()
    thread.join()


def own_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_no_rank_holds_much_more_than_its_shard_while_it_loads(policies: Path, tmp_path: Path) -> None:
    sizes = {**COMMON, "hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 64, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**{**sizes, "num_hidden_layers": 4})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(policies / "large")
    whole = 4 * sum(p.numel() for p in model.parameters())
    assert whole > 200e6
    del model
    for found in run_ranks(2, loading, tmp_path, policies / "qwen3-moe"):
        assert found["own"] < 0.51 * whole
        assert found["peak"] < 1.35 * found["own"], "one parameter of a layer beside the shard, and some room"
