"""Which ranks shard the weights, which replicate them, which share each layer, and which share a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from train.config.training import TrainConfig


@dataclass(frozen=True)
class Meshes:
    """``fsdp``: the mesh that FSDP2 shards over: ("shard",), or ("replicate", "shard") with replicas. ``sp``: the ranks
    that share this rank's sequences (Ulysses), None for one. ``tp``: the ranks that share each layer with it (tensor
    parallelism), ("tensor",), None for one; with ``fsdp`` it is cut from one mesh of all ranks."""

    fsdp: DeviceMesh
    sp: ProcessGroup | None
    tp: DeviceMesh | None = None


def make_meshes(
    device_type: str,
    *,
    tensor_parallel_size: int = 1,
    tensor_parallel: int = 1,
    replicas: int = 1,
    sequence_parallel_size: int = 1,
) -> Meshes:
    """Make the process groups of the job; every rank must call it, with the same arguments.

    Args:
        device_type: "cpu" or "cuda": where parameters live.
        tensor_parallel_size: ranks of one generation engine. It changes only which chunk of a tensor a rank has.
        tensor_parallel: ranks that share each layer in training.
        replicas: groups of ranks that each hold the whole model (HSDP).
        sequence_parallel_size: ranks that share a sequence, times ``tensor_parallel``.

    Raises:
        ValueError: a size does not divide the ranks.
    """
    sizes = {"tensor_parallel_size": tensor_parallel_size, "tensor_parallel": tensor_parallel, "replicas": replicas}
    ranks = torch.distributed.get_world_size()
    # [replicas, chunks of a slice, slices], the global ranks.
    grid = torch.tensor(shard_order(ranks, **sizes)).unflatten(1, (tensor_parallel, -1)).transpose(1, 2)
    shared = sequence_groups(ranks, sequence_parallel_size=sequence_parallel_size, **sizes)
    names = ("replicate", "shard", "tensor")
    of_all = [
        own_group(grid.movedim(dim, -1).flatten(0, 1).tolist()) if grid.shape[dim] > 1 or dim == 1 else None
        for dim in range(3)
    ]
    used = [dim for dim in range(3) if of_all[dim] is not None]
    if used == [1]:
        fsdp = DeviceMesh.from_group(of_all[1], device_type, mesh_dim_names=("shard",))
        return Meshes(fsdp=fsdp, sp=own_group(shared) if sequence_parallel_size > 1 else None)
    whole = DeviceMesh.from_group(
        [of_all[dim] for dim in used],
        device_type,
        mesh=grid.reshape([grid.shape[dim] for dim in used]),
        mesh_dim_names=tuple(names[dim] for dim in used),
    )
    return Meshes(
        fsdp=whole["replicate", "shard"] if replicas > 1 else whole["shard"],
        sp=own_group(shared) if sequence_parallel_size > 1 else None,
        tp=whole["tensor"] if tensor_parallel > 1 else None,
    )


def mesh_sizes(config: TrainConfig, ranks: int) -> dict[str, int]:
    """The sizes of ``make_meshes`` for a pool of so many ranks that trains."""
    fsdp, t = config.fsdp, config.rollout.tensor_parallel_size
    in_replica = ranks // fsdp.replicas
    # With generation on ranks of its own, t need not divide these; then no order keeps anything in place.
    suits = in_replica % t == 0 and (t % fsdp.tensor_parallel == 0 or fsdp.tensor_parallel % t == 0)
    return {
        "tensor_parallel_size": t if suits else 1,
        "tensor_parallel": fsdp.tensor_parallel,
        "replicas": fsdp.replicas,
        "sequence_parallel_size": fsdp.sequence_parallel,
    }


def shard_order(
    ranks: int, *, tensor_parallel_size: int = 1, tensor_parallel: int = 1, replicas: int = 1
) -> list[list[int]]:
    """The global rank of each chunk of a tensor, one list per replica.

    vLLM's external launcher gives global rank r the tensor-parallel rank r % t. Of n chunks, those from k·n/t to
    (k+1)·n/t lie inside slice k of a tensor cut in t, so they belong to ranks of tensor-parallel rank k: then what a
    rank has of such a tensor is part of what it generates with, and need not move.

    With ``tensor_parallel`` in training a tensor is first cut in so many slices and each of them in chunks by FSDP, so
    the slices are runs of n / tensor_parallel chunks. The ranks that share a layer are neighbours, or members of one
    engine where that has more of them.

    >>> shard_order(4, tensor_parallel_size=2)
    [[0, 2, 1, 3]]
    >>> shard_order(8, tensor_parallel_size=2, tensor_parallel=4)
    [[0, 4, 2, 6, 1, 5, 3, 7]]

    Raises:
        ValueError: a size does not divide the ranks, or of the two that share ranks neither divides the other.
    """
    t, s = tensor_parallel_size, tensor_parallel
    if replicas < 1 or ranks % replicas:
        raise ValueError(f"replicas={replicas} does not divide {ranks} ranks; use a divisor")
    n = ranks // replicas
    if t < 1 or n % t:
        raise ValueError(
            f"tensor_parallel_size={t} does not divide the {n} ranks of a replica; a generation engine must not "
            "cross replicas"
        )
    if s < 1 or n % s:
        raise ValueError(f"tensor_parallel={s} does not divide the {n} ranks of a replica; use a divisor")
    if s % t and t % s:
        raise ValueError(f"tensor_parallel={s} and tensor_parallel_size={t} share ranks; one must divide the other")
    parts = max(1, s // t)  # slices of training in one of generation
    order = [0] * n
    for r in range(n):
        inner, engine = r % t, r // t
        order[inner * (n // t) + engine % parts * (n // s) + engine // parts] = r
    return [[first + r for r in order] for first in range(0, ranks, n)]


def tensor_groups(
    ranks: int, *, tensor_parallel_size: int = 1, tensor_parallel: int = 1, replicas: int = 1
) -> list[list[int]]:
    """The ranks that share each layer, in order of the slices, one list per group; sizes as of ``shard_order``.

    >>> tensor_groups(4, tensor_parallel=2)
    [[0, 1], [2, 3]]
    >>> tensor_groups(4, tensor_parallel=2, tensor_parallel_size=4)
    [[0, 2], [1, 3]]
    """
    sizes = {"tensor_parallel_size": tensor_parallel_size, "tensor_parallel": tensor_parallel, "replicas": replicas}
    chunks = ranks // replicas // tensor_parallel
    return sorted(order[i::chunks] for order in shard_order(ranks, **sizes) for i in range(chunks))


def sequence_groups(ranks: int, *, sequence_parallel_size: int = 1, **sizes: int) -> list[list[int]]:
    """The ranks that share each sequence, one list per group: of as many groups of ``tensor_groups`` the ranks with
    the same slice.

    Raises:
        ValueError: as ``shard_order``, or the size does not divide the groups.
    """
    groups, share = tensor_groups(ranks, **sizes), sequence_parallel_size
    if share < 1 or len(groups) % share:
        parts = f"{ranks} ranks" if len(groups) == ranks else f"{len(groups)} tensor-parallel groups"
        raise ValueError(f"sequence_parallel_size={share} does not divide {parts}")
    together = [groups[first : first + share] for first in range(0, len(groups), share)]
    return [list(same_slice) for some in together for same_slice in zip(*some, strict=True)]


def batch_parts(ranks: int, *, sequence_parallel_size: int = 1, **sizes: int) -> tuple[int, ...]:
    """The data-parallel part of each rank: those that share layers or sequences learn from the same part of a batch.

    >>> batch_parts(8, sequence_parallel_size=2, tensor_parallel=2)
    (0, 0, 0, 0, 1, 1, 1, 1)
    """
    parts = [0] * ranks
    for index, group in enumerate(tensor_groups(ranks, **sizes)):
        for rank in group:
            parts[rank] = index // sequence_parallel_size
    return tuple(parts)


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
