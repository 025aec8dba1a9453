"""Which ranks shard the weights, which replicate them, and which share a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Meshes:
    """``fsdp``: the mesh that FSDP2 shards over: ("shard",), or ("replicate", "shard") with replicas. ``sp``: the ranks
    that share this rank's sequences (Ulysses), None for one."""

    fsdp: DeviceMesh
    sp: ProcessGroup | None


def make_meshes(
    device_type: str,
    *,
    tensor_parallel_size: int = 1,
    replicas: int = 1,
    sequence_parallel_size: int = 1,
) -> Meshes:
    """Make the process groups of the job; every rank must call it, with the same arguments.

    Args:
        device_type: "cpu" or "cuda": where parameters live.
        tensor_parallel_size: ranks of one generation engine. It changes only which chunk of a tensor a rank has.
        replicas: groups of ranks that each hold the whole model (HSDP).
        sequence_parallel_size: consecutive ranks that share a sequence.

    Raises:
        ValueError: a size does not divide the ranks.
    """
    ranks = torch.distributed.get_world_size()
    order = shard_order(ranks, tensor_parallel_size=tensor_parallel_size, replicas=replicas)
    if sequence_parallel_size < 1 or ranks % sequence_parallel_size:
        raise ValueError(f"sequence_parallel_size={sequence_parallel_size} does not divide {ranks} ranks")
    shard = own_group(order)
    if replicas == 1:
        fsdp = DeviceMesh.from_group(shard, device_type, mesh_dim_names=("shard",))
    else:
        replicate = own_group([list(same_chunk) for same_chunk in zip(*order, strict=True)])
        fsdp = DeviceMesh.from_group(
            [replicate, shard], device_type, mesh=torch.tensor(order), mesh_dim_names=("replicate", "shard")
        )
    sp = sequence_parallel_size
    return Meshes(
        fsdp=fsdp,
        sp=own_group([list(range(first, first + sp)) for first in range(0, ranks, sp)]) if sp > 1 else None,
    )


def shard_order(ranks: int, *, tensor_parallel_size: int = 1, replicas: int = 1) -> list[list[int]]:
    """The global rank of each FSDP chunk, one list per replica.

    vLLM's external launcher gives global rank r the tensor-parallel rank r % t. Of n chunks, those from k·n/t to
    (k+1)·n/t lie inside slice k of a tensor cut in t, so they belong to ranks of tensor-parallel rank k: then what a
    rank has of such a tensor is part of what it generates with, and need not move.

    >>> shard_order(4, tensor_parallel_size=2)
    [[0, 2, 1, 3]]

    Raises:
        ValueError: a size does not divide the ranks.
    """
    t = tensor_parallel_size
    if replicas < 1 or ranks % replicas:
        raise ValueError(f"replicas={replicas} does not divide {ranks} ranks; use a divisor")
    n = ranks // replicas
    if t < 1 or n % t:
        raise ValueError(
            f"tensor_parallel_size={t} does not divide the {n} ranks of a replica; a generation engine must not "
            "cross replicas"
        )
    return [[first + i // (n // t) + i % (n // t) * t for i in range(n)] for first in range(0, ranks, n)]


def own_group(groups: list[list[int]]) -> ProcessGroup:
    """Make these process groups; the one with this rank in it. Ranks of a group are in the order given.

    A ``DeviceMesh`` made from a list of ranks sorts each group's, and FSDP2 then takes a rank's chunk from the group
    and DTensor from the mesh. So the groups are made here, unsorted, and a mesh from them.
    """
    if groups == [list(range(torch.distributed.get_world_size()))]:
        world = torch.distributed.group.WORLD
        assert world is not None
        return world
    rank, own = torch.distributed.get_rank(), None
    for ranks in groups:
        group = torch.distributed.new_group(ranks, timeout=world_timeout(), sort_ranks=False)
        own = group if rank in ranks else own
    assert own is not None, f"rank {rank} is in none of {groups}"
    return own


def world_timeout() -> timedelta:
    """The timeout of the job's own process group; a group made without one would wait half an hour."""
    world = torch.distributed.group.WORLD
    assert world is not None
    device = "cpu" if "gloo" in torch.distributed.get_backend_config(world) else "cuda"
    timeout: timedelta = world._get_backend(torch.device(device)).options._timeout
    return timeout
