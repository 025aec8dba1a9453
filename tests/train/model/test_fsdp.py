"""The training engine in four ranks over gloo: loading, sharding, gradients, export."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from serve.policies.folder import safetensors_header
from tests.train.ranks import TIMEOUT, found_by, run_ranks
from tests.train.tiny_models import gpt2, gpt_neox, llama, mixture, plain_log_probs, qwen3, some_batch, whole
from train.algorithms import load
from train.config.sections import FsdpConfig
from train.config.training import TrainConfig
from train.export.model_folder import export
from train.model.fsdp import build
from train.model.hf_io import as_parameter, held, plain_name, stored_in
from train.model.lora import merged_parameters
from train.model.mesh import make_meshes, world_timeout
from train.workers.actor import ActorWorker

RANKS = 4
MODELS = {"qwen3": qwen3, "llama in bfloat16": llama, "gpt-neox": gpt_neox, "mixture": mixture}
DROPPING = {"gpt2 that drops": gpt2, "qwen3 that drops": qwen3}
MESHES: dict[str, dict[str, int]] = {"flat": {}, "tp2": {"tensor_parallel_size": 2}, "hsdp": {"replicas": 2}}
IDS = torch.randint(1, 60, (1, 12), generator=torch.Generator().manual_seed(1))
WHOLE = torch.arange(float(8 * 3)).reshape(8, 3)

CUTS: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "small micro-batches": {"micro_batch_tokens": 16},
    "small micro-batches, each reduced": {"micro_batch_tokens": 16, "fsdp": {"reduce_every_micro_batch": True}},
    "uneven ranks": {"micro_batch_tokens": 16, "parts": [[0, 1, 2, 3, 4, 5, 6, 7, 8], [9], [10], [11]]},
    "two replicas": {"micro_batch_tokens": 32, "fsdp": {"replicas": 2}},
    "activations recomputed": {"activation_checkpointing": True, "rollout": {"tensor_parallel_size": 2}},
    "bfloat16": {"dtype": "bfloat16"},
}


# ----------------------------------------------------------------------------------------------- in the ranks


def in_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    assert world_timeout() == TIMEOUT
    said = Said()
    logging.getLogger("train.model.fsdp").addHandler(said)
    found = {
        "meshes": {name: a_linear_layer(rank, sizes) for name, sizes in MESHES.items()},
        "models": {name: a_model(folder / name, mesh) for name, mesh in zip(MODELS, [*MESHES, "tp2"], strict=True)},
        "updates": {name: an_update(rank, folder / "qwen3", **cut) for name, cut in CUTS.items()},
        "learned and computed": [learned_and_computed(rank, folder / name) for name in DROPPING],
        "refusals": {
            "no such layers": refusal(folder / "qwen3", layers=["NoSuchLayer"]),
            "a tensor is missing": refusal(folder / "lacking"),
            "a shape differs": refusal(folder / "misshapen"),
        },
    }
    build(folder / "qwen3", dtype=torch.float32, options=FsdpConfig(cpu_offload=True, layers=["Qwen3DecoderLayer"]))
    found["said"] = said.messages
    return found


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def a_linear_layer(rank: int, sizes: dict[str, int]) -> dict[str, Any]:
    meshes = make_meshes("cpu", sequence_parallel_size=2, **sizes)
    layer = nn.Linear(3, 8, bias=False)
    with torch.no_grad():
        layer.weight.copy_(WHOLE)
    fully_shard(layer, mesh=meshes.fsdp)
    shard = layer.weight.to_local().detach().clone()
    elsewhere = as_parameter(shard.to("meta"), like=layer.weight)
    out = layer(torch.eye(3))
    (out * WHOLE.T * (rank + 1)).sum().backward()
    assert meshes.sp is not None
    return {
        "shard": shard,
        "elsewhere": elsewhere.to_local().device.type,
        "sharded alike": elsewhere.placements == layer.weight.placements and elsewhere.to_local().shape == shard.shape,
        "forward": out.detach().T,
        "gathered": layer.weight.full_tensor().detach(),
        "gradient": layer.weight.grad.full_tensor(),
        "sp": torch.distributed.get_process_group_ranks(meshes.sp),
        "timeout": meshes.sp._get_backend(torch.device("cpu")).options._timeout,
    }


def a_model(policy: Path, mesh: str) -> dict[str, Any]:
    model = build(policy, dtype=torch.float32, meshes=make_meshes("cpu", **MESHES[mesh]))
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    out = policy.with_name(policy.name + " again")
    if torch.distributed.get_rank() == 0:
        out.mkdir()
    export(model, policy, out, file_bytes=20_000)
    return {
        "logits": logits,
        "weights": {plain_name(name): whole(tensor) for name, tensor in held(model)},
        "buffers": dict(model.named_buffers()),
        "dtypes": {parameter.dtype for parameter in model.parameters()},
        "frozen": {p.dtype for p in build(policy, dtype=torch.bfloat16, frozen=True).parameters()},
    }


def an_update(rank: int, policy: Path, *, parts: list[list[int]] | None = None, **config: Any) -> dict[str, Any]:
    settings = {"ranks": RANKS, "dtype": "float32", "optimizer": {"max_grad_norm": 1e9}, **config}
    actor = ActorWorker(policy=policy, config=TrainConfig.model_validate(settings), peers={})
    kept: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        kept.update({plain_name(name): whole(p.grad) for name, p in actor.model.named_parameters()})

    actor.optimizer.register_step_pre_hook(keep)
    batch = some_batch()
    part = batch.select(batch.balanced(RANKS)[rank] if parts is None else parts[rank])
    metrics = actor.update(part)
    actor.log_probs(part)
    return {
        "gradients": kept,
        "metrics": metrics,
        "usage": [actor.usage(), actor.usage()],
        "moments": {t.dtype for s in actor.optimizer.state.values() for t in s.values() if t.ndim},
        "published": {t.dtype for _, t in merged_parameters(actor.model)},
    }


def learned_and_computed(rank: int, policy: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities by an update, and by a pass before it."""
    config = TrainConfig.model_validate({"ranks": RANKS, "dtype": "float32"})
    actor = ActorWorker(policy=policy, config=config, peers={})
    batch = some_batch()
    part = batch.select(batch.balanced(RANKS)[rank])
    computed = actor.log_probs(part)
    return actor.learn(part)[1], computed


def refusal(policy: Path, **options: Any) -> str:
    try:
        build(policy, dtype=torch.float32, options=FsdpConfig(**options))
    except ValueError as error:
        return str(error)
    return "nothing was refused"


# ------------------------------------------------------------------------------------------------------ tests


def as_a_hub_has_it(file: Path) -> None:
    """As an older transformers wrote it: this one reads it alike and would write it otherwise."""
    config = json.loads(file.read_text())
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    file.write_text(json.dumps({**config, "transformers_version": "4.43.1"}))


def without_a_dtype(file: Path) -> None:
    config = json.loads(file.read_text())
    del config["dtype"]
    file.write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policies, what each rank found, and what was exported."""
    folder = tmp_path_factory.mktemp("fsdp")
    torch.manual_seed(3)
    for name, make in MODELS.items():
        make().save_pretrained(folder / name)
    for name, make in DROPPING.items():
        model = make().float()
        for dropout in ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"):
            if hasattr(model.config, dropout):
                setattr(model.config, dropout, 0.5)
        model.save_pretrained(folder / name)
    as_a_hub_has_it(folder / "qwen3" / "config.json")
    without_a_dtype(folder / "llama in bfloat16" / "config.json")
    for name in ("lacking", "misshapen"):
        shutil.copytree(folder / "qwen3", folder / name)
        tensors = load_file(folder / name / "model.safetensors")
        norm = tensors.pop("model.norm.weight")
        if name == "misshapen":
            tensors["model.norm.weight"] = norm[:-1].clone()
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
    run_ranks(RANKS, in_a_rank, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return found_by(RANKS, folder)


@pytest.mark.parametrize(("mesh", "chunk_of"), [("flat", [0, 1, 2, 3]), ("tp2", [0, 2, 1, 3]), ("hsdp", [0, 1, 0, 1])])
def test_each_rank_has_its_chunk_and_a_layer_computes_as_a_whole_one(
    found: list[dict[str, Any]], mesh: str, chunk_of: list[int]
) -> None:
    chunks = WHOLE.chunk(max(chunk_of) + 1)
    for rank, ranks_own in enumerate(found):
        seen = ranks_own["meshes"][mesh]
        torch.testing.assert_close(seen["shard"], chunks[chunk_of[rank]], atol=0, rtol=0)
        torch.testing.assert_close(seen["forward"], WHOLE, atol=0, rtol=0)
        torch.testing.assert_close(seen["gathered"], WHOLE, atol=0, rtol=0)
        torch.testing.assert_close(seen["gradient"], WHOLE * 2.5)  # the mean over ranks of rank + 1


@pytest.mark.parametrize("mesh", MESHES)
def test_a_shard_stays_where_it_lies_also_where_the_mesh_has_no_devices(found: list[dict[str, Any]], mesh: str) -> None:
    """As with train.fsdp.cpu_offload on a GPU: FSDP refuses shards that are on the device then."""
    for ranks_own in found:
        assert ranks_own["meshes"][mesh]["elsewhere"] == "meta"
        assert ranks_own["meshes"][mesh]["sharded alike"]


def test_a_sequence_parallel_group_is_consecutive_ranks_with_the_jobs_timeout(found: list[dict[str, Any]]) -> None:
    for rank, ranks_own in enumerate(found):
        seen = ranks_own["meshes"]["flat"]
        assert seen["sp"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert seen["timeout"] == TIMEOUT


def test_training_drops_nothing_of_a_policy_whose_config_would(found: list[dict[str, Any]]) -> None:
    for ranks_own in found:
        for learned, computed in ranks_own["learned and computed"]:
            torch.testing.assert_close(learned, computed, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_slices_read_into_shards_make_the_model_that_transformers_loads(
    folder: Path, found: list[dict[str, Any]], name: str
) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    with torch.no_grad():
        logits = expected(input_ids=IDS).logits
    for ranks_own in found:
        seen = ranks_own["models"][name]
        assert seen["dtypes"] == {torch.float32}, "master weights are float32 whatever is stored"
        assert seen["frozen"] == {torch.bfloat16}, "weights that only compute need no master"
        assert seen["weights"].keys() == dict(held(expected)).keys()
        for key, tensor in held(expected):
            torch.testing.assert_close(seen["weights"][key], tensor.detach(), atol=0, rtol=0, msg=key)
        for key, buffer in expected.named_buffers():
            torch.testing.assert_close(seen["buffers"][key], buffer, atol=0, rtol=0, msg=key)
        torch.testing.assert_close(seen["logits"], logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_an_export_in_files_of_bounded_size_is_its_parent_again(folder: Path, name: str) -> None:
    out = folder / f"{name} again"
    before, after = stored_in(folder / name), stored_in(out)
    assert before.keys() == after.keys(), "a published policy must name the tensors that its parent names"
    files = sorted(set(after.values()))
    assert len(files) > 1
    assert not list(out.glob("*.new"))
    for file in files:
        sizes = [e["data_offsets"][1] - e["data_offsets"][0] for e in safetensors_header(file).values()]
        assert sum(sizes) <= 20_000 or len(sizes) == 1
    for key, path in before.items():
        stored = load_file(path)[key]
        torch.testing.assert_close(load_file(after[key])[key], stored, atol=0, rtol=0)  # the dtype too
    a, b = ((f / "config.json").read_bytes() for f in (folder / name, out))
    assert a == b, "what decides how a policy answers, besides its weights, is its parent's, byte by byte"
    assert {file.name for file in out.iterdir()} - {file.name for file in files} == {
        "config.json",
        "model.safetensors.index.json",
    }, "how it generates is the parent's to say, which is copied"


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """Loss and gradients of the whole batch, one sequence at a time, in a model that is not sharded."""
    batch = some_batch()
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32)
    log_probs = plain_log_probs(model, batch)
    algorithm = load(TrainConfig().algorithm)
    loss = algorithm.loss(log_probs, batch)[0] / algorithm.count(batch)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": float(loss.detach()), "gradients": gradients}


@pytest.mark.parametrize("cut", CUTS)
def test_what_an_update_computes_is_counted_once_however_it_is_cut(found: list[dict[str, Any]], cut: str) -> None:
    usages = [ranks_own["updates"][cut]["usage"] for ranks_own in found]
    batch = some_batch()
    lengths = [int(n) - 1 for n in batch.lengths]  # no prompt comes twice, and a last token is not computed
    assert sum(first.rows for first, _ in usages) == sum(lengths)
    assert sum(first.scored for first, _ in usages) == int(batch.response_mask.sum())
    assert sum(first.pairs for first, _ in usages) == sum(n * n / 2 for n in lengths)
    for first, second in usages:
        assert first.seconds > 0
        assert first.peak_memory > 2**20
        assert (second.seconds, second.rows) == (0, 0)


@pytest.mark.parametrize("cut", [name for name in CUTS if name != "bfloat16"])
def test_loss_and_gradients_do_not_depend_on_how_the_batch_is_cut(
    found: list[dict[str, Any]], expected: dict[str, Any], cut: str
) -> None:
    for ranks_own in found:
        seen = ranks_own["updates"][cut]
        assert seen["metrics"]["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert seen["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            torch.testing.assert_close(seen["gradients"][name], gradient, atol=1e-6, rtol=1e-4, msg=name)
        norm = torch.cat([g.flatten() for g in expected["gradients"].values()]).norm()
        assert seen["metrics"]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_in_bfloat16_gradients_and_optimizer_are_float32_and_close_to_those_of_float32(
    found: list[dict[str, Any]], expected: dict[str, Any]
) -> None:
    seen = found[0]["updates"]["bfloat16"]
    assert seen["moments"] == {torch.float32}
    assert seen["published"] == {torch.float32}, "a forward pass must not leave compute weights where masters are asked"
    assert {g.dtype for g in seen["gradients"].values()} == {torch.float32}
    a, b = (
        torch.cat([g[n].flatten() for n in expected["gradients"]]) for g in (seen["gradients"], expected["gradients"])
    )
    assert float(torch.cosine_similarity(a, b, dim=0)) > 0.99
    assert not torch.equal(a, b)


def test_a_wrong_layer_or_tensor_is_named_with_what_there_is(found: list[dict[str, Any]]) -> None:
    for ranks_own in found:
        said = ranks_own["refusals"]
        for word in ("NoSuchLayer", "Qwen3DecoderLayer", "train.fsdp.layers"):
            assert word in said["no such layers"]
        assert "model.norm.weight" in said["a tensor is missing"]
        assert "model.norm.weight has shape [31]; the model's is [32]" in said["a shape differs"]


def test_what_is_in_use_is_said_once_by_rank_0(found: list[dict[str, Any]]) -> None:
    said = found[0]["said"]
    assert len(said) == len(set(said))
    assert any("attention of Qwen3ForCausalLM" in m for m in said)
    assert any("cpu_offload does nothing" in m for m in said)
    assert not any(ranks_own["said"] for ranks_own in found[1:])
