"""A model in training on one device, or two: FSDP2 over NCCL, tensor and sequence parallelism, offload, recomputation,
compiled layers, optimizers, checkpoints, generation. Against transformers' own forward pass in float32 on the CPU.

Each test's ranks are processes of their own; what they return is compared in this one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.gpu_suite import (
    DEVICE,
    Fsdp,
    Optimizer,
    Peak,
    device_type,
    gpu_test,
    on_ranks,
    ranks_here,
    require_own_groups,
)
from tests.gpu.test_gpu_attention import require_flash

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
CLOSE = {"float32": 2e-4, "bfloat16": 0.08}
"""Of log-probabilities."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("policy")
    Qwen3ForCausalLM(Qwen3Config(**SIZES, bos_token_id=None, eos_token_id=None, pad_token_id=0)).save_pretrained(folder)
    return folder


def a_batch(seed: int = 0, groups: int = 4) -> Any:
    """Groups of three responses to a prompt, of uneven lengths."""
    import torch

    from train.batch.packed import PackedBatch, Rollout

    generator = torch.Generator().manual_seed(seed)

    def some(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    rollouts = []
    for group in range(groups):
        prompt = some(1, 500, 5 + 7 * group)
        for _ in range(3):
            response = some(1, 500, some(2, 40, 1)[0])
            rollouts.append(Rollout(prompt, response, [-6.0] * len(response), 0.0, group))
    return PackedBatch.pack(rollouts)


def weights_of(batch: Any) -> Any:
    """What each token's log-probability counts in the loss."""
    import torch

    return torch.linspace(-1, 1, len(batch.tokens)) * batch.response_mask


def expected(policy: Path, batch: Any) -> tuple[Any, dict[str, Any]]:
    """(log-probabilities, gradients by parameter) of the whole model."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.train.tiny_models import plain_log_probs

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    log_probs = plain_log_probs(model, batch)
    (log_probs * weights_of(batch)).sum().backward()
    return log_probs.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def require_equal(found: dict[str, Any], target: tuple[Any, dict[str, Any]], dtype: str) -> None:
    import torch

    torch.testing.assert_close(found["log_probs"], target[0], atol=CLOSE[dtype], rtol=0)
    assert found["gradients"].keys() == target[1].keys()
    for name, gradient in found["gradients"].items():
        error = float((gradient - target[1][name]).norm() / target[1][name].norm())
        assert error < (1e-4 if dtype == "float32" else 0.05), f"{name}: {error}"


# ------------------------------------------------------------------------------------------------------ in the ranks


def a_model(policy: Path, dtype: str, options: dict[str, Any], sizes: dict[str, int], **more: Any) -> Any:
    import torch

    from train.model.fsdp import build
    from train.model.mesh import make_meshes

    meshes = make_meshes(device_type(), **sizes)
    return build(policy, dtype=getattr(torch, dtype), meshes=meshes, options=Fsdp(**options), **more)


def a_pass(
    rank: int,
    folder: Path,
    policy: Path,
    dtype: str,
    options: dict[str, Any],
    sizes: dict[str, int],
    more: dict[str, Any],
) -> dict[str, Any]:
    """Log-probabilities and whole gradients of the loss over the batch, of which every rank has all."""
    import torch

    from tests.train.tiny_models import whole
    from train.model.fsdp import token_log_probs
    from train.model.hf_io import plain_name

    model, batch = a_model(policy, dtype, options, sizes, **more), a_batch()
    model.train()
    home = {str(parameter.to_local().device.type) for parameter in model.parameters()}
    for _ in range(2):  # what the first pass makes once is no part of the peak
        model.zero_grad()
        torch.distributed.barrier()
        with Peak() as peak:
            log_probs, _ = token_log_probs(model, batch)
            (log_probs * weights_of(batch)).sum().backward()
    # FSDP averages over ranks, which have the same batch here.
    gradients = {plain_name(name): whole(parameter.grad).cpu() for name, parameter in model.named_parameters()}
    return {"log_probs": log_probs.detach(), "gradients": gradients, "home": home, "peak": peak.bytes}


# ---------------------------------------------------------------------------------------------------------- the tests


@gpu_test("part", "attention is SDPA, and collectives are gloo's", torch_only=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sharded_model_computes_what_the_whole_one_does(policy: Path, tmp_path: Path, dtype: str) -> None:
    if dtype == "bfloat16" and DEVICE == "cuda":
        require_flash()
    for found in on_ranks(ranks_here(), a_pass, tmp_path, policy, dtype, {}, {}, {}):
        require_equal(found, expected(policy, a_batch()), dtype)


MESHES: dict[str, dict[str, int]] = {
    "fsdp 2": {},
    "tp 2": {"tensor_parallel": 2},
    "ulysses 2": {"sequence_parallel_size": 2},
    "two replicas": {"replicas": 2},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept after forward": {"reshard_after_forward": False},
    "two layers ahead": {"prefetch_layers": 2},
}


@gpu_test("part", "collectives are gloo's", devices=2, torch_only=True)
@pytest.mark.parametrize(
    ("mesh", "options"), [*((mesh, "plain") for mesh in MESHES), *(("fsdp 2", name) for name in list(OPTIONS)[1:])]
)
def test_two_ranks_compute_what_one_does(policy: Path, tmp_path: Path, mesh: str, options: str) -> None:
    if MESHES[mesh]:
        require_own_groups()
    for found in on_ranks(2, a_pass, tmp_path, policy, "float32", OPTIONS[options], MESHES[mesh], {}):
        require_equal(found, expected(policy, a_batch()), "float32")


@gpu_test("part", "there is nothing to offload from, and no peak is counted", torch_only=True)
def test_parameters_that_are_kept_in_the_hosts_memory_are_trained_alike(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "offloaded").mkdir()
    ranks = ranks_here()
    kept = on_ranks(ranks, a_pass, tmp_path / "kept", policy, "float32", {}, {}, {})[0]
    offload = {"cpu_offload": True}
    offloaded = on_ranks(ranks, a_pass, tmp_path / "offloaded", policy, "float32", offload, {}, {})[0]
    require_equal(offloaded, expected(policy, a_batch()), "float32")
    assert (kept["home"], offloaded["home"]) == ({DEVICE}, {"cpu"})


@gpu_test("part", "no peak is counted", torch_only=True)
def test_recomputed_activations_give_the_same_gradients_in_less_memory(policy: Path, tmp_path: Path) -> None:
    found = {}
    for recomputed in (False, True):
        folder = tmp_path / str(recomputed)
        folder.mkdir()
        more = {"activation_checkpointing": recomputed}
        found[recomputed] = on_ranks(ranks_here(), a_pass, folder, policy, "float32", {}, {}, more)[0]
    require_equal(found[True], expected(policy, a_batch()), "float32")
    if DEVICE == "cuda":
        assert found[True]["peak"] < 0.8 * found[False]["peak"], found


@gpu_test("part", "layers are traced and not compiled: a CPU would call a C++ compiler", torch_only=True)
def test_compiled_layers_compute_what_others_do(policy: Path, tmp_path: Path) -> None:
    options = {"compile_layers": "inductor" if DEVICE == "cuda" else "aot_eager"}
    for found in on_ranks(ranks_here(), a_pass, tmp_path, policy, "float32", options, {}, {}):
        require_equal(found, expected(policy, a_batch()), "float32")


def trained(
    rank: int, folder: Path, policy: Path, options: dict[str, Any], name: str, parks: bool, steps: int
) -> dict[str, Any]:
    """Some steps of an optimizer, whose state is on the host between them if it ``parks``."""
    import torch

    from tests.train.tiny_models import whole
    from train.model.fsdp import token_log_probs
    from train.optimizers.build import make_optimizer, move_state

    model = a_model(policy, "float32", options, {})
    model.train()
    optimizer = make_optimizer(model, Optimizer(name=name), 1e-2, all_patterns_fit=False)  # type: ignore[arg-type]
    losses, homes, held = [], set(), None
    for step in range(steps):
        batch = a_batch(step % 2)
        loss = -(token_log_probs(model, batch)[0] * batch.response_mask).sum() / batch.response_mask.sum()
        loss.backward()
        if parks:
            move_state(optimizer, torch.device(device_type()))
        optimizer.step()
        if parks:
            move_state(optimizer, torch.device("cpu"))
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    state = [x for of in optimizer.state.values() for x in of.values() if isinstance(x, torch.Tensor) and x.ndim]
    for x in state:
        homes.add((x.to_local() if hasattr(x, "to_local") else x).device.type)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
    return {"losses": losses, "homes": homes, "held": held, "weights": [whole(p).cpu() for p in model.parameters()]}


@gpu_test("part", "the state has nowhere to go", torch_only=True)
def test_an_optimizer_whose_state_waits_in_the_hosts_memory_takes_the_same_steps(policy: Path, tmp_path: Path) -> None:
    import torch

    found = {}
    for parks in (False, True):
        folder = tmp_path / str(parks)
        folder.mkdir()
        found[parks] = on_ranks(ranks_here(), trained, folder, policy, {}, "adamw", parks, 4)[0]
    assert all(torch.equal(a, b) for a, b in zip(found[False]["weights"], found[True]["weights"], strict=True))
    assert found[True]["homes"] == {"cpu"}
    assert found[False]["homes"] == {DEVICE}
    if DEVICE == "cuda":
        moments = 2 * 4 * sum(w.numel() for w in found[True]["weights"]) / ranks_here()
        assert found[False]["held"] - found[True]["held"] > 0.9 * moments, found


@gpu_test("part", "collectives are gloo's", torch_only=True)
@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_an_optimizer_learns_a_batch_by_heart(policy: Path, tmp_path: Path, name: str) -> None:
    losses = on_ranks(ranks_here(), trained, tmp_path, policy, {}, name, False, 12)[0]["losses"]
    assert losses[-1] < losses[1] - (0.01 if name == "sgd" else 0.5), losses


@gpu_test("all", packages=("torchao",))
def test_eight_bit_moments_learn_as_moments_of_32_bits_do(policy: Path, tmp_path: Path) -> None:
    found = {}
    for name in ("adamw", "adamw_8bit"):
        folder = tmp_path / name
        folder.mkdir()
        found[name] = on_ranks(ranks_here(), trained, folder, policy, {}, name, False, 12)[0]
    last = {name: of["losses"][-1] for name, of in found.items()}
    fell = found["adamw"]["losses"][1] - last["adamw"]
    assert abs(last["adamw_8bit"] - last["adamw"]) < 0.3 * fell, found


def checkpointed(rank: int, folder: Path, policy: Path) -> dict[str, Any]:
    """A step, a checkpoint while the next ones go on, and back to it: the same steps, with the same random numbers."""
    import torch

    from tests.train.tiny_models import whole
    from train.checkpoint.dcp import Saver, load
    from train.checkpoint.folders import begin_aside, make_whole
    from train.model.fsdp import token_log_probs
    from train.optimizers.build import make_optimizer

    model = a_model(policy, "float32", {}, {})
    optimizer = make_optimizer(model, Optimizer(), 1e-2, all_patterns_fit=False)  # type: ignore[arg-type]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def step() -> list[Any]:
        model.train()
        noise = torch.rand(3, device=device_type())
        (token_log_probs(model, a_batch())[0].sum() * noise.mean().cpu()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return [noise.cpu(), *(whole(parameter).cpu() for parameter in model.parameters())]

    step()
    aside = [begin_aside(folder, 1, "{}") if rank == 0 else None]
    torch.distributed.broadcast_object_list(aside, src=0)
    assert aside[0] is not None
    saver = Saver(60)
    saver.start(aside[0] / "actor", 1, model, optimizer, schedule)
    first = [step(), step()]  # the files are written meanwhile, from copies
    (saved,) = saver.ended(wait=True)
    assert saved.error is None, saved.error
    whole_at = [make_whole(folder, 1) if rank == 0 else None]
    torch.distributed.broadcast_object_list(whole_at, src=0)
    assert whole_at[0] is not None
    load(whole_at[0], "actor", model, optimizer, schedule)
    again = [step(), step()]
    return {"first": first, "again": again}


@gpu_test("all", torch_only=True)
def test_a_checkpoint_is_of_the_step_at_which_it_was_begun(policy: Path, tmp_path: Path) -> None:
    import torch

    for found in on_ranks(ranks_here(), checkpointed, tmp_path, policy):
        for first, again in zip(found["first"], found["again"], strict=True):
            assert torch.equal(first[0], again[0]), "the device's random numbers go on where they were"
            for a, b in zip(first[1:], again[1:], strict=True):
                torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def generated(rank: int, folder: Path, policy: Path) -> dict[str, Any]:
    """Responses by transformers on the sharded model, many at once and few at once; their logprobs in training."""
    import torch

    from train.batch.packed import PackedBatch, Rollout
    from train.model.fsdp import token_log_probs
    from train.model.generation import Sampling, generate

    model = a_model(policy, "float32", {}, {})
    prompts, seeds = [[5, 6, 7], [8] * 9, [9, 10], [11] * 17], [1, 2, 3, 4]
    sampling = Sampling(max_tokens=12, temperature=1.0)
    many, few = (
        generate(model, prompts, seeds, sampling, frozenset([0]), lambda length, rows=rows: rows) for rows in (4, 1)
    )
    greedy = generate(model, prompts, None, Sampling(max_tokens=12), frozenset([0]), lambda length: 4)
    rollouts = [
        Rollout(p, g.token_ids, g.log_probs, 0.0, i) for i, (p, g) in enumerate(zip(prompts, many, strict=True))
    ]
    batch = PackedBatch.pack(rollouts)
    with torch.no_grad():
        scored = token_log_probs(model, batch)[0]
    return {"many": many, "few": few, "greedy": greedy, "scored": scored, "sampled": batch.behaviour_log_probs}


@gpu_test("all", torch_only=True)
def test_responses_without_vllm_are_drawn_from_what_training_computes(policy: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    for found in on_ranks(ranks_here(), generated, tmp_path, policy):
        assert [g.token_ids for g in found["many"]] == [g.token_ids for g in found["few"]], "the seeds decide"
        torch.testing.assert_close(found["sampled"], found["scored"], atol=2e-4, rtol=0)
        for prompt, response in zip([[5, 6, 7], [8] * 9, [9, 10], [11] * 17], found["greedy"], strict=True):
            with torch.no_grad():
                likeliest = model(torch.tensor([prompt + response.token_ids])).logits[0].argmax(-1)
            assert likeliest[len(prompt) - 1 : -1].tolist() == response.token_ids


def exported(rank: int, folder: Path, policy: Path, sizes: dict[str, int], offload: bool) -> dict[str, Any]:
    """What ``export`` returned; files of 100 kB, so that the ranks take turns."""
    from train.export.model_folder import export

    model = a_model(policy, "bfloat16", {"cpu_offload": offload}, sizes)
    (folder / "out").mkdir(exist_ok=True)
    return export(model, policy, folder / "out", file_bytes=100_000)


@gpu_test("part", "slices go over gloo", torch_only=True)
@pytest.mark.parametrize(
    ("sizes", "offload"), [({}, False), ({"replicas": 2}, False), ({"tensor_parallel": 2}, False), ({}, True)]
)
def test_what_all_ranks_export_is_the_policy_again(
    policy: Path, tmp_path: Path, sizes: dict[str, int], offload: bool
) -> None:
    import hashlib

    import torch
    from safetensors.torch import load_file

    if sizes:
        if ranks_here() < 2:
            pytest.skip("two ranks are needed")
        require_own_groups()
    found = on_ranks(2 if sizes else ranks_here(), exported, tmp_path, policy, sizes, offload)
    parent = load_file(policy / "model.safetensors")
    seen: dict[str, Any] = {}
    for name, written in found[0].items():
        assert written.sha256 == hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest()
        seen |= load_file(tmp_path / "out" / name)
    assert seen.keys() == parent.keys()
    assert all(torch.equal(seen[name], tensor) for name, tensor in parent.items())


def streamed(rank: int, folder: Path) -> dict[str, Any]:
    """Weights from rank 0 to the others, in buckets of some kilobytes, twice; then slices of them, by all-to-all."""
    import torch

    from train.weight_sync.transfer import JoinedPools, WeightStream

    count = torch.distributed.get_world_size()
    store = torch.distributed.TCPStore("127.0.0.1", port_in(folder, rank), is_master=rank == 0, wait_for_workers=False)
    group = JoinedPools(store, rank, count, 60)
    stream = WeightStream(group)
    found: dict[Any, Any] = {}
    for turn in range(2):
        generator = torch.Generator().manual_seed(turn)
        sizes = {"a": (300, 7), "b": (1,), "c": (2000,), "d": (0, 3), "e": (64, 64)}
        named = [(name, torch.randn(size, generator=generator)) for name, size in sizes.items()]
        if rank == 0:
            stream.send(((name, x.to(device_type())) for name, x in named), torch.bfloat16, 8192)
            found[turn] = {name: x.bfloat16() for name, x in named}
        else:
            found[turn] = {name: x.cpu() for name, x in stream.receive()}
    # As an exchange does, of which rank 0 has all and the others get a slice each.
    sent = torch.arange(5 * (count - 1) if rank == 0 else 0, dtype=torch.bfloat16, device=group.device)
    received = torch.empty(5 if rank else 0, dtype=torch.bfloat16, device=group.device)
    own, theirs = [0] + [5] * (count - 1), [5] + [0] * (count - 1)
    for _ in range(2):
        group.all_to_all(received, sent, theirs if rank else [0] * count, [0] * count if rank else own).wait()
    total = torch.tensor([rank + 1])
    group.sum(total)
    found |= {"slice": received.tolist(), "sum": int(total), "texts": group.gather_bytes(b"rank %d" % rank)}
    torch.distributed.barrier()  # the store is rank 0's
    return found


def port_in(folder: Path, rank: int) -> int:
    """A free port, that rank 0 finds."""
    import socket

    import torch

    port = [0]
    if rank == 0:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = [s.getsockname()[1]]
    torch.distributed.broadcast_object_list(port, src=0)
    return port[0]


@gpu_test("part", "it goes over gloo", devices=2, torch_only=True)
def test_weights_for_a_pool_apart_arrive_as_they_were_sent(tmp_path: Path) -> None:
    import torch

    sent, received = on_ranks(2, streamed, tmp_path)
    assert (sent["slice"], received["slice"]) == ([], [0.0, 1.0, 2.0, 3.0, 4.0])
    for of in (sent, received):
        assert (of["sum"], of["texts"]) == (3, [b"rank 0", b"rank 1"])
    for turn in range(2):
        tensors = sent[turn]
        assert list(tensors) == list(received[turn])
        assert all(torch.equal(tensor, received[turn][name]) for name, tensor in tensors.items())
