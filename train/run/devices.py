"""What a run's ranks compute on, as far as the driver can tell before they are there."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from serve.kv_cache import machine_memory, swap_memory
from train.config.training import TrainConfig
from train.planner.machine import PRESETS, Machine
from train.planner.sizes import GIB

_ASKED_S: Final = 60.0


def machine_of_run(config: TrainConfig, gpus: int) -> Machine | None:
    """The devices of a run, one for each of its ranks; None if there are GPUs, and how large they are can't be told.

    Args:
        gpus: of each rank of the actor's pool, where Ray deals them out; under torchrun they are this process's.
    """
    ranks = sum(config.ranks_of(pool) for pool in config.placement.pools)
    if config.launcher == "torchrun":
        if not torch.cuda.is_available():
            return _cpu(ranks)
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return _gpus(ranks, found.name, found.total_memory)
    if not gpus:
        return _cpu(ranks)
    name, memory = _of_cluster()
    return None if memory is None else _gpus(ranks, name, memory)


def _cpu(ranks: int) -> Machine:
    parts = {"memory": machine_memory() // ranks, "swap": swap_memory() // ranks}
    return replace(PRESETS["A100"], name="this CPU", devices=ranks, kind="cpu", **parts)


def _gpus(ranks: int, name: str, memory: int) -> Machine:
    like = next((preset for known, preset in PRESETS.items() if known in name), PRESETS["A100"])
    return replace(like, name=f"{memory / GIB:.0f}GB", devices=ranks, memory=memory)


def _of_cluster() -> tuple[str, int | None]:
    """(name, bytes) of the smallest GPU of a machine of Ray's that has some, by the driver's library there.

    This process may have none, and a context on it would cost memory.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    if not nodes:
        return "", None
    where = NodeAffinitySchedulingStrategy(nodes[0], soft=False)
    asked = ray.remote(num_cpus=0)(smallest_gpu).options(scheduling_strategy=where).remote()
    try:
        found: tuple[str, int | None] = ray.get(asked, timeout=_ASKED_S)
    except ray.exceptions.RayError:
        return "", None
    return found


def smallest_gpu() -> tuple[str, int | None]:
    """(name, bytes) of this machine's GPU with the least memory, by NVML; None without one, or without the library."""
    try:
        import pynvml
    except ImportError:
        return "", None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "", None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        found = [(str(pynvml.nvmlDeviceGetName(h)), int(pynvml.nvmlDeviceGetMemoryInfo(h).total)) for h in handles]
    finally:
        pynvml.nvmlShutdown()
    return min(found, key=lambda each: each[1], default=("", None))
