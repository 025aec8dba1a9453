"""In which calls attention over spans of rows is computed, and where the rows of each lie."""

from __future__ import annotations

import torch
from torch import Tensor

from train.batch.packed import offsets, places
from train.batch.prompt_rows import Span
from train.model.ulysses import Ulysses

_CALL = 3000
"""What one more call of attention costs, in the unit of ``_cost``: about 0.2 ms on the CPU this was measured on."""


class Packing:
    """Where the spans of a packed batch lie; made once per forward pass, used by every layer.

    Not a dataclass: FSDP2 takes those apart and builds them anew at each layer.
    """

    def __init__(self, spans: list[Span], device: torch.device, ulysses: Ulysses | None = None) -> None:
        """``spans`` cover all rows, in order."""
        self.ulysses = ulysses
        prefixes = [span.prefix for span in spans]
        calls = like_lengths([span.length for span in spans], prefixes)
        self.shapes = [(len(call), spans[call[0]].length, spans[call[0]].prefix) for call in calls]
        every = _Laid(spans, list(range(len(spans))), None)
        self.cu_queries, self.cu_keys = (
            offsets(x).to(device, torch.int32) for x in (every.lengths, every.lengths + every.prefixes)
        )
        self.longest, self.longest_keys = int(every.lengths.max()), int((every.lengths + every.prefixes).max())
        self.keys = every.keys().to(device) if any(prefixes) else None
        # Row i of what the calls compute is row order[i] of the batch; rows[u] is where row u is computed.
        filled = torch.tensor([length for count, length, _ in self.shapes for _ in range(count)])
        laid = _Laid(spans, [s for call in calls for s in call], filled)
        order = laid.queries()
        rows = torch.empty(int(every.lengths.sum()), dtype=torch.int64)
        real = (laid.place <= laid.last).nonzero().flatten()
        rows[order[real]] = real
        in_order = torch.equal(order, torch.arange(len(rows)))
        self.order = None if in_order else order.to(device)
        self.key_order = self.order if self.keys is None else laid.keys().to(device)
        self.rows = rows.to(device)


class _Laid:
    """Spans laid end to end in some order, each filled up to a length by repeating its last row."""

    def __init__(self, spans: list[Span], order: list[int], filled: Tensor | None) -> None:
        starts, lengths, self.prefix_starts, self.prefixes = torch.tensor(
            [(s.start, s.length, s.prefix_start, s.prefix) for s in (spans[i] for i in order)]
        ).unbind(1)
        self.starts, self.lengths = starts, lengths
        self.filled = lengths if filled is None else filled
        self.place = places(self.filled)
        self.last = (lengths - 1).repeat_interleave(self.filled)

    def queries(self) -> Tensor:
        """int64: rows of the spans."""
        return self.starts.repeat_interleave(self.filled) + self.place.minimum(self.last)

    def keys(self) -> Tensor:
        """int64: rows of the prefix of each span, then of the span."""
        widths = self.prefixes + self.filled
        place, prefix = places(widths), self.prefixes.repeat_interleave(widths)
        own = (place - prefix).minimum((self.lengths - 1).repeat_interleave(widths))
        return torch.where(
            place < prefix,
            self.prefix_starts.repeat_interleave(widths) + place,
            self.starts.repeat_interleave(widths) + own,
        )


def like_lengths(lengths: list[int], prefixes: list[int]) -> list[list[int]]:
    """Spans to compute in one call each, the longest first in each, all with prefixes of one length.

    A span joins the one before it until the wasted computation costs as much as a call.
    """
    calls: list[list[int]] = []
    waste = 0
    for s in sorted(range(len(lengths)), key=lambda s: (-prefixes[s], -lengths[s], s)):
        joins = bool(calls) and prefixes[calls[-1][0]] == prefixes[s]
        more = _cost(lengths[calls[-1][0]], prefixes[s]) - _cost(lengths[s], prefixes[s]) if joins else 0
        if not joins or waste + more > _CALL:
            calls.append([])
            waste = more = 0
        calls[-1].append(s)
        waste += more
    return calls


def _cost(length: int, prefix: int) -> int:
    """Of one span: what is done for each row, and for each pair. Measured: a row costs as much as 60 scores."""
    return length * (prefix + length + 60)
