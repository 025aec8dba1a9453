"""Whether settings fit a machine: asked before `train`, `serve` and `up` start anything, and by `doctor`.

A prediction that is a little off must keep nobody from what works. So prompts count as one token each, other
processes not at all, and what is refused is ``FAR`` beyond the memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel

from serve.config import EngineConfig, SwapConfig
from serve.kv_cache import SERVER_SHARE, fit_engine
from serve.policies.folder import compute_dtype, safetensors_header
from train.config.context_length import rollout_cache
from train.config.training import TrainConfig
from train.planner.machine import Machine
from train.planner.plan import NothingFits, Phase, Workload, choose, plan
from train.planner.sizes import GIB, ITEMSIZE

FAR: Final = {"cuda": 1.1, "cpu": 1.25}
"""Times a device's memory from which settings are refused. Predictions are checked to 10 %; a CPU's memory has room
beside it: swap, and pages of a KV cache that are never touched."""

_STANDBY_SLACK: Final = 1.05  # serve/vllm/standby_weights.py
_CHANGING_MEMORY: Final = ("quantization", "cpu_offload_gb", "kv_cache_dtype", "pipeline_parallel_size", "load_format")
"""Arguments of vLLM (serve.engine.extra) with which weights or KV cache take other memory than is counted here."""

_KV_CACHE: Final = "train.rollout.kv_cache_bytes"

Level = Literal["fits", "tight", "refused", "unplanned"]
_Section = TypeVar("_Section", bound=BaseModel)


@dataclass(frozen=True)
class Finding:
    """What was found. tight: it probably does not fit; refused: it certainly doesn't; unplanned: that can't be known.

    ``advice`` says what to change, and is empty where it fits or is not planned.
    """

    level: Level
    found: str
    advice: str = ""


def check_training(config: TrainConfig, policy: Path, machine: Machine, *, host: int) -> Finding:
    """Whether a step of a run from the policy in a folder fits. Imports torch and transformers.

    ``machine``: on a CPU, with as many devices as there are ranks in all pools, which share its memory. ``host``: the
    memory beside GPUs, for what is offloaded, bytes.
    """
    return _planned(lambda: _training(config, policy, machine, host))


def check_server(
    engine: EngineConfig, swap: SwapConfig, policy: Path, machine: Machine, *, replicas: int = 1
) -> Finding:
    """Whether a replica with the policy in a folder fits, and a second set of weights beside it. Imports no torch.

    ``machine``: one device, of those that a replica is split over; a CPU's whole memory, which all ``replicas`` share.
    """
    return _planned(lambda: _server(engine, swap, policy, machine, replicas))


def _planned(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  whatever a model has in it: what can't be planned may work all the same
        return Finding("unplanned", (str(error) or type(error).__name__).splitlines()[0])


def _level(needed: int, room: int, most: float) -> Level:
    return "refused" if needed > most else "tight" if needed > room else "fits"


# ------------------------------------------------------------------------------------------------------ training


def _training(config: TrainConfig, policy: Path, machine: Machine, host: int) -> Finding:
    from train.planner.model_shape import models_of, read_config

    if config.dataflow is not None:
        return Finding("unplanned", f"train.dataflow={config.dataflow} may hold other models than are planned for")
    if machine.kind == "cuda" and any(pool.gpus == 0 for pool in config.placement.pools.values()):
        return Finding("unplanned", "train.placement.pools has a pool without GPUs, beside others")
    models, work = models_of(read_config(policy), config, machine.kind), Workload.of(config, prompt_tokens=1)
    started = config
    if config.samples:
        size = rollout_cache(config, policy).size
        started = config.model_copy(update={"rollout": config.rollout.model_copy(update={"kv_cache_bytes": size})})
    found = plan(started, models, machine, work)

    def memory(phase: Phase) -> int:
        """A rank's."""
        if machine.kind == "cuda":
            return machine.memory
        return machine.memory * machine.devices // config.ranks_of(phase.pool)

    kept = found.offloaded * config.ranks_of(config.placement.actor)
    if machine.kind == "cuda" and kept > host:
        text = f"train.fsdp.cpu_offload keeps {_size(kept)} in the host's memory, which is {_size(host)}"
        return Finding(_level(kept, host, FAR["cpu"] * host), text, "train adapters (train.lora), or use more machines")
    worst = max(found.phases, key=lambda phase: phase.bytes / memory(phase))
    has = memory(worst)
    usable = max(0, has - (machine.memory - machine.usable))
    what, most = max(worst.memory.items(), key=lambda item: item[1])
    text = (
        f"{worst.name} needs {_size(worst.bytes)} on each rank, of which {_size(most)} are {what}, and a "
        f"{'device' if machine.kind == 'cuda' else 'rank'} has {_size(has)}, of which {_size(usable)} can be filled"
    )
    level = _level(worst.bytes, usable, FAR[machine.kind] * has)
    if level == "fits":
        return Finding(level, text)
    if level == "tight":  # the search takes seconds, and this may well run
        return Finding(level, text, "`millrace plan` names settings that need less")
    opened = _opened(config)
    try:
        fitting = plan(opened, models, machine, work)  # with another KV cache alone
        if not fitting.fits:
            fitting = choose(opened, models, machine, work)
        if fitting.host_bytes > host:
            fitting = choose(_opened(config, offload=False), models, machine, work)
    except NothingFits as nothing:
        return Finding(level, text, f"{nothing}: train adapters (train.lora), or use more or larger devices")
    now = found.settings
    changed = {name: value for name, value in fitting.settings.items() if value != now[name]}
    if changed.get(_KV_CACHE, 0) > now.get(_KV_CACHE, 0):  # more is faster, and not what it lacks
        del changed[_KV_CACHE]
    shown = ", ".join(f"{name}={json.dumps(value)}" for name, value in changed.items())
    return Finding(level, text, f"these settings would fit: {shown}")


def _opened(config: TrainConfig, *, offload: bool = True) -> TrainConfig:
    """The same with all settings that decide about memory open, for ``choose``; ``offload``: that one too."""
    ranks = [] if len(config.placement.pools) > 1 else ["ranks"]
    fsdp = config.fsdp if offload else config.fsdp.model_copy(update={"cpu_offload": False})
    parts = {
        "fsdp": _unset(fsdp, "reduce_every_micro_batch", *(["cpu_offload"] if offload else [])),
        "rollout": _unset(config.rollout.model_copy(update={"kv_cache_bytes": None}), "tensor_parallel_size"),
    }
    return _unset(config.model_copy(update=parts), "micro_batch_tokens", "activation_checkpointing", *ranks)


def _unset(section: _Section, *names: str) -> _Section:
    copy = section.model_copy()
    copy.model_fields_set.difference_update(names)
    return copy


# ------------------------------------------------------------------------------------------------------ serving


def _server(engine: EngineConfig, swap: SwapConfig, policy: Path, machine: Machine, replicas: int) -> Finding:
    if other := [name for name in _CHANGING_MEMORY if name in engine.extra]:
        return Finding("unplanned", f"serve.engine.extra has {', '.join(other)}")
    gpu, t, share = machine.kind == "cuda", engine.tensor_parallel_size, engine.gpu_memory_utilization
    whole, quantized = _weights(policy, engine.dtype)
    least = 0.0 if gpu else SERVER_SHARE  # on a GPU the cache gets what is left
    cache = fit_engine(engine, policy, section="serve.engine", share=least, memory=machine.memory // (1 if gpu else t))
    size = cache.size or 0
    weights, kv = (whole // t, size) if gpu else (whole, t * size)  # on a CPU all of them are in one memory
    by_share = gpu and engine.kv_cache_bytes is None
    room = int(share * machine.memory) if by_share else machine.memory
    needed = (1 if gpu else replicas) * (weights + kv)
    of = f"{_size(machine.memory)} of {'a device' if gpu else 'this machine'}"
    within = f"{_size(room)}, serve.engine.gpu_memory_utilization={share:g} of the {of}" if by_share else f"the {of}"
    each = f"{replicas} times " if needed != weights + kv else ""
    text = f"{each}{_size(weights)} of weights and at least {_size(kv)} of KV cache, where there are {within}"
    if (level := _level(needed, room, FAR[machine.kind] * room)) != "fits":
        remedies = [
            "raise serve.engine.gpu_memory_utilization" if by_share and share < 0.95 else "",
            "lower serve.engine.kv_cache_bytes or serve.engine.max_model_len" if kv > weights / 10 else "",
            f"split it over more devices than serve.engine.tensor_parallel_size={t}" if gpu else "",
            "lower serve.fleet.replicas" if each else "",
        ]
        return Finding(level, text, ", or ".join(filter(None, [*remedies, "serve a smaller model"])))
    if swap.in_place or quantized or not (gpu or engine.enforce_eager):
        return Finding("fits", f"{text}; a swap loads the next policy in place, while requests wait")
    second = int(_STANDBY_SLACK * weights) + swap.spare_bytes + (machine.reserved if gpu else 0)
    beside = machine.memory - (room if by_share else needed)
    standby = f"a swap's second set of weights takes {_size(second)}{', the driver included,' if gpu else ''}"
    if second <= beside:
        return Finding("fits", f"{text}; {standby} of the {_size(beside)} beside them")
    most = math.floor(100 * (1 - second / machine.memory)) / 100
    lower = f"lower serve.engine.gpu_memory_utilization to {most:.2f}, or "
    return Finding(
        "tight",
        f"{text}; {standby} of the {_size(beside)} beside them, so that every swap will be refused",
        f"{lower if by_share and most * machine.memory > needed else ''}set serve.swap.in_place, with which requests "
        "wait for the load",
    )


def _weights(policy: Path, setting: str) -> tuple[int, bool]:
    """(bytes of all weights, whether they are quantized), by the files' headers. Raises PolicyError."""
    config: dict[str, Any] = json.loads((policy / "config.json").read_text())
    tensors = [entry for path in policy.glob("*.safetensors") for entry in safetensors_header(path).values()]
    if not tensors:
        raise ValueError(f"{policy} has no *.safetensors files here")
    if config.get("quantization_config"):
        return sum(end - begin for begin, end in (entry["data_offsets"] for entry in tensors)), True
    itemsize = ITEMSIZE[compute_dtype(policy, setting)]
    return itemsize * sum(math.prod(entry["shape"]) for entry in tensors), False


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{count / 2**20:.0f} MiB"
