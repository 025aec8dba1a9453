"""What FSDP2 and tensor parallelism hold: where each trained tensor lies, and this rank's shard of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from train.model.hf_io import own_slice
from train.model.lora import merged_parameters
from train.model.stored_parts import StoredPart, common_box, relative
from train.weight_sync.slices import Held, ReshardError, numel, shards_of


def placed(model: nn.Module) -> dict[str, Held]:
    """Where each trained tensor lies, adapters merged, by the names that checkpoints have; each tied one once.

    What a checkpoint stores in parts (experts) comes part by part. Every rank must call it. Raises ReshardError for a
    placement other than shards and replicas.
    """
    held: dict[str, Held] = {}
    for name, tensor in merged_parameters(model):
        whole = place(name, tensor)
        held |= {part.key: _part_of(whole, part) for part in _parts(model, name)} or {name: whole}
    return held


def shards(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, this rank's shard) in the order of ``placed``; merging is a collective, so every rank must take all."""
    for name, tensor in merged_parameters(model):
        tensor = tensor.detach()
        local, parts = tensor.to_local() if isinstance(tensor, DTensor) else tensor, _parts(model, name)
        if not parts:
            yield name, local
            continue
        own = own_slice(tensor)
        for part in parts:
            common = common_box(part.box, own)
            yield part.key, local.new_empty(0) if common is None else part.as_stored(local[relative(common, own)])


def _parts(model: nn.Module, name: str) -> list[StoredPart]:
    parts: dict[str, list[StoredPart]] = model.checkpoint_parts
    return parts.get(name, [])


def _part_of(held: Held, part: StoredPart) -> Held:
    """Where a part is of a parameter that lies there."""
    found = []
    for box, holders in held.shards:
        if (common := common_box(part.box, tuple(slice(*span) for span in box))) is not None:
            found.append((tuple((s.start, s.stop) for s in part.within(common)), holders))
    whole = part.within(part.box)
    return Held(tuple(s.stop for s in whole), tuple(found))


def place(name: str, tensor: Tensor) -> Held:
    """Where a tensor lies; ``name`` is for messages. Raises ReshardError as ``placed`` does."""
    if not isinstance(tensor, DTensor):
        ranks = tuple(range(torch.distributed.get_world_size()))
        return _shards(tuple(tensor.shape), ranks, (len(ranks),), (None,))
    placements: list[int | None] = []
    for i, placement in enumerate(tensor.placements):
        strided = isinstance(placement, _StridedShard)
        # FSDP2 shards the slice that tensor parallelism has cut: the later dimension of the mesh comes first.
        if type(placement) not in (Shard, Replicate) and not (strided and placement.split_factor == _cuts(tensor, i)):
            raise ReshardError(f"{name} is placed as {tensor.placements}; only shards and replicas can be resharded")
        if type(placement) is Shard and _cuts(tensor, i) > 1:
            raise ReshardError(f"{name} is placed as {tensor.placements}; FSDP2 shards slices of tensor parallelism")
        placements.append(None if isinstance(placement, Replicate) else placement.dim)
    # Its dimensions in the order in which they cut.
    mesh = tensor.device_mesh.mesh
    mesh = mesh.permute(*reversed(range(mesh.ndim)))
    held = _shards(tuple(tensor.shape), tuple(mesh.flatten().tolist()), tuple(mesh.shape), tuple(reversed(placements)))
    rank = torch.distributed.get_rank()
    own = next((box for box, holders in held.shards if rank in holders), None)
    actual = tuple((part.start, part.stop) for part in own_slice(tensor))
    if own != (actual if numel(actual) else None):
        raise ReshardError(
            f"rank {rank} holds {actual} of {name}, and by its mesh {mesh.tolist()} it should hold {own}"
        )
    return held


def _cuts(tensor: DTensor, mesh_dim: int) -> int:
    """In how many slices the later dimensions of the mesh have cut what this one shards."""
    placements = tensor.placements
    later = zip(placements[mesh_dim + 1 :], tensor.device_mesh.shape[mesh_dim + 1 :], strict=True)
    return math.prod(size for p, size in later if type(p) is Shard and p.dim == placements[mesh_dim].dim)


@lru_cache(maxsize=256)
def _shards(
    shape: tuple[int, ...], ranks: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[int | None, ...]
) -> Held:
    return shards_of(shape, torch.tensor(ranks).view(mesh).numpy(), placements)
