"""What a run's ranks compute on, as far as the driver can tell before they are there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from feedback.config import ScoringConfig
from serve.gpus import gpus
from serve.kv_cache import machine_memory
from train.config.training import TrainConfig
from train.planner.check import DoesNotFit, check_training
from train.planner.machine import Machine, machine_of_gpus, this_cpu

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
        gpus_here = torch.cuda.device_count()
        return _gpus(ranks, _Node(found.name, found.total_memory, gpus_here, machine_memory()))
    if not devices:
        return this_cpu(ranks)
    if not (nodes := _nodes_of_cluster()):
        return None
    least = min(nodes, key=lambda node: node.memory)
    return _gpus(ranks, replace(least, gpus=min(n.gpus for n in nodes), host=min(n.host for n in nodes)))


def without_room(config: TrainConfig, model: Path, machine: Machine, reward: str | ScoringConfig | None) -> str | None:
    """Why a run on a cluster does not fit its GPUs, which nobody could tell before; None if it may.

    ``model``: its folder; ``reward``: as of ``models_of``. Raises DoesNotFit where it certainly doesn't, as train.plan
    says.
    """
    if config.ray_address is None or config.plan == "off" or machine.kind != "cuda":
        return None
    host = int(min(machine.host_capacity, 2.0**62))
    finding = check_training(config, model, machine, host=host, reward=reward)
    if finding.level in ("fits", "unplanned"):
        return None
    text = f"training does not fit into memory: {finding.found}; {finding.advice}"
    if finding.level == "refused" and config.plan == "refuse":
        raise DoesNotFit(f"{text}; or start all the same with train.plan=warn")
    return text


@dataclass(frozen=True)
class _Node:
    """A machine's smallest GPU, by name and bytes; how many it has; bytes of the host's memory."""

    name: str
    memory: int
    gpus: int
    host: int


def _gpus(ranks: int, node: _Node) -> Machine:
    machine = machine_of_gpus(node.name, ranks, node.memory)
    return replace(machine, node_devices=node.gpus, host_capacity=node.host)


def _nodes_of_cluster() -> list[_Node]:
    """The machines of Ray's that have GPUs, by the driver's library there; none if of one nothing is known.

    This process may have none, and a context on one would cost memory.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    task = ray.remote(num_cpus=0)(this_node)
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote() for node in nodes
    ]
    try:
        found: list[_Node | None] = ray.get(asked, timeout=_ASKED_S)
    except ray.exceptions.RayError:
        return []
    known = [node for node in found if node is not None]
    return known if len(known) == len(found) else []


def this_node() -> _Node | None:
    """This machine; None without a GPU, or without the driver's library."""
    if not (found := gpus()):
        return None
    least = min(found, key=lambda gpu: gpu.total_bytes)
    return _Node(least.name, least.total_bytes, len(found), machine_memory())
