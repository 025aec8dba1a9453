"""Attention over a packed batch, sequence by sequence: no score across sequences is computed.

``IMPLEMENTATION`` is registered with transformers, so any model that takes its attention from there can use it. For
positions that start again, transformers' own "sdpa" makes a [T, T] mask, and then computes all T² scores.

What is a sequence here is a ``Span`` of rows: one that attends to itself alone, or a response that attends to itself
and to the rows of a prompt which it shares with others.

On a GPU it is flash attention for spans of any lengths, where that has a kernel. Elsewhere, spans of like length (and
prefixes of one length) are computed in one call of ``scaled_dot_product_attention``; the shorter ones of a call are
filled up on the right, where a causal query never looks. Only attention sees that filling; embeddings, projections and
MLPs don't.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from train.batch.prompt_rows import take_rows
from train.model.attention_calls import Packing

IMPLEMENTATION = "packed"
"""What ``attn_implementation`` names. A model that is called without a ``Packing`` behaves as with "sdpa"."""


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Have ``model`` use attention for packed batches; False if it makes its own attention, and keeps what it has.

    Raises:
        ValueError: a layer carries a state from token to token, which would cross sequences.
    """
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) | set(getattr(text, "layers_block_type", None) or ())
    if stateful := sorted(k for k in kinds if "attention" not in k or "linear" in k):
        raise ValueError(
            f"{type(model).__name__} has layers of type {', '.join(stateful)}; their state would cross the sequences "
            "of a packed batch; choose a policy whose layers are attention"
        )
    known = kinds <= {"full_attention", "sliding_attention", "attention"}
    if not model._supports_attention_backend or not known or not model._can_set_attn_implementation():
        return False
    model.set_attn_implementation(IMPLEMENTATION)
    return True


def share_sequences(model: nn.Module, group: ProcessGroup, tensor_parallel: int = 1) -> None:
    """Have ``train.model.fsdp.token_log_probs`` run ``model`` on this rank's slice of the tokens.

    ``tensor_parallel``: ranks that share the heads already, of which each then shares its own.

    Raises:
        ValueError: the heads cannot be shared out among the ranks, or the model makes its own attention.
    """
    config, size = model.config.get_text_config(), group.size()
    times = "" if tensor_parallel == 1 else f" times train.fsdp.tensor_parallel={tensor_parallel}"
    if config.num_attention_heads % (size * tensor_parallel):
        raise ValueError(
            f"train.fsdp.sequence_parallel={size}{times} does not divide the {config.num_attention_heads} attention "
            f"heads of {type(model).__name__}; use a divisor of them"
        )
    if config._attn_implementation != IMPLEMENTATION:
        raise ValueError(
            f"train.fsdp.sequence_parallel={size} needs attention over packed batches, and {type(model).__name__} has "
            f"{config._attn_implementation!r}; set train.fsdp.attention to auto, or sequence_parallel to 1"
        )
    model.sequence_parallel_group = group


@contextmanager
def packed(packing: Packing) -> Iterator[dict[str, Any]]:
    """Within, models make no attention masks. Yields what to call the model with beside its tokens and positions."""
    token = _maskless.set(True)
    try:
        yield {"packing": packing}
    finally:
        _maskless.reset(token)


_maskless: ContextVar[bool] = ContextVar("maskless", default=False)


def _mask(*args: Any, **options: Any) -> Tensor | None:
    return None if _maskless.get() else sdpa_mask(*args, **options)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each span of the packing, and from it to its prefix.

    Args:
        query: [1, query heads, rows, D], or this rank's slice of the rows under sequence parallelism.
        key, value: the same, with as many heads or a divisor of them.
        sliding_window: a token sees this many, itself included.
        softcap: scores are capped to it by tanh (Gemma 2).
        s_aux: [query heads], a score for each head that takes part in the softmax and adds nothing (attention sinks).

    Returns:
        ([1, rows, query heads, D of value], None)
    """
    if packing is None and (softcap is not None or s_aux is not None):
        out = by_scores(query, key, value, attention_mask, scaling, dropout, softcap, s_aux)
        return out.transpose(1, 2).contiguous(), None
    if packing is None:
        shared = {"scaling": scaling, "dropout": dropout, "position_bias": position_bias, **options}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **shared)
    if position_bias is not None or query.shape[0] != 1:
        raise ValueError(
            f"{type(module).__name__} was given position_bias={position_bias is not None} and rows={query.shape[0]}; "
            "packed attention takes one row of tokens and no position bias"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if packing.ulysses is not None:
        q, k, v = packing.ulysses.heads_for_tokens(q, k, v)
        s_aux = None if s_aux is None else packing.ulysses.own_heads(s_aux)
    plain = softcap is None and s_aux is None
    if flash_takes(q.device.type, q.dtype, q.shape[-1], v.shape[-1]) and plain and not dropout:
        out = _flash(q, k, v, packing, scaling, sliding_window)
    else:
        out = _by_length(q, k, v, packing, scaling, dropout, sliding_window, softcap, s_aux)
    if packing.ulysses is not None:
        out = packing.ulysses.tokens_for_heads(out)
    return out[None], None


def flash_takes(device: str, dtype: torch.dtype, width: int, value_width: int) -> bool:
    """Whether flash attention has a kernel for heads of these widths: up to 256, values as wide as keys (which those of
    multi-head latent attention are not), in half precision."""
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16) and width == value_width <= 256


def _flash(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if packing.keys is not None:
        k, v = (take_rows(x, packing.keys) for x in (k, v))
    # Of fewer queries than keys, the last query sees the last key.
    return varlen_attn(
        *(q, k, v, packing.cu_queries, packing.cu_keys, packing.longest, packing.longest_keys),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _by_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[rows, heads, D] of each → [rows, query heads, D of v], in as many calls as there are groups of like length."""
    dtype = q.dtype
    if packing.order is not None:
        q = take_rows(q, packing.order)
    if packing.key_order is not None:
        k, v = (take_rows(x, packing.key_order) for x in (k, v))
    if q.device.type == "cpu":
        # Measured: torch's CPU kernel takes up to four times as long backward in bfloat16 as in float32.
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    queries = [count * length for count, length, _ in packing.shapes]
    keys = [count * (prefix + length) for count, length, prefix in packing.shapes]
    outs = []
    for (count, length, prefix), *parts in zip(
        packing.shapes, q.split(queries), k.split(keys), v.split(keys), strict=True
    ):
        a, b, c = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in parts)
        band = None
        if prefix or (window is not None and length > window):
            last = torch.arange(prefix, prefix + length, device=q.device)
            back = last[:, None] - torch.arange(prefix + length, device=q.device)
            band = (back >= 0) if window is None else (back >= 0) & (back < window)
        if softcap is None and sinks is None:
            out = functional.scaled_dot_product_attention(
                *(a, b, c),
                attn_mask=band,
                dropout_p=dropout,
                is_causal=band is None,
                scale=scaling,
                enable_gqa=a.shape[1] != b.shape[1],
            )
        else:
            out = by_scores(a, b, c, band, scaling, dropout, softcap, sinks)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    out = torch.cat(outs) if len(outs) > 1 else outs[0]
    out = out.to(dtype)
    return out if packing.order is None else take_rows(out, packing.rows)


def by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with what ``scaled_dot_product_attention`` has not: a soft cap on scores, sinks. [n, heads, L, D]."""
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(2, 3)).to(exact) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if allowed is None:
        longer = k.shape[2] - q.shape[2]  # keys of a cache come first
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(longer)
    scores = scores.masked_fill(~allowed, torch.finfo(exact).min)  # not -inf: what fills a batch up may see nothing
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return functional.dropout(weights, dropout).to(v.dtype) @ v


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask)
