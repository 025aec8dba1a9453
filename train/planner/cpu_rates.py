"""This machine's processors as a machine to plan for: their rates are measured, in some seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from feedback.processes.freed_memory import keep_freed_memory
from serve.kv_cache import machine_memory
from train.batch.packed import PackedBatch, Rollout
from train.model.fsdp import choose_attention, token_log_probs
from train.planner.machine import Machine
from train.planner.model_shape import LiveBytes
from train.planner.sizes import Batch, Operations

_ENTRIES: Final = 2048  # of the small models' vocabulary
_PROMPTS: Final = 2  # with four responses each
_RESPONSES: Final = 4
_PROMPT: Final = 32  # tokens of each
_RESPONSE: Final = 97
_UNITS: Final = 8


def measure_cpu(ranks: int, *, dtype: str = "bfloat16", threads: int = 1, width: int = 512) -> Machine:
    """So many ranks on this machine, each with a part of its memory; as fast as this process is.

    From here on this process keeps what it frees, as training's ranks do.

    In a process group every rank must call it at once, and what collectives take is measured among them. Elsewhere it
    is that of a group of one rank, and the link's rate is an eighth of the memory's (gloo over the loopback device
    copies each byte several times).

    Args:
        width: of the model's hidden states: matrix products of few rows and of many, and a small model's passes, are
            timed at this width.
    """
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with _group():
            return _measured(ranks, getattr(torch, dtype), width)
    finally:
        torch.set_num_threads(before)


def _measured(ranks: int, dtype: torch.dtype, width: int) -> Machine:
    flops, parameter_s = _products(dtype, width)
    flops_32 = flops if dtype == torch.float32 else _products(torch.float32, width)[0]
    source, target = torch.ones(2**23), torch.empty(2**23)
    bandwidth = 2 * source.nbytes / _fastest(lambda: target.copy_(source))
    operation_s, touched = _beside_products(dtype, width, flops, flops_32, parameter_s)
    link = _link() if distributed.get_world_size() > 1 else bandwidth / 8
    return Machine(
        name="this CPU",
        devices=ranks,
        memory=machine_memory() // ranks,
        flops=flops,
        bandwidth=bandwidth,
        link=link,
        network=link,
        host=bandwidth,
        node_devices=ranks,
        fragmentation=0.05,
        flops_share=1.0,  # these rates are reached, and no peaks
        bandwidth_share=1.0,
        link_share=1.0,
        float32_share=flops_32 / flops,
        kind="cpu",
        parameter_s=parameter_s,
        operation_s=operation_s,
        touched=touched,
        unit_s=_unit_s(),
    )


@contextmanager
def _group() -> Iterator[None]:
    """This process's group, or one of its own for a while."""
    if distributed.is_initialized():
        yield
        return
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _products(dtype: torch.dtype, width: int) -> tuple[float, float]:
    """(operations a second of a linear layer's three products, of its forward and its backward pass; seconds that each
    takes for a parameter of its weight, however few rows there are)."""
    weight = torch.randn(3 * width, width).to(dtype)

    def seconds(rows: int) -> float:
        x, g = (torch.randn(rows, size).to(dtype) for size in (width, 3 * width))

        def products() -> None:
            functional.linear(x, weight)
            g @ weight
            g.t() @ x

        return _fastest(products) / (3 * weight.numel())

    few, many = 128, 2048
    short, long = seconds(few), seconds(many)
    each = max((long - short) / (many - few), 0.5 * long / many)
    return 2 / each, max(0.0, short - few * each)


def _beside_products(
    dtype: torch.dtype, width: int, flops: float, flops_32: float, parameter_s: float
) -> tuple[float, float]:
    """(seconds of an operation, whatever its size; bytes a second that operations element by element read and write):
    of what training's own passes over a small model take, that of one on next to nothing, and the rest of one of this
    width without its products."""
    least = _pass(torch.float32, width=16, prompts=1, entries=16)
    operation_s = least.seconds / least.operations.count
    found = _pass(dtype, width=width, prompts=_PROMPTS, entries=_ENTRIES)
    products = found.flops / flops + found.flops_32 / flops_32 + found.weights * parameter_s
    rest = found.seconds - found.operations.count * operation_s - products
    return operation_s, found.operations.moved / max(rest, 0.1 * found.seconds)


@dataclass(frozen=True)
class _Pass:
    """``weights``: parameters of all its products; ``flops_32``: of attention, which computes in float32 on a CPU."""

    seconds: float
    operations: Operations
    weights: float
    flops: float
    flops_32: float


def _pass(dtype: torch.dtype, *, width: int, prompts: int, entries: int) -> _Pass:
    """The forward and the backward pass of a Llama of two layers over some prompts with four responses each."""
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 2, "vocab_size": entries}
    heads = 1 if width % 64 else width // 64
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads)
    model = LlamaForCausalLM(config).to(dtype)
    choose_attention(model, "auto", dtype, torch.device("cpu"))
    counts = Batch.of(prompts, _RESPONSES, _PROMPT, _RESPONSE)
    rollouts = [
        Rollout([1] * _PROMPT, [1] * _RESPONSE, [0.0] * _RESPONSE, 0.0, prompt)
        for prompt in range(prompts)
        for _ in range(_RESPONSES)
    ]
    batch = PackedBatch.pack(rollouts)

    def run() -> None:
        log_probs, _ = token_log_probs(model, batch)
        log_probs.sum().backward()
        model.zero_grad()

    with LiveBytes() as counted:
        run()
    inside = sum(parameter.numel() for parameter in model.model.layers.parameters())
    output = model.lm_head.weight.numel()  # which makes its logits again
    flops = 2.0 * (3 * inside * counts.rows + 4 * output * counts.scored)
    attention = 3 * 4.0 * width * config.num_hidden_layers * counts.pairs
    return _Pass(_fastest(run), counted.operations, 3 * inside + 4 * output, flops, attention)


def _unit_s() -> float:
    """Seconds that FSDP adds to a unit's pass, whatever its size: to gather it, or to reduce its gradients."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    plain, sharded = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(_UNITS))) for _ in range(2))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x = torch.randn(2, 8)
    without, with_it = (_fastest(partial(_backward, of, x)) for of in (plain, sharded))
    return (with_it - without) / (3 * _UNITS)


def _backward(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


def _link() -> float:
    """Bytes a second that a rank receives in an all-gather among the ranks of the process group."""
    ranks = distributed.get_world_size()
    part = torch.ones(2**22)
    whole = torch.empty(ranks * len(part))
    return part.nbytes * (ranks - 1) / _fastest(lambda: distributed.all_gather_into_tensor(whole, part))


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls."""
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
