"""In which calls attention over spans of rows is computed, and where the rows of each lie."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from train.batch.packed import offsets
from train.batch.prompt_rows import Span
from train.model.ulysses import Ulysses

_CALL = 3000
"""What one more call of attention costs, in the unit of ``_cost``: about 0.2 ms on the CPU this was measured on."""


class Call(NamedTuple):
    """Spans of like length that are computed at once, the shorter ones filled up by repeating their last row; if they
    have a prefix, they all have that one."""

    spans: int
    length: int
    prefix_start: int
    prefix: int
    rows: Tensor
    """int64 [spans · length]: the rows of each span."""
    kept: Tensor | None
    """int64: which of ``rows`` are not filling; None for all."""


class Lengths(NamedTuple):
    """Of packed sequences, as flash attention takes them: offsets int32 [n + 1] of queries and of keys, the longest."""

    queries: Tensor
    keys: Tensor
    longest: int
    longest_keys: int


class Shared(NamedTuple):
    """Responses and the prompts that they share. All responses to one prompt are one sequence of ``lengths``."""

    responses: Tensor
    """int64: rows of the responses, by prompt."""
    prompts: Tensor
    """int64: rows of the prompts, each once."""
    lengths: Lengths


class Packing:
    """Where the spans of a packed batch lie; made once per forward pass, used by every layer.

    Not a dataclass: FSDP2 takes those apart and builds them anew at each layer.
    """

    def __init__(self, spans: list[Span], device: torch.device, ulysses: Ulysses | None = None) -> None:
        """``spans`` cover all rows, in order."""
        self.ulysses = ulysses
        self.calls = [_call([spans[s] for s in call], device) for call in like_lengths(spans)]
        lengths = [span.length for span in spans]
        self.lengths = _lengths(lengths, lengths, device)
        self.with_prefixes = _lengths(lengths, [span.prefix + span.length for span in spans], device)
        self.shared = _shared(spans, device)
        self.keys = None if self.shared is None else _keys(spans).to(device)
        # Row i of what the calls compute is row order[i] of the batch; rows[u] is where row u is computed.
        order = torch.cat([call.rows for call in self.calls])
        places = torch.arange(len(order), device=device)
        count = sum(lengths)
        rows = torch.full((count,), len(order), device=device).scatter_reduce(0, order, places, "amin")
        self.order = None if torch.equal(order, torch.arange(count, device=device)) else order
        self.rows = rows


def _call(spans: list[Span], device: torch.device) -> Call:
    first = spans[0]
    places = np.arange(first.length)
    rows = np.concatenate([span.start + np.minimum(places, span.length - 1) for span in spans])
    kept = np.concatenate([places < span.length for span in spans])
    return Call(
        *(len(spans), first.length, first.prefix_start, first.prefix),
        torch.from_numpy(rows).to(device),
        None if kept.all() else torch.from_numpy(kept.nonzero()[0]).to(device),
    )


def _lengths(queries: list[int], keys: list[int], device: torch.device) -> Lengths:
    cu_queries, cu_keys = (offsets(torch.tensor(x)).to(device, torch.int32) for x in (queries, keys))
    return Lengths(cu_queries, cu_keys, max(queries), max(keys))


def _shared(spans: list[Span], device: torch.device) -> Shared | None:
    of_prompt: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        if span.prefix:
            of_prompt.setdefault((span.prefix_start, span.prefix), []).append(span)
    if not of_prompt:
        return None
    responses = [np.arange(s.start, s.start + s.length) for some in of_prompt.values() for s in some]
    prompts = [np.arange(start, start + length) for start, length in of_prompt]
    together = [sum(span.length for span in some) for some in of_prompt.values()]
    rows, shared = (torch.from_numpy(np.concatenate(x)).to(device) for x in (responses, prompts))
    return Shared(rows, shared, _lengths(together, [length for _, length in of_prompt], device))


def _keys(spans: list[Span]) -> Tensor:
    """int64: the rows that each span attends to, those of its prefix first."""
    parts = []
    for span in spans:
        parts.append(np.arange(span.prefix_start, span.prefix_start + span.prefix))
        parts.append(np.arange(span.start, span.start + span.length))
    return torch.from_numpy(np.concatenate(parts))


def like_lengths(spans: list[Span]) -> list[list[int]]:
    """Which spans to compute in one call each, the longest first in each, all with one prefix or with none.

    A span joins the one before it until the wasted computation costs as much as a call.
    """
    calls: list[list[int]] = []
    waste = 0
    prefixes = [(span.prefix, span.prefix_start if span.prefix else 0) for span in spans]
    for s in sorted(range(len(spans)), key=lambda s: (*(-n for n in prefixes[s]), -spans[s].length, s)):
        joins = bool(calls) and prefixes[calls[-1][0]] == prefixes[s]
        more = _cost(spans[calls[-1][0]]) - _cost(spans[s]) if joins else 0
        if not joins or waste + more > _CALL:
            calls.append([])
            waste = more = 0
        calls[-1].append(s)
        waste += more
    return calls


def _cost(span: Span) -> int:
    """What is done for each row, and for each pair. Measured: a row costs as much as 60 scores."""
    return span.length * (span.prefix + span.length + 60)
