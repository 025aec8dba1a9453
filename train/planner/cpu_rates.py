"""This machine's processors as a machine to plan for: their rates are measured, in some seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from feedback.processes.freed_memory import keep_freed_memory
from serve.kv_cache import machine_memory
from train.batch.packed import PackedBatch, Rollout
from train.model.fsdp import Make, causal_lm, choose_attention, decoder_layers, skeleton, token_log_probs, training_mode
from train.planner.machine import Machine
from train.planner.memory import MASTER
from train.planner.model_shape import PRODUCTS, Tracer, keep_layers
from train.planner.sizes import Batch, Operations
from train.planner.step_time import copied_bytes

_WIDEST: Final = 1024  # beyond it rates are much the same, and slow to find
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ENTRIES: Final = 8192  # of the small models' vocabulary
_PROMPTS: Final = 3  # with four responses each
_RESPONSES: Final = 4
_PROMPT: Final = 32  # tokens of each
_RESPONSE: Final = 97
_CALLS: Final = 6
_LAYERS: Final = 4  # at most: what is in none is little beside them, as it is in a model
_PAIRS: Final = 8
_MOST_AGAIN: Final = 2.0  # times a forward pass; more is the machine's own drift


def measure_cpu(
    ranks: int,
    *,
    dtype: str = "bfloat16",
    threads: int = 1,
    model: PretrainedConfig | None = None,
    make: Make = causal_lm,
) -> Machine:
    """So many ranks on this machine, each with a part of its memory; as fast as this process is.

    From here on this process keeps what it frees, as training's ranks do.

    In a process group every rank must call it at once, and what collectives take is measured among them. Elsewhere it
    is that of a group of one rank, and the link's rate is an eighth of the memory's (gloo over the loopback device
    copies each byte several times).

    Args:
        model: whose passes are timed, with a few of its layers and few entries of its vocabulary, and at whose width
            matrix products are; of a wide one, and of a mixture, a Llama's. Raises what ``make`` does for it.
    """
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with _group():
            like = _like(model)
            return _measured(ranks, getattr(torch, dtype), like, make if type(like) is type(model) else causal_lm)
    finally:
        torch.set_num_threads(before)


def _like(model: PretrainedConfig | None) -> PretrainedConfig:
    """Of a model that computes as this one does, and whose first layers are made and run in seconds."""
    text = _llama(512) if model is None else model.get_text_config()
    if text.hidden_size > _WIDEST or any(getattr(text, name, None) for name in _EXPERTS):
        return _llama(min(text.hidden_size, _WIDEST))
    small = deepcopy(text)
    small.vocab_size, small.pad_token_id = min(text.vocab_size, _ENTRIES), None
    return small


def _llama(width: int) -> LlamaConfig:
    heads = 1 if width % 64 else width // 64
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": _LAYERS, "vocab_size": _ENTRIES}
    return LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads)


def _measured(ranks: int, dtype: torch.dtype, config: PretrainedConfig, make: Make) -> Machine:
    width = config.get_text_config().hidden_size
    parameter_s = _whatever_the_rows(dtype, width)
    source, target = torch.ones(2**23), torch.empty(2**23)
    bandwidth = 2 * source.nbytes / _fastest(lambda: target.copy_(source))
    least = _pass(_llama(16), causal_lm, torch.float32, prompts=1)
    operation_s = least.seconds / least.operations.count
    found = _pass(config, make, dtype, prompts=_PROMPTS)
    products = found.products - found.weights * parameter_s
    flops = found.flops / max(products, 0.5 * found.products)
    flops_32 = found.flops_32 / found.products_32 if found.products_32 else flops
    rest = found.seconds - found.products - found.products_32 - found.operations.count * operation_s
    touched = found.operations.moved / max(rest, 0.1 * found.seconds)
    forward = found.forward_flops / flops + found.flops_32 / 3 / flops_32 + found.forward_weights * parameter_s
    forward += found.again.count * operation_s + found.again.moved / touched
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
        again_share=min(max(found.again_s / forward, 1.0), _MOST_AGAIN),
        unit_s=_unit_s(config, make, dtype, bandwidth=bandwidth, link=link),
        wait_s=_wait_s(),
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


def _whatever_the_rows(dtype: torch.dtype, width: int) -> float:
    """Seconds that each of a linear layer's three products, of its forward and its backward pass, takes for a parameter
    of its weight, however few rows there are."""
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
    return max(0.0, short - few * each)


@dataclass(frozen=True)
class _Pass:
    """``products``: seconds of its matrix products, with ``weights`` parameters and ``flops``; ``products_32``: of
    those of attention, which computes in float32 on a CPU (none apart where all of it does). ``forward_…``: of its
    forward pass; ``again_s``: seconds by which it is longer with checkpointing, which runs ``again``."""

    seconds: float
    operations: Operations
    products: float
    products_32: float
    weights: float
    flops: float
    flops_32: float
    forward_weights: float
    forward_flops: float
    again: Operations
    again_s: float


class _Products(TorchDispatchMode):
    """Seconds of the matrix products within, by the type that they are computed in; attention's kernels are among
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[torch.dtype, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        result = func(*args, **kwargs or {})
        if func.overloadpacket in PRODUCTS or "scaled_dot_product" in func.name():
            of = args[0].dtype
            self.seconds[of] = self.seconds.get(of, 0.0) + time.perf_counter() - began
        return result


def _pass(config: PretrainedConfig, make: Make, dtype: torch.dtype, *, prompts: int) -> _Pass:
    """The forward and the backward pass of a model's first layers over some prompts with four responses each."""
    model, again = (_few_layers(config, make).to(dtype) for _ in range(2))
    checkpointed = decoder_layers(again, None)
    apply_activation_checkpointing(again, check_fn=lambda module: module in checkpointed)
    run, run_again = _run_of(model, dtype, prompts), _run_of(again, dtype, prompts)
    run()
    run_again()
    in_products, whole, longer = list[dict[torch.dtype, float]](), list[float](), list[float]()
    for _ in range(_PAIRS):  # one after the other, as the machine's speed drifts
        with _Products() as timed:
            run()
        in_products.append(timed.seconds)
        [plain] = _seconds(run, 1)
        [recomputed] = _seconds(run_again, 1)
        whole.append(plain)
        longer.append(recomputed - plain)
    exact = torch.float32
    products = statistics.median(seconds.get(dtype, 0.0) for seconds in in_products)
    products_32 = 0.0 if dtype == exact else statistics.median(seconds.get(exact, 0.0) for seconds in in_products)
    text, layers = config.get_text_config(), decoder_layers(model, None)
    counts = Batch.of(prompts, _RESPONSES, _PROMPT, _RESPONSE)
    # As a plan counts them, which traces attention with fewer calls than there are: so that goes into the rates.
    traced = Tracer(model.config, dtype=str(dtype).removeprefix("torch."), device="cpu", make=make).operations(counts)
    inside = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    output = model.get_output_embeddings().weight.numel()  # which makes its logits again
    forward = 2.0 * (inside * counts.rows + output * counts.scored)
    flops = 3 * forward + 2.0 * output * counts.scored
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    attention = 3 * 4.0 * width * len(layers) * counts.pairs
    if dtype == exact:
        forward, flops, attention = forward + attention / 3, flops + attention, 0.0
    return _Pass(
        seconds=statistics.median(whole),
        operations=traced.forward + traced.backward,
        products=products,
        products_32=products_32,
        weights=3 * inside + 4 * output,
        flops=flops,
        flops_32=attention,
        forward_weights=inside + output,
        forward_flops=forward,
        again=traced.again,
        again_s=statistics.median(longer),
    )


def _few_layers(config: PretrainedConfig, make: Make) -> PreTrainedModel:
    model = skeleton(config, make)
    keep_layers(model, min(_LAYERS, len(decoder_layers(model, None))))
    filled: dict[int, nn.Parameter] = {}  # what is tied stays so
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                values = torch.randn(parameter.shape) / 50 if parameter.ndim > 1 else torch.ones(parameter.shape)
                module._parameters[name] = filled.setdefault(id(parameter), nn.Parameter(values))
    training_mode(model)
    return model


def _run_of(model: PreTrainedModel, dtype: torch.dtype, prompts: int) -> Callable[[], None]:
    choose_attention(model, "auto", dtype, torch.device("cpu"))
    rollouts = [
        Rollout([1 + prompt] * _PROMPT, [1] * _RESPONSE, [0.0] * _RESPONSE, 0.0, prompt)
        for prompt in range(prompts)  # of other tokens each, as a batch has the same one once
        for _ in range(_RESPONSES)
    ]
    batch = PackedBatch.pack(rollouts)

    def run() -> None:
        log_probs, _ = token_log_probs(model, batch)
        log_probs.sum().backward()
        model.zero_grad()

    return run


def _unit_s(config: PretrainedConfig, make: Make, dtype: torch.dtype, *, bandwidth: float, link: float) -> float:
    """Seconds that FSDP adds to a unit's pass, whatever its size, to gather it or to reduce its gradients: what the
    same pass takes longer for being sharded, without the bytes that it copies and sends."""
    plain = _run_of(_few_layers(config, make).to(dtype), dtype, _PROMPTS)
    model, ranks = _few_layers(config, make), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32))
    layers = decoder_layers(model, None)
    inside, whole = (sum(p.numel() for m in of for p in m.parameters()) for of in (layers, [model]))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    run = _run_of(model, dtype, _PROMPTS)
    run()
    longer = []
    for _ in range(_PAIRS):
        [without] = _seconds(plain, 1)
        [sharded] = _seconds(run, 1)
        longer.append(sharded - without)
    gathered = dtype.itemsize * (whole + inside)  # those in no layer are kept between its passes
    sent = (gathered + MASTER * whole) * (ranks - 1) / ranks / link
    copied = copied_bytes(whole, whole, ranks, dtype.itemsize, gathers=2, reductions=1) / bandwidth
    added = statistics.median(longer) - sent - copied
    return max(added, 0.0) / (3 * (len(layers) + 1))


def _wait_s() -> float:
    """Seconds of a sum over the ranks of the process group that has next to no bytes, as it comes amid computing."""
    value = torch.ones(1)
    return statistics.median(_seconds(lambda: distributed.all_reduce(value), 5 * _CALLS))


def _link() -> float:
    """Bytes a second that a rank receives in an all-gather among the ranks of the process group."""
    ranks = distributed.get_world_size()
    part = torch.ones(2**22)
    whole = torch.empty(ranks * len(part))
    return part.nbytes * (ranks - 1) / _fastest(lambda: distributed.all_gather_into_tensor(whole, part))


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls."""
    return min(_seconds(call))


def _seconds(call: Callable[[], object], calls: int = _CALLS) -> list[float]:
    """Of each of some calls."""
    seconds = []
    for _ in range(calls):
        distributed.barrier()  # in ranks of a run all compute at once
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds
