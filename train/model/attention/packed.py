"""Attention over a packed batch, sequence by sequence: no score across sequences is computed.

``IMPLEMENTATION`` is registered with transformers, so any model that takes its attention from there can use it. For
positions that start again, transformers' own "sdpa" makes a [T, T] mask, and then computes all T² scores.

What is a sequence here is a ``Span`` of rows: one that attends to itself alone, or a response that attends to itself
and to the rows of a prompt which it shares with others.

On a GPU it is flash attention for spans of any lengths, where that has a kernel. Elsewhere spans of like length are
computed in one call, the shorter ones filled up on the right, where a causal query never looks; only attention sees
that filling. It is torch's own kernel for plain causal attention, and ``train.model.attention.tiled`` for what that
does not have, or has for a mask of all pairs alone. Nowhere are a shared prompt's keys and values copied for each
response, but for a GPU's kernel where a window cuts them.
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
from train.model.attention.calls import Packing
from train.model.attention.cpu import CpuKernels
from train.model.attention.flash import flash
from train.model.attention.shared import attend_to_shared
from train.model.attention.tiled import Scoring, attend

_SCORES = 2**24
"""Scores that generation holds at a time."""

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
    if dropout:
        raise ValueError(
            f"{type(module).__name__} drops {dropout} of its attention in training, and samples come from a model that "
            "drops nothing; set it to 0"
        )
    if packing is None and (softcap is not None or s_aux is not None):
        out = by_scores(query, key, value, attention_mask, scaling, softcap, s_aux)
        return out.transpose(1, 2).contiguous(), None
    if packing is None:
        shared = {"scaling": scaling, "position_bias": position_bias, **options}
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
    if sliding_window is not None and sliding_window >= packing.with_prefixes.longest_keys:
        sliding_window = None
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    plain = softcap is None and s_aux is None
    if plain and flash_takes(q.device.type, q.dtype, q.shape[-1], v.shape[-1]):
        out = flash(q, k, v, packing, scale, sliding_window)
    elif plain and sliding_window is None and sdpa_takes(q.device.type, q.shape[-1], v.shape[-1]):
        if packing.shared is None:
            out = _by_length(q, k, v, packing, scale)
        elif q.device.type == "cpu":
            out = attend_to_shared(q, k, v, packing, CpuKernels(), scale)
        else:
            out = attend(q, k, v, None, packing.calls, Scoring(scale))
    else:
        out = attend(q, k, v, s_aux, packing.calls, Scoring(scale, softcap, sliding_window))
    if packing.ulysses is not None:
        out = packing.ulysses.tokens_for_heads(out)
    return out[None], None


def flash_takes(device: str, dtype: torch.dtype, width: int, value_width: int) -> bool:
    """Whether flash attention has a kernel for heads of these widths: up to 256, values as wide as keys (which those of
    multi-head latent attention are not), in half precision."""
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16) and width == value_width <= 256


def sdpa_takes(device: str, width: int, value_width: int) -> bool:
    """Whether ``scaled_dot_product_attention`` has a kernel that does not hold all scores of a sequence: on a CPU for
    values as wide as keys, on a GPU for heads up to 256."""
    return width == value_width if device == "cpu" else width <= 256


def _by_length(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """[rows, heads, D] of each → [rows, query heads, D of v], in as many calls as there are groups of like length."""
    dtype = q.dtype
    if packing.order is not None:
        q, k, v = (take_rows(x, packing.order) for x in (q, k, v))
    if q.device.type == "cpu":
        # Measured: torch's CPU kernel takes up to four times as long backward in bfloat16 as in float32.
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    elif q.dtype == torch.float32 and q.shape[1] != k.shape[1]:
        # With fewer heads of keys torch's one kernel for float32 on a GPU is that which holds all scores.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows = [call.spans * call.length for call in packing.calls]
    outs = []
    for call, *parts in zip(packing.calls, q.split(rows), k.split(rows), v.split(rows), strict=True):
        a, b, c = (x.unflatten(0, (call.spans, -1)).transpose(1, 2) for x in parts)
        out = functional.scaled_dot_product_attention(
            *(a, b, c), is_causal=True, scale=scale, enable_gqa=a.shape[1] != b.shape[1]
        )
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
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention over whole rows of a cache with what ``scaled_dot_product_attention`` has not: a soft cap on scores,
    sinks. [n, heads, L, D]; some queries at a time, as it generates without a gradient."""
    rows = max(1, _SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    if q.shape[2] > rows:
        longer = k.shape[2] - q.shape[2]
        parts = []
        for first in range(0, q.shape[2], rows):
            some, stop = slice(first, first + rows), min(first + rows, q.shape[2])
            if allowed is None:
                seen = slice(0, longer + stop)  # the keys of a cache come first
                part = by_scores(q[:, :, some], k[:, :, seen], v[:, :, seen], None, scaling, softcap, sinks)
            else:
                part = by_scores(q[:, :, some], k, v, allowed[..., some, :], scaling, softcap, sinks)
            parts.append(part)
        return torch.cat(parts, 2)
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(2, 3)).to(exact) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if allowed is None:
        longer = k.shape[2] - q.shape[2]
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(longer)
    scores = scores.masked_fill(~allowed, torch.finfo(exact).min)  # not -inf: what fills a batch up may see nothing
    if sinks is not None:
        column = sinks.to(exact)[None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return weights.to(v.dtype) @ v


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask)
