"""What FSDP2 holds: where each trained tensor lies, and this rank's shard of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from train.model.hf_io import own_slice
from train.model.lora import merged_parameters
from train.weight_sync.slices import Held, ReshardError, numel, shards_of


def placed(model: nn.Module) -> dict[str, Held]:
    """Where each trained tensor lies, adapters merged, by the names that checkpoints have; each tied one once.

    Every rank must call it. Raises ReshardError for a placement other than shards and replicas.
    """
    return {name: _held(name, tensor) for name, tensor in merged_parameters(model)}


def shards(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, this rank's shard) in the order of ``placed``; merging is a collective, so every rank must take all."""
    for name, tensor in merged_parameters(model):
        tensor = tensor.detach()
        yield name, tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _held(name: str, tensor: Tensor) -> Held:
    if not isinstance(tensor, DTensor):
        ranks = tuple(range(torch.distributed.get_world_size()))
        return _shards(tuple(tensor.shape), ranks, (len(ranks),), (None,))
    placements: list[int | None] = []
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            raise ReshardError(f"{name} is placed as {placement}; only shards and replicas can be resharded")
        placements.append(placement.dim if isinstance(placement, Shard) else None)
    mesh = tensor.device_mesh.mesh
    held = _shards(tuple(tensor.shape), tuple(mesh.flatten().tolist()), tuple(mesh.shape), tuple(placements))
    rank = torch.distributed.get_rank()
    own = next((box for box, holders in held.shards if rank in holders), None)
    actual = tuple((part.start, part.stop) for part in own_slice(tensor))
    if own != (actual if numel(actual) else None):
        raise ReshardError(
            f"rank {rank} holds {actual} of {name}, and by its mesh {mesh.tolist()} it should hold {own}"
        )
    return held


@lru_cache(maxsize=256)
def _shards(
    shape: tuple[int, ...], ranks: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[int | None, ...]
) -> Held:
    return shards_of(shape, torch.tensor(ranks).view(mesh).numpy(), placements)
