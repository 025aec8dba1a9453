"""Whether a second set of weights has room beside an engine, and what the engine leaves free for it.

Decided before the engine starts, by one rule for the server and for plans: a swap is not the time to find out. Imports
neither torch nor vLLM. Sizes are bytes of each device that a replica is split over; on a CPU, of each rank's part.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from serve.config import EngineConfig, SwapConfig
from serve.kv_cache import BATCH_SHARE, SERVER_SHARE, fit_engine, token_bytes
from serve.policies.folder import compute_dtype, safetensors_header

GIB: Final = 2**30
RESERVED: Final = int(1.5 * GIB)
"""Of each device, or of each rank's part of a CPU's memory, what the driver or the processes themselves take."""

SLACK: Final = 1.05
"""Of a second set: allocators round up."""

WORKSPACE: Final = GIB
"""On a GPU, of what an engine takes: activations and CUDA graphs."""

CHANGING_MEMORY: Final = (
    *("quantization", "quantization_config", "load_format", "model_weights", "model_class_overrides", "hf_overrides"),
    *("hf_config_path", "ignore_patterns", "language_model_only", "mm_encoder_only", "kv_cache_dtype"),
    *("kv_cache_memory_bytes", "num_gpu_blocks_override", "cpu_offload_gb", "offload_backend", "offload_group_size"),
    *("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size", "enable_expert_parallel"),
)
"""Arguments of vLLM (serve.engine.extra) with which weights or KV cache take other memory than is counted here."""

_LOADED_IN_PLACE: Final = ("speculative_config", "spec_model", "enable_lora")
_ITEMSIZE: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_PLENTY: Final = 2**60


@dataclass(frozen=True)
class Needs:
    """What a replica takes, bytes of each device.

    ``weights``: of one set as it serves, with its slots for adapters; ``second``: of another one. ``kv_cache``: what
    the engine would take by itself, or is set to; None: what is free. ``least_kv_cache``: with less, a second set is
    not worth its room.
    """

    weights: int
    second: int
    kv_cache: int | None
    least_kv_cache: int


@dataclass(frozen=True)
class Room:
    """How policies will be swapped, and what the engine is started with for that.

    ``reason``: one line of why. ``utilization``: share of a GPU's memory that vLLM may take. ``kv_cache_bytes``: of
    each device; None leaves it to vLLM. ``second``: bytes that are left for a second set, ``spare_bytes`` among them.
    ``short``: how many of them are lacking, where ``serve.swap.in_place`` is set to false all the same.
    """

    in_place: bool
    reason: str
    utilization: float
    kv_cache_bytes: int | None = None
    second: int = 0
    short: int = 0


def decide(
    needs: Needs,
    engine: EngineConfig,
    swap: SwapConfig,
    *,
    gpu: bool,
    memory: int,
    reserved: int = RESERVED,
    unsupported: str | None = None,
) -> Room:
    """Have the engine leave room for a second set, or swap in place: where that would leave it too little KV cache.

    What is set stays: ``serve.swap.in_place``, ``serve.engine.kv_cache_bytes``, and
    ``serve.engine.gpu_memory_utilization`` as the most that the engine may take.

    Args:
        memory: bytes of a device, or of a rank's part of a CPU's memory; ``reserved``: of them, for others.
        unsupported: why there can't be a second set, if that is known.
    """
    share, is_set = engine.gpu_memory_utilization, engine.kv_cache_bytes is not None
    in_place = Room(True, unsupported or "serve.swap.in_place is set", share, needs.kv_cache)
    if swap.in_place or unsupported:
        return in_place
    second = needs.second + swap.spare_bytes
    free = memory - reserved - second  # for the engine
    if gpu and not is_set:
        free = min(free, int(share * memory))
    taken = needs.weights + (WORKSPACE if gpu else 0)
    wanted = _PLENTY if needs.kv_cache is None else needs.kv_cache
    least = wanted if is_set else min(needs.least_kv_cache, wanted)
    cache = min(wanted, free - taken)
    short = max(0, least - cache)
    takes = f"a second set of weights takes {size_text(second)} of {size_text(memory)}"
    if short and swap.in_place is None:
        left = f"beside it there are {size_text(max(0, free - taken))} for a KV cache of at least {size_text(least)}"
        return replace(in_place, reason=f"{takes}, and {left}")
    cache = max(cache, least)
    if needs.kv_cache is not None:
        found = Room(False, "", share, cache, second, short)
    else:
        wide = math.ceil((taken + least) / memory * 1000) / 1000  # of a device, in thousandths
        fitting = math.floor(free / memory * 1000) / 1000
        bounded = share if int(share * memory) <= free else fitting
        found = Room(False, "", min(share, wide) if short else bounded, None, second, short)
    lacking = f", {size_text(short)} more than there are, so that swaps will be refused" if short else ""
    return replace(found, reason=f"{takes}, which the engine leaves free{lacking}")


def room_of(
    engine: EngineConfig,
    swap: SwapConfig,
    policy: Path,
    *,
    gpu: bool,
    memory: int,
    available: int | None = None,
    reserved: int = RESERVED,
    adapters: int = 0,
) -> Room:
    """``decide`` for the policy in a folder. Raises PolicyError, ContextRefused, ValueError.

    ``memory``: of a device, or a CPU's over the ranks of one engine, of which its KV cache takes a share;
    ``available``: of it, what this engine may have, if that is less. ``adapters``: bytes of each device, or of each
    rank's part, that the engine's slots for adapters take.
    """
    if other := [name for name in CHANGING_MEMORY if name in engine.extra]:
        known = fit_engine(engine, policy, section="serve.engine", share=SERVER_SHARE, memory=memory).size
        reason = f"what a second set of weights takes is not known, as serve.engine.extra has {', '.join(other)}"
        in_place = gpu if swap.in_place is None else swap.in_place  # of a GPU the engine takes all that it may
        return Room(in_place, reason, engine.gpu_memory_utilization, None if gpu else known)
    weights, quantized = weight_bytes(policy, engine.dtype)
    needs = needs_of(engine, swap, policy, weights, gpu=gpu, memory=memory)
    needs = replace(needs, weights=needs.weights + adapters)  # a second set has none
    unsupported = never_standby(engine, gpu=gpu, quantized=quantized)
    most = memory if available is None else min(memory, available)
    return decide(needs, engine, swap, gpu=gpu, memory=most, reserved=reserved, unsupported=unsupported)


def needs_of(engine: EngineConfig, swap: SwapConfig, policy: Path, weights: int, *, gpu: bool, memory: int) -> Needs:
    """Of the policy in a folder, with so many bytes of ``weights`` in all. Raises PolicyError, ContextRefused."""
    t = engine.tensor_parallel_size
    if not gpu:  # vLLM keeps a prepacked copy of the output layer beside its weight
        config = json.loads((policy / "config.json").read_text())
        text = config.get("text_config") or config
        head = text.get("vocab_size", 0) * text.get("hidden_size", 0) * _ITEMSIZE[compute_dtype(policy, engine.dtype)]
        weights += head

    def cache(share: float, of: int) -> int:
        return fit_engine(engine, policy, section="serve.engine", share=share, memory=of).size or 0

    wanted = None
    if engine.kv_cache_bytes is not None or not gpu:
        wanted = cache(SERVER_SHARE, memory)
    each = token_bytes(policy, engine.dtype, devices=t)
    least = int(BATCH_SHARE * memory)  # of a model whose cache is of another kind
    if each is not None:
        least = max(cache(0.0, memory), min(swap.least_kv_tokens * each, cache(1.0, _PLENTY)))
    return Needs(weights // t, int(SLACK * weights / t), wanted, least)


def never_standby(engine: EngineConfig, *, gpu: bool, quantized: bool) -> str | None:
    """Why there will be no second set, as far as settings and config.json tell; ``serve.vllm.standby_weights`` knows of
    each layer."""
    if names := [name for name in _LOADED_IN_PLACE if engine.extra.get(name)]:
        return f"serve.engine.extra has {names[0]}"
    if quantized:
        return "the policy's weights are quantized"
    if not gpu and not engine.enforce_eager:
        return "serve.engine.enforce_eager is false, and a CPU's prepacked weights are part of the graph"
    return None


def weight_bytes(policy: Path, setting: str) -> tuple[int, bool]:
    """(bytes of all weights, whether they are quantized), by the headers of the files that vLLM loads.

    That are all, but for those that the index does not name: Mistral's are there twice. Raises PolicyError, and
    ValueError if there are none.
    """
    config: dict[str, Any] = json.loads((policy / "config.json").read_text())
    files, index = set(policy.glob("*.safetensors")), policy / "model.safetensors.index.json"
    if index.is_file():
        files &= {policy / name for name in json.loads(index.read_text())["weight_map"].values()}
    tensors = [entry for path in files for entry in safetensors_header(path).values()]
    if not tensors:
        raise ValueError(f"{policy} has no *.safetensors files here")
    quantized = bool(config.get("quantization_config"))
    itemsize = None if quantized else _ITEMSIZE[compute_dtype(policy, setting)]

    def size(entry: dict[str, Any]) -> int:
        if itemsize is not None and entry["dtype"] in ("BF16", "F16", "F32", "F64"):
            return itemsize * math.prod(entry["shape"])
        begin, end = entry["data_offsets"]  # integers and 8-bit floats stay as they are
        return int(end - begin)

    return sum(map(size, tensors)), quantized


def size_text(count: int) -> str:
    """GiB, or MiB of what is small."""
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{count / 2**20:.0f} MiB"
