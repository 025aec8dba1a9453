"""Attention over spans of rows by one mask for all of them: the formula, without anything that makes it quick."""

from __future__ import annotations

from typing import Any


def by_one_mask(
    spans: list[tuple[int, int, int, int]],
    q: Any,
    k: Any,
    v: Any,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
) -> Any:
    """[rows, heads, width]: all scores of all rows, of which a mask that is made row by row leaves some.

    ``spans``: (start, length, prefix_start, prefix) of rows, as of ``train.batch.prompt_rows.Span``.
    """
    import torch

    rows = len(q)
    seen = torch.zeros(rows, rows, dtype=torch.bool)
    for start, length, prefix_start, prefix in spans:
        for i in range(length):
            keys = [*range(prefix_start, prefix_start + prefix), *range(start, start + i + 1)]
            seen[start + i, keys if sliding_window is None else keys[-sliding_window:]] = True
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype)[:, None, None].expand(-1, rows, 1)], -1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., :rows], v)
