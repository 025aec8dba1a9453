"""Attention for which torch has no kernel on every device: soft caps, sinks, windows, prompts that responses share.

Queries are taken in tiles. Of a tile all scores are computed at once, and again in backward, as in FlashAttention
(arXiv 2205.14135) without its tiles over keys: so beside inputs and outputs there is one tile of scores at a time, and
what is kept grows with the rows, not with their square. Responses read the keys and values of their prompt where those
lie, and the gradients of all of them add up in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.model.attention.calls import Call

TILE: Final = {"cpu": 2**19, "cuda": 2**25}
"""Scores of a tile, by device; if rows of so many keys and heads are more than that, as few rows as ``ROWS`` says."""

ROWS: Final = (16, 256)
"""Rows of a tile, at least and at most."""


@dataclass(frozen=True)
class Scoring:
    """What becomes of the product of a query and a key."""

    scaling: float
    softcap: float | None = None
    """Scores are capped to it by tanh (Gemma 2, arXiv 2408.00118, section 2)."""
    window: int | None = None
    """A token sees this many, itself included."""


@torch.compiler.disable
def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, calls: list[Call], scoring: Scoring) -> Tensor:
    """Causal attention within each span, and from it to its prefix.

    Args:
        q: [rows, query heads, D].
        k, v: [rows, heads, D] and [rows, heads, E], with as many heads or a divisor of them.
        sinks: [query heads]: a score for each head that takes part in the softmax and adds nothing.
        calls: they cover all rows.

    Returns:
        [rows, query heads, E]
    """
    out: Tensor = _Attend.apply(q, k, v, sinks, calls, scoring)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        calls: list[Call],
        scoring: Scoring,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.calls, ctx.scoring = calls, scoring
        out = q.new_empty(*q.shape[:2], v.shape[2])
        for call in calls:
            part = _Part(q, k, v, sinks, call, scoring)
            made = part.q.new_empty(*part.q.shape[:-1], v.shape[2])
            for tile in part.tiles():
                weights, _ = part.weights(tile)
                mixed = part.mixed(tile, part.of_keys(weights))
                made[tile.queries] = mixed.unflatten(2, (part.group, tile.count))
            part.write(out, made)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks = ctx.saved_tensors
        exact = _exact(q)
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=exact, device=x.device) for x in (k, v))
        dsinks = None if sinks is None else torch.zeros(sinks.shape, dtype=exact, device=sinks.device)
        for call in ctx.calls:
            part = _Part(q, k, v, sinks, call, ctx.scoring)
            part.backward(gradient, dq, dk, dv, dsinks)
        grads = (dq, dk.to(k.dtype), dv.to(v.dtype), None if dsinks is None else dsinks.to(sinks.dtype))
        return *grads, None, None


@dataclass(frozen=True)
class _Tile:
    """Some rows of some spans: (all, spans, all, rows) of [heads, spans, group, rows, D]; the keys that they see."""

    queries: tuple[slice, ...]
    own: tuple[slice, ...]
    """Of [heads, spans, rows, D]."""
    prefix: slice
    first: int
    count: int
    """Its rows, the first of which is row ``first`` of a span."""


class _Part:
    """One call: its rows in the layout in which they are multiplied.

    A group is the query heads that share a head of keys and values. On a CPU all is in float32 or wider: its products
    in bfloat16 take longer backward.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        call: Call,
        scoring: Scoring,
    ) -> None:
        self.call, self.scoring, self.exact = call, scoring, _exact(q)
        self.heads, self.group = k.shape[1], q.shape[1] // k.shape[1]
        self.dtype = self.exact if q.device.type == "cpu" else q.dtype
        self.q = self._by_group(q)
        self.k, self.v = (self._by_group(x)[:, :, 0].contiguous() for x in (k, v))
        inside = slice(call.prefix_start, call.prefix_start + call.prefix)
        self.prefix_k, self.prefix_v = (x[inside].transpose(0, 1).to(self.dtype) for x in (k, v))
        self.sinks = None if sinks is None else sinks.to(self.exact).view(self.heads, 1, self.group, 1, 1)

    def _by_group(self, x: Tensor) -> Tensor:
        """[rows, heads · group, D] → [heads, spans, group, length, D]."""
        x = x.index_select(0, self.call.rows).to(self.dtype)
        return x.view(self.call.spans, self.call.length, self.heads, -1, x.shape[-1]).permute(2, 0, 3, 1, 4)

    def _by_row(self, x: Tensor) -> Tensor:
        """[heads, spans, group, length, D] → [spans · length, heads · group, D]."""
        return x.permute(1, 3, 0, 2, 4).reshape(self.call.spans * self.call.length, -1, x.shape[-1])

    def write(self, rows: Tensor, made: Tensor) -> None:
        """Put what was made, in the layout of ``q``, where the call's rows are; but not what filled it up."""
        made, at = self._by_row(made), self.call.rows
        if self.call.kept is not None:
            made, at = made[self.call.kept], at[self.call.kept]
        rows.index_copy_(0, at, made.to(rows.dtype))

    def tiles(self) -> Iterator[_Tile]:
        call, window = self.call, self.scoring.window
        each = self.heads * self.group * (call.prefix + call.length)
        limit = TILE["cpu" if self.q.device.type == "cpu" else "cuda"]
        rows = min(call.length, max(ROWS[0], min(ROWS[1], limit // each)))
        spans = max(1, limit // (each * rows))
        every = slice(None)
        for n in range(0, call.spans, spans):
            some = slice(n, min(n + spans, call.spans))
            for first in range(0, call.length, rows):
                stop = min(first + rows, call.length)
                unseen = 0 if window is None else max(0, call.prefix + first - window + 1)
                yield _Tile(
                    (every, some, every, slice(first, stop)),
                    (every, some, slice(max(0, unseen - call.prefix), stop)),
                    slice(min(unseen, call.prefix), call.prefix),
                    first,
                    stop - first,
                )

    def weights(self, tile: _Tile) -> tuple[Tensor, Tensor | None]:
        """[heads, spans, group · rows, keys]: of the prefix first, of the sink last; and the tanh of the scores if they
        are capped. In float32 or wider."""
        q = self._flat(self.q[tile.queries])
        scores = q @ self.k[tile.own].transpose(2, 3)
        if (keys := self.prefix_k[:, tile.prefix]).shape[1]:
            scores = torch.cat([(q.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, q.shape[1:3]), scores], -1)
        scores = scores.to(self.exact).mul_(self.scoring.scaling)
        tanh = None
        if self.scoring.softcap is not None:
            tanh = scores.div_(self.scoring.softcap).tanh_()
            scores = tanh * self.scoring.softcap
        by_row = scores.unflatten(2, (self.group, tile.count))
        self._hide(by_row, tile)
        if self.sinks is not None:
            sink = self.sinks.expand(*by_row.shape[:-1], 1).flatten(2, 3)
            scores = torch.cat([scores, sink], -1)
        return torch.softmax(scores, -1), tanh

    def _hide(self, scores: Tensor, tile: _Tile) -> None:
        """What a row does not see: the rows after it, which are among the last keys, and those before its window."""
        places = torch.arange(tile.count, device=scores.device)
        scores[..., -tile.count :].masked_fill_(places > places[:, None], -torch.inf)
        window = self.scoring.window
        if window is None or self.call.prefix + tile.first + tile.count <= window:
            return
        keys = scores.shape[-1]
        # The last key is the last row's own.
        back = (places[:, None] + keys - tile.count) - torch.arange(keys, device=scores.device)
        scores.masked_fill_(back >= window, -torch.inf)

    def of_keys(self, weights: Tensor) -> Tensor:
        """Without the sink's."""
        return weights if self.sinks is None else weights[..., :-1]

    def mixed(self, tile: _Tile, weights: Tensor) -> Tensor:
        """[heads, spans, group · rows, E]: the values by their weights."""
        weights, prefix = weights.to(self.dtype), self.prefix_v[:, tile.prefix]
        of_prefix, own = weights.split([prefix.shape[1], weights.shape[-1] - prefix.shape[1]], -1)
        out = own @ self.v[tile.own]
        if prefix.shape[1]:
            out += (of_prefix.flatten(1, 2) @ prefix).view_as(out)
        return out

    def backward(self, gradient: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dsinks: Tensor | None) -> None:
        """Write the call's rows of ``dq``, and add to the others, from the gradient of what ``write`` wrote."""
        call, scoring = self.call, self.scoring
        dout = self._by_group(gradient)
        if call.kept is not None:
            filling = torch.ones(call.spans * call.length, dtype=torch.bool, device=dout.device)
            filling[call.kept] = False
            dout = dout.masked_fill(filling.view(1, call.spans, 1, call.length, 1), 0)
        made = torch.empty_like(self.q)
        own_k, own_v = (torch.zeros(x.shape, dtype=self.exact, device=x.device) for x in (self.k, self.v))
        inside = slice(call.prefix_start, call.prefix_start + call.prefix)
        prefix_dk, prefix_dv = (x[inside].transpose(0, 1) for x in (dk, dv))
        for tile in self.tiles():
            q, d = self._flat(self.q[tile.queries]), self._flat(dout[tile.queries])
            weights, tanh = self.weights(tile)
            used = self.of_keys(weights)
            keys, prefix = self.prefix_k[:, tile.prefix], slice(0, tile.prefix.stop - tile.prefix.start)
            own = slice(prefix.stop, used.shape[-1])
            used = used.to(self.dtype)
            own_v[tile.own] += used[..., own].transpose(2, 3) @ d
            dweights = d @ self.v[tile.own].transpose(2, 3)
            if prefix.stop:
                prefix_dv[:, tile.prefix] += used[..., prefix].flatten(1, 2).transpose(1, 2) @ d.flatten(1, 2)
                before = d.flatten(1, 2) @ self.prefix_v[:, tile.prefix].transpose(1, 2)
                dweights = torch.cat([before.unflatten(1, d.shape[1:3]), dweights], -1)
            dweights = dweights.to(self.exact)
            if dsinks is not None:  # a sink's value is zero
                dweights = torch.cat([dweights, torch.zeros_like(dweights[..., :1])], -1)
            dscores = torch._softmax_backward_data(dweights, weights, -1, self.exact)
            if dsinks is not None:
                of_sink = dscores[..., -1].unflatten(2, (self.group, tile.count))
                dsinks += of_sink.sum((1, 3)).flatten()
                dscores = dscores[..., :-1]
            if tanh is not None:
                dscores = dscores * (1 - tanh * tanh)
            dscores = (dscores * scoring.scaling).to(self.dtype)
            dq_tile = dscores[..., own] @ self.k[tile.own]
            own_k[tile.own] += dscores[..., own].transpose(2, 3) @ q
            if prefix.stop:
                of_prefix = dscores[..., prefix].flatten(1, 2)
                dq_tile += (of_prefix @ keys).view_as(dq_tile)
                prefix_dk[:, tile.prefix] += of_prefix.transpose(1, 2) @ q.flatten(1, 2)
            made[tile.queries] = dq_tile.unflatten(2, (self.group, tile.count))
        self.write(dq, made)
        for rows, own_rows in ((dk, own_k), (dv, own_v)):
            # Filling is seen by filling alone, whose gradient is zero.
            rows.index_add_(0, call.rows, self._by_row(own_rows[:, :, None]))

    def _flat(self, x: Tensor) -> Tensor:
        """[heads, spans, group, rows, D] → [heads, spans, group · rows, D]."""
        return x.flatten(2, 3)


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
