"""Plain attention of responses that share a prompt, which they attend to where it lies.

Each of the two parts of the keys, a span's own and its prefix, has an attention of its own, and they are merged by
their logsumexps. Given the merged output and logsumexp, the gradient of each part is what its own kernel computes
(FlashAttention-2, arXiv 2307.08691, algorithm 2; as between the blocks of Ring Attention, arXiv 2310.01889).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.model.attention.calls import Packing

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""


class Saved(NamedTuple):
    """What the gradient of a part is computed from: ``gradient``, ``out`` and ``lse`` are the merged attention's."""

    gradient: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Kernels(Protocol):
    """Attention of a device. ``own``: of each span to itself, causal, all rows. ``prefix``: of the responses to the
    prompts that they share, all of it: q has the rows of ``packing.shared.responses``, k and v of ``prompts``.

    Forward gives (out [rows, heads, D], logsumexp [heads, rows]) in any floating-point type.
    """

    def own(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> tuple[Tensor, Tensor]: ...

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> tuple[Tensor, Tensor]: ...

    def own_backward(self, of: Saved, packing: Packing, scale: float) -> Gradients: ...

    def prefix_backward(self, of: Saved, packing: Packing, scale: float) -> Gradients: ...


@torch.compiler.disable
def attend_to_shared(q: Tensor, k: Tensor, v: Tensor, packing: Packing, kernels: Kernels, scale: float) -> Tensor:
    """[rows, heads, D] of each, k and v with as many heads as q or a divisor of them → [rows, query heads, D].

    Gradients of a prompt's keys and values add up in float32, whatever the inputs are in.
    """
    out: Tensor = _Shared.apply(q, k, v, packing, kernels, scale)
    return out


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, kernels: Kernels, scale: float) -> Tensor:
        shared = packing.shared
        assert shared is not None
        out, lse = kernels.own(q, k, v, packing, scale)
        to = shared.responses
        prompt_k, prompt_v = (x.index_select(0, shared.prompts) for x in (k, v))
        of_prefix, prefix_lse = kernels.prefix(q.index_select(0, to), prompt_k, prompt_v, packing, scale)
        own_lse = lse.index_select(1, to)
        both = torch.logaddexp(own_lse, prefix_lse)
        share, rest = ((x - both).exp().T[..., None] for x in (own_lse, prefix_lse))
        merged = out.index_select(0, to) * share
        merged += of_prefix * rest
        out.index_copy_(0, to, merged.to(out.dtype))
        lse.index_copy_(1, to, both)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packing, ctx.kernels, ctx.scale = packing, kernels, scale
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        shared = ctx.packing.shared
        to, prompts = shared.responses, shared.prompts
        own = ctx.kernels.own_backward(Saved(gradient, q, k, v, out, lse), ctx.packing, ctx.scale)
        d, a, b, c, o = (x[rows] for x, rows in ((gradient, to), (q, to), (k, prompts), (v, prompts), (out, to)))
        of_prefix = ctx.kernels.prefix_backward(Saved(d, a, b, c, o, lse[:, to]), ctx.packing, ctx.scale)
        exact = torch.promote_types(q.dtype, torch.float32)
        sums = (
            a.to(exact).index_add_(0, at, b.to(exact)).to(q.dtype)
            for a, b, at in zip(own, of_prefix, (to, prompts, prompts), strict=True)
        )
        return *sums, None, None, None
