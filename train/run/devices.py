"""What a run's ranks compute on, as far as the driver can tell before they are there."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from serve.gpus import gpus
from train.config.training import TrainConfig
from train.planner.machine import PRESETS, Machine, this_cpu
from train.planner.sizes import GIB

_ASKED_S: Final = 60.0


def machine_of_run(config: TrainConfig, devices: int) -> Machine | None:
    """The devices of a run, one for each of its ranks; None if there are GPUs, and how large they are can't be told.

    Args:
        devices: GPUs of each rank of the actor's pool, where Ray deals them out; torchrun's ranks have their own.
    """
    ranks = sum(config.ranks_of(pool) for pool in config.placement.pools)
    if config.launcher == "torchrun":
        if not torch.cuda.is_available():
            return this_cpu(ranks)
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return _gpus(ranks, found.name, found.total_memory)
    if not devices:
        return this_cpu(ranks)
    name, memory = _of_cluster()
    return None if memory is None else _gpus(ranks, name, memory)


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
    """(name, bytes) of this machine's GPU with the least memory; None without one, or without the driver's library."""
    if not (found := gpus()):
        return "", None
    least = min(found, key=lambda gpu: gpu.total_bytes)
    return least.name, least.total_bytes
