"""Flash attention over a packed batch, on a GPU, by torch's kernel for sequences of any lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.model.attention.calls import Lengths, Packing
from train.model.attention.shared import Gradients, Saved, attend_to_shared


def flash(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None) -> Tensor:
    """[rows, heads, D] of each → [rows, query heads, D]."""
    if packing.shared is not None and window is None:
        return attend_to_shared(q, k, v, packing, FlashKernels(), scale)
    from torch.nn.attention.varlen import varlen_attn

    lengths = packing.lengths
    if packing.shared is not None:
        # How far back a prompt is seen differs from row to row, which the kernel knows of keys that end with the row.
        lengths = packing.with_prefixes
        k, v = (copied(x, packing.keys) for x in (k, v))
    # Of fewer queries than keys, the last query sees the last key.
    return varlen_attn(
        *(q, k, v, *lengths),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )


class FlashKernels:
    """As ``train.model.attention.shared.Kernels``."""

    def own(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> tuple[Tensor, Tensor]:
        return _forward(q, k, v, packing.lengths, True, scale)

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> tuple[Tensor, Tensor]:
        assert packing.shared is not None
        return _forward(q, k, v, packing.shared.lengths, False, scale)

    def own_backward(self, of: Saved, packing: Packing, scale: float) -> Gradients:
        return _backward(of, packing.lengths, True, scale)

    def prefix_backward(self, of: Saved, packing: Packing, scale: float) -> Gradients:
        assert packing.shared is not None
        return _backward(of, packing.shared.lengths, False, scale)


def _forward(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    import torch.nn.attention.varlen

    window = [-1, 0] if causal else [-1, -1]
    out, lse, _ = torch.ops.torch_attn._varlen_attn(q, k, v, *lengths, causal, scale, window, q.shape[1] != k.shape[1])
    if lse.shape != (q.shape[1], len(q)):
        raise RuntimeError(
            f"torch {torch.__version__}: the logsumexp of varlen_attn has the shape {tuple(lse.shape)}, not (heads, "
            "tokens), by which the part of a shared prompt is merged; set train.fsdp.attention to sdpa"
        )
    return out, lse


def _backward(of: Saved, lengths: Lengths, causal: bool, scale: float) -> Gradients:
    window = [-1, 0] if causal else [-1, -1]
    unused = torch.zeros(2, dtype=torch.uint64, device=of.q.device)  # of dropout
    gradient, lse = of.gradient.contiguous(), of.lse.contiguous()
    gradients: Gradients = torch.ops.torch_attn._varlen_attn_backward(
        gradient, of.q, of.k, of.v, of.out, lse, *lengths, causal, unused, scale, window
    )
    return gradients


def copied(x: Tensor, rows: Tensor | None) -> Tensor:
    """[U, …] → [n, …]: ``x[rows]``; the gradients of a row that is there more than once add up in float32."""
    out: Tensor = _Copied.apply(x, rows)
    return out


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        exact = torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(ctx.count, *gradient.shape[1:], dtype=exact, device=gradient.device)
        return total.index_add_(0, rows, gradient.to(exact)).to(gradient.dtype), None
