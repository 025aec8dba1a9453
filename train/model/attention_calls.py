"""In which calls attention over spans of rows is computed, and where the rows of each lie."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from train.batch.packed import offsets
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
        lengths, prefixes = [span.length for span in spans], [span.prefix for span in spans]
        calls = like_lengths(lengths, prefixes)
        self.shapes = [(len(call), lengths[call[0]], prefixes[call[0]]) for call in calls]
        queries = torch.tensor(lengths)
        keys = queries + torch.tensor(prefixes)
        self.cu_queries, self.cu_keys = (offsets(x).to(device, torch.int32) for x in (queries, keys))
        self.longest, self.longest_keys = int(queries.max()), int(keys.max())
        self.keys = _rows(spans, lengths)[1].to(device) if any(prefixes) else None
        # Row i of what the calls compute is row order[i] of the batch; rows[u] is where row u is computed.
        filled = [length for count, length, _ in self.shapes for _ in range(count)]
        order, key_order = _rows([spans[s] for call in calls for s in call], filled)
        places = torch.arange(len(order))
        rows = torch.full((sum(lengths),), len(order)).scatter_reduce(0, order, places, "amin")
        self.order = None if torch.equal(order, torch.arange(len(rows))) else order.to(device)
        self.key_order = self.order if self.keys is None else key_order.to(device)
        self.rows = rows.to(device)


def _rows(spans: list[Span], filled: list[int]) -> tuple[Tensor, Tensor]:
    """int64, twice: the rows of the spans, each filled up to a length by repeating its last; and of the same with the
    rows of its prefix before each."""
    queries, keys = [], []
    for span, length in zip(spans, filled, strict=True):
        own = np.minimum(np.arange(span.start, span.start + length), span.start + span.length - 1)
        queries.append(own)
        keys += [np.arange(span.prefix_start, span.prefix_start + span.prefix), own]
    return torch.from_numpy(np.concatenate(queries)), torch.from_numpy(np.concatenate(keys))


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
