"""Attention by torch's kernel on a CPU, which ``scaled_dot_product_attention`` calls too, with its logsumexps.

In float32 or wider: measured, the kernel takes up to four times as long backward in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from train.model.attention.calls import Call, Packing
from train.model.attention.shared import Gradients, Saved

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuKernels:
    """As ``train.model.attention.shared.Kernels``."""

    def own(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> tuple[Tensor, Tensor]:
        out = torch.empty(q.shape, dtype=_exact(q))
        lse = torch.empty(q.shape[1], len(q), dtype=_exact(q))
        for call in packing.calls:
            some, sums = _FORWARD(*(_by_span(x, call) for x in (q, k, v)), 0.0, True, scale=scale)
            _write(out, some, call)
            _write(lse.T, sums, call)
        return out, lse

    def own_backward(self, of: Saved, packing: Packing, scale: float) -> Gradients:
        dq, dk, dv = _room_for_gradients(of)
        for call in packing.calls:
            d, a, b, c, o, sums = (_by_span(x, call) for x in (*of[:-1], of.lse.T))
            if call.kept is not None:  # what fills a span up gets no gradient, and gives none
                filling = torch.ones(call.spans * call.length, dtype=torch.bool)
                filling[call.kept] = False
                d.masked_fill_(filling.view(call.spans, 1, call.length, 1), 0)
            for total, some in zip((dq, dk, dv), _BACKWARD(d, a, b, c, o, sums, 0.0, True, scale=scale), strict=True):
                _write(total, some, call)
        return dq, dk, dv

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> tuple[Tensor, Tensor]:
        out = torch.empty(q.shape, dtype=_exact(q))
        lse = torch.empty(q.shape[1], len(q), dtype=_exact(q))
        for at, to in _families(packing):
            some, sums = _FORWARD(_grouped(q[at], k), *(_of_heads(x[to]) for x in (k, v)), 0.0, False, scale=scale)
            out[at] = _by_row(some, q)
            lse[:, at] = _by_row(sums[..., None], q)[..., 0].T
        return out, lse

    def prefix_backward(self, of: Saved, packing: Packing, scale: float) -> Gradients:
        dq, dk, dv = _room_for_gradients(of)
        for at, to in _families(packing):
            d, a, o = (_grouped(x[at], of.k) for x in (of.gradient, of.q, of.out))
            sums = _grouped(of.lse[:, at].T[..., None], of.k)[..., 0]
            b, c = (_of_heads(x[to]) for x in (of.k, of.v))
            some = _BACKWARD(d, a, b, c, o, sums, 0.0, False, scale=scale)
            dq[at] = _by_row(some[0], of.q)
            dk[to], dv[to] = (x[0].transpose(0, 1) for x in some[1:])
        return dq, dk, dv


def _room_for_gradients(of: Saved) -> Gradients:
    dq, dk, dv = (torch.empty(x.shape, dtype=_exact(x)) for x in (of.q, of.k, of.v))
    return dq, dk, dv


def _families(packing: Packing) -> Iterator[tuple[slice, slice]]:
    """Rows of the responses to one prompt, of those to any; and of that prompt, of all that are shared."""
    shared = packing.shared
    assert shared is not None
    queries, keys = shared.lengths.queries.tolist(), shared.lengths.keys.tolist()
    for i in range(len(queries) - 1):
        yield slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])


def _by_span(x: Tensor, call: Call) -> Tensor:
    """[rows, heads, …] → [spans, heads, length, …] of the call's rows."""
    x = x.index_select(0, call.rows).to(_exact(x))
    return x.unflatten(0, (call.spans, call.length)).transpose(1, 2)


def _write(rows: Tensor, some: Tensor, call: Call) -> None:
    """Put [spans, heads, length, …] where the call's rows are, but for what filled it up."""
    some, at = some.transpose(1, 2).flatten(0, 1), call.rows
    if call.kept is not None:
        some, at = some[call.kept], at[call.kept]
    rows.index_copy_(0, at, some)


def _of_heads(x: Tensor) -> Tensor:
    """[rows, heads, D] → [1, heads, rows, D]"""
    return x.to(_exact(x)).transpose(0, 1)[None]


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[rows, query heads, D] → [1, heads of ``k``, rows · group, D]: all queries of a head in one sequence."""
    return x.to(_exact(x)).unflatten(1, (k.shape[1], -1)).transpose(0, 1).flatten(1, 2)[None]


def _by_row(x: Tensor, q: Tensor) -> Tensor:
    """[1, heads, rows · group, D] → [rows, query heads, D]"""
    group = q.shape[1] // x.shape[1]
    return x[0].unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
