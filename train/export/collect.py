"""A sharded tensor, whole on one rank: each slice is sent once, by one of those that hold it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed.tensor import DTensor

from train.weight_sync.fsdp_shards import place
from train.weight_sync.slices import Box, within


def connect() -> None:
    """Have the ranks meet before the first ``collect``; every rank must call it.

    NCCL makes a group's connections in its first operation, in which all ranks must be, and not all are in each send.
    """
    torch.distributed.all_reduce(torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu"))


def collect(name: str, tensor: Tensor, owner: int) -> Tensor | None:
    """The whole tensor, on the CPU, on rank ``owner``, and None on the others; every rank must call it.

    Only the owner takes memory for the whole of it, and for its slices once more while they arrive. What the owner
    holds whole already is not copied from the CPU.

    Raises:
        ReshardError: it is placed otherwise than as shards and replicas; the text has ``name``.
    """
    rank = torch.distributed.get_rank()
    if not isinstance(tensor, DTensor):
        return tensor.cpu() if rank == owner else None
    held, local = place(name, tensor), tensor.to_local().detach()
    whole_box = tuple((0, size) for size in held.shape)
    sources = [(box, owner if owner in holders else holders[owner % len(holders)]) for box, holders in held.shards]
    if sources == [(whole_box, owner)]:
        return local.cpu() if rank == owner else None
    if rank != owner:
        sends = [P2POp(torch.distributed.isend, local.contiguous(), owner) for _, source in sources if source == rank]
        _run(sends)
        return None
    whole = torch.empty(held.shape, dtype=local.dtype)
    arriving: list[tuple[Box, Tensor]] = []
    receives = []
    for box, source in sources:
        if source == rank:
            whole[within(box, whole_box)].copy_(local)
            continue
        arriving.append(
            (box, torch.empty([stop - start for start, stop in box], dtype=local.dtype, device=local.device))
        )
        receives.append(P2POp(torch.distributed.irecv, arriving[-1][1], source))
    _run(receives)
    for box, values in arriving:
        whole[within(box, whole_box)].copy_(values)
    return whole


def _run(operations: list[P2POp]) -> None:
    for work in torch.distributed.batch_isend_irecv(operations) if operations else ():
        work.wait()
