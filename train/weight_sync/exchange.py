"""Executes a plan: buckets by all-to-all, the next one on its way while this one is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from train.weight_sync.plan import Bucket, Piece, Plan, Transfer
from train.weight_sync.slices import numel, within

if TYPE_CHECKING:
    from train.weight_sync.checksums import Comparison
    from train.weight_sync.loader_tracing import Need
    from train.weight_sync.transfer import Group
    from train.weight_sync.vllm_writer import LiveWeights


class Exchange:
    """One resharding; every rank must run it. Takes as much memory as two exchanges of the plan, and frees it."""

    def __init__(
        self,
        plan: Plan,
        group: Group,
        shards: Iterator[tuple[str, Tensor]],
        target: LiveWeights | None,
        needs: dict[str, list[Need]],
        dtype: torch.dtype,
        comparison: Comparison,
    ) -> None:
        """``shards``: of ``train.weight_sync.fsdp_shards``; of a rank that only generates anything by those names.
        ``target``: None where a rank only trains. ``needs``: by tensor, in the plan's order. ``comparison`` sees what
        is sent and what has arrived."""
        self._plan, self._group, self._target = plan, group, target
        self._needs, self._comparison = needs, comparison
        self._coming = shards
        self._shards: dict[str, Tensor] = {}  # of the tensors that are in flight
        pieces = [piece for bucket in plan.buckets for piece in bucket.pieces]
        self._missing = Counter(layer for piece in pieces for layer in self._layers(piece))  # that a layer waits for
        in_flight = min(2, len(plan.buckets))
        self._buffers = [torch.empty(plan.largest_exchange, dtype=dtype, device=group.device) for _ in range(in_flight)]

    def run(self) -> None:
        """Send, receive and write everything."""
        under_way: tuple[Bucket, Tensor, Any] | None = None
        for i, bucket in enumerate(self._plan.buckets):
            following = self._start(bucket, self._buffers[i % len(self._buffers)])
            if under_way is not None:
                self._finish(*under_way)
            under_way = following
        if under_way is not None:
            self._finish(*under_way)
        if self._target is not None:
            self._target.finish_all()

    def _start(self, bucket: Bucket, buffer: Tensor) -> tuple[Bucket, Tensor, Any]:
        """Pack what is to be sent, in the type that generation has, and start the exchange; as ``_finish`` takes it."""
        while bucket.pieces[-1].tensor not in self._shards:
            name, shard = next(self._coming)
            self._shards[name] = shard
        sending, receiving = sum(bucket.send_counts), sum(bucket.receive_counts)
        sent, received = buffer[:sending], buffer[sending : sending + receiving]
        for transfer, place in _places(bucket.sends, sent):
            tensor = transfer.piece.tensor
            place.copy_(self._shards[tensor][within(transfer.box, self._plan.own[tensor])])
        return bucket, received, self._group.all_to_all(received, sent, bucket.receive_counts, bucket.send_counts)

    def _finish(self, bucket: Bucket, received: Tensor, work: Any) -> None:
        """Write what came and what this rank had itself, and have each layer prepared that is complete."""
        work.wait()
        arrived: dict[Piece, list[tuple[Transfer, Tensor]]] = {}
        for transfer, values in _places(bucket.receives, received):
            arrived.setdefault(transfer.piece, []).append((transfer, values))
        for piece in bucket.pieces:
            needs = self._needs.get(piece.tensor, [])
            for transfer, values in arrived.get(piece, ()):
                self._engine.write(needs[transfer.need], transfer.box, values)
            if piece.part == piece.parts - 1:
                shard = self._shards.pop(piece.tensor)
                for i, box in self._plan.local.get(piece.tensor, ()):
                    self._engine.write(needs[i], box, shard[within(box, self._plan.own[piece.tensor])])
                self._comparison.sent(piece.tensor, shard)
            for layer in self._layers(piece):
                self._missing[layer] -= 1
                if not self._missing[layer]:
                    self._comparison.arrived(layer)
                    self._engine.finish(layer)

    @property
    def _engine(self) -> LiveWeights:
        assert self._target is not None, "who needs a tensor generates"
        return self._target

    def _layers(self, piece: Piece) -> set[str]:
        return {need.layer for need in self._needs.get(piece.tensor, ())}


def _places(transfers: tuple[Transfer, ...], buffer: Tensor) -> Iterator[tuple[Transfer, Tensor]]:
    """Each transfer with its place in the buffer, in the shape of its box."""
    offset = 0
    for transfer in transfers:
        size = numel(transfer.box)
        yield transfer, buffer[offset : offset + size].view([stop - start for start, stop in transfer.box])
        offset += size
