"""The plan: which rank sends which slice of which tensor to whom, and in which bucket. Pure: shapes in, slices out.

Shards are boxes that ranks hold, and what a rank needs is boxes too. Where a box that is needed meets a shard that the
rank does not hold, there is a transfer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.weight_sync.slices import Box, Held, intersection, numel, rows_of


@dataclass(frozen=True)
class Needed:
    """What the ranks need: boxes by tensor, for each kind of rank; ``kind_of[rank]`` is a rank's kind.

    All ranks with the same place in a tensor-parallel group are of one kind.
    """

    kinds: tuple[Mapping[str, tuple[Box, ...]], ...]
    kind_of: tuple[int, ...]

    def by(self, rank: int, tensor: str) -> tuple[Box, ...]:
        return self.kinds[self.kind_of[rank]].get(tensor, ())


@dataclass(frozen=True)
class Piece:
    """Part ``part`` of ``parts`` of a tensor: that part of the rows of each of its shards."""

    tensor: str
    part: int
    parts: int


@dataclass(frozen=True)
class Transfer:
    """``box`` goes from rank ``source`` into the ``need``-th box that rank ``target`` needs of the piece's tensor."""

    piece: Piece
    source: int
    target: int
    need: int
    box: Box


@dataclass(frozen=True)
class Bucket:
    """One exchange, as one rank sees it. ``sends`` are in order of target, ``receives`` in order of source, and what
    one rank sends another is in the same order at both."""

    pieces: tuple[Piece, ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    send_counts: tuple[int, ...]
    """Elements for each rank."""
    receive_counts: tuple[int, ...]
    """Elements from each rank."""


@dataclass(frozen=True)
class Plan:
    """One rank's part of the resharding."""

    rank: int
    ranks: int
    buckets: tuple[Bucket, ...]
    own: Mapping[str, Box]
    """The shard that the rank holds, by tensor; without those of which it holds nothing."""
    local: Mapping[str, tuple[tuple[int, Box], ...]]
    """What it needs and holds itself, (need, box) by tensor: never sent."""

    @property
    def received(self) -> int:
        """Elements that the rank receives."""
        return sum(sum(bucket.receive_counts) for bucket in self.buckets)

    def supplied(self, tensor: str) -> Iterator[tuple[int, Box]]:
        """(rank, box) of everything of a tensor that comes from this rank's shard, to itself and to others."""
        yield from ((self.rank, box) for _, box in self.local.get(tensor, ()))
        for bucket in self.buckets:
            yield from ((t.target, t.box) for t in bucket.sends if t.piece.tensor == tensor)

    @property
    def largest_exchange(self) -> int:
        """Elements that the rank's largest exchange sends and receives."""
        return max((sum(b.send_counts) + sum(b.receive_counts) for b in self.buckets), default=0)


def make_plan(rank: int, held: Mapping[str, Held], needed: Needed, *, exchange_elements: int) -> Plan:
    """Rank ``rank``'s part; every rank makes its own of the same arguments, and they fit together.

    Args:
        held: by tensor, in the order in which they are to come.
        exchange_elements: most that a rank sends and receives in one exchange. Only a single row of every shard of a
            tensor may be more.

    Raises:
        ValueError: a rank needs a tensor that nobody holds, or more of it than there is.
    """
    _require_held(held, needed)
    own = {tensor: box for tensor, place in held.items() for box, holders in place.shards if rank in holders}
    local = {
        tensor: tuple((i, b) for i, need in enumerate(needed.by(rank, tensor)) if (b := intersection(need, box)))
        for tensor, box in own.items()
    }
    moves = _Moves(rank, needed)
    buckets = tuple(_bucket(pieces, held, moves) for pieces in _packed(held, moves, exchange_elements))
    return Plan(rank, len(needed.kind_of), buckets, own, local)


def elements_received(held: Mapping[str, Held], needed: Needed) -> list[int]:
    """Elements that each rank receives in all, by the same rules and without listing the transfers."""
    moves = _Moves(-1, needed)
    received = [moves.of(Piece(tensor, 0, 1), place).received for tensor, place in held.items()]
    return [int(n) for n in np.sum(received, axis=0)]


# --------------------------------------------------------------------------------------------- who sends what


def _sender(place: int, places: int, holders: tuple[int, ...]) -> int:
    """Who of those that hold a shard gives it to the ``place``-th of so many ranks that need something: spread evenly,
    by neighbourhood."""
    return holders[place * len(holders) // places]


@dataclass(frozen=True)
class _Moved:
    """What moves of a piece: elements that each rank sends, and receives (int64 [ranks]); and what one rank does of it,
    each as (source, target, need, box), in the same order for any two ranks."""

    sent: np.ndarray
    received: np.ndarray
    sends: list[tuple[int, int, int, Box]]
    receives: list[tuple[int, int, int, Box]]

    @property
    def most(self) -> int:
        """Elements that the rank with the most sends and receives."""
        return int((self.sent + self.received).max())


class _Moves:
    """What moves, as rank ``rank`` sees it. Of tensors that lie and are needed alike it is worked out once."""

    def __init__(self, rank: int, needed: Needed) -> None:
        self.rank, self.needed, self.ranks = rank, needed, len(needed.kind_of)
        self._targets = [[r for r in range(self.ranks) if needed.kind_of[r] == k] for k in range(len(needed.kinds))]
        receivers = [r for r in range(self.ranks) if needed.kinds[needed.kind_of[r]]]
        self._places = {rank: place for place, rank in enumerate(receivers)}
        self._known: dict[Any, _Moved] = {}

    def of(self, piece: Piece, held: Held) -> _Moved:
        needs = tuple(boxes.get(piece.tensor, ()) for boxes in self.needed.kinds)
        key = (held, needs, piece.part, piece.parts)
        if key not in self._known:
            self._known[key] = self._work_out(*key)
        return self._known[key]

    def _work_out(self, held: Held, needs: tuple[tuple[Box, ...], ...], part: int, parts: int) -> _Moved:
        moved = _Moved(np.zeros(self.ranks, np.int64), np.zeros(self.ranks, np.int64), [], [])
        for shard, holders in held.shards:
            rows = rows_of(shard, part, parts)
            for boxes, targets in zip(needs, self._targets, strict=True):
                wanted = [(i, box) for i, need in enumerate(boxes) if (box := intersection(need, rows))]
                elements = sum(numel(box) for _, box in wanted)
                for target in targets if wanted else ():
                    if target in holders:
                        continue
                    source = _sender(self._places[target], len(self._places), holders)
                    moved.sent[source] += elements
                    moved.received[target] += elements
                    if self.rank in (source, target):
                        own = moved.sends if source == self.rank else moved.receives
                        own += [(source, target, i, box) for i, box in wanted]
        return moved


def _bucket(pieces: Sequence[Piece], held: Mapping[str, Held], moves: _Moves) -> Bucket:
    sends = [Transfer(p, *move) for p in pieces for move in moves.of(p, held[p.tensor]).sends]
    receives = [Transfer(p, *move) for p in pieces for move in moves.of(p, held[p.tensor]).receives]
    send_counts, receive_counts = [0] * moves.ranks, [0] * moves.ranks
    for transfer in sends:
        send_counts[transfer.target] += numel(transfer.box)
    for transfer in receives:
        receive_counts[transfer.source] += numel(transfer.box)
    return Bucket(
        tuple(pieces),
        tuple(sorted(sends, key=lambda t: t.target)),  # a stable sort: the order within a target stays
        tuple(sorted(receives, key=lambda t: t.source)),
        tuple(send_counts),
        tuple(receive_counts),
    )


def _packed(held: Mapping[str, Held], moves: _Moves, limit: int) -> Iterator[list[Piece]]:
    """The pieces, in order, in groups of which no rank sends and receives more than ``limit`` elements together."""
    group: list[Piece] = []
    load = np.zeros(moves.ranks, dtype=np.int64)
    for tensor, place in held.items():
        rows = max((box[0][1] - box[0][0] for box, _ in place.shards), default=1) if place.shape else 1
        parts = min(rows, max(1, -(-moves.of(Piece(tensor, 0, 1), place).most // limit)))
        while parts < rows and any(moves.of(Piece(tensor, p, parts), place).most > limit for p in range(parts)):
            parts += 1  # rows do not divide evenly
        for part in range(parts):
            piece = Piece(tensor, part, parts)
            moved = moves.of(piece, place)
            more = moved.sent + moved.received
            if group and int((load + more).max()) > limit:
                yield group
                group, load = [], np.zeros_like(load)
            group.append(piece)
            load = load + more
    if group:
        yield group


def _require_held(held: Mapping[str, Held], needed: Needed) -> None:
    for boxes in needed.kinds:
        for tensor, needs in boxes.items():
            if tensor not in held:
                raise ValueError(f"generation needs {tensor}, which no training rank holds; the two models differ")
            whole = tuple((0, size) for size in held[tensor].shape)
            for need in needs:
                if len(need) != len(whole) or any(a < 0 or b > n for (a, b), (_, n) in zip(need, whole, strict=True)):
                    raise ValueError(
                        f"generation needs {need} of {tensor}, which has the shape {held[tensor].shape} in training"
                    )
