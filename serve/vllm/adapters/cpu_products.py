"""What adapters add to a layer's output on a CPU: one product for the rows of each adapter.

vLLM's own way there copies A and B for each row: on two cores a model of 25M parameters then decodes a fourth to a
sixth of the tokens that it does without adapters; here it is most of them. It also gives rows without an adapter what
the last slot holds, where other rows of the step have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Rows = list[tuple[int, Tensor | None]]
"""(slot, its rows), None for all of them."""


class ProductsByAdapter(PunicaWrapperCPU):
    """In the place of vLLM's own (``install``)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows: Rows = []
        self._sampled_rows: Rows = []

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, before a step."""
        super().update_metadata(*args, **kwargs)
        self._rows = _rows_by_slot(self.token_lora_indices)
        self._sampled_rows = _rows_by_slot(self.sampler_indices)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """y [rows, out] += x [rows, in] Aᵀ Bᵀ · scale, in place, for each slice of columns, by each row's adapter."""
        _add(y, x, lora_a_stacked, lora_b_stacked, output_slices, self._rows, scale)

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **kwargs: Any
    ) -> None:
        """As ``add_lora_linear``, of the output layer."""
        _add(y, x, (lora_a_stacked,), (lora_b_stacked,), (y.shape[-1],), self._sampled_rows, scale)


def install(manager: Any) -> None:
    """Have all layers of a worker's manager of adapters use these products from now on; for vLLM's own on a CPU."""
    wrappers = manager.punica_wrapper_mapping
    for name, own in wrappers.items():
        if type(own) is not PunicaWrapperCPU:
            continue
        wrappers[name] = ProductsByAdapter(manager.max_num_batched_tokens, manager.max_num_seqs, manager.device)
        for module in manager.modules.values():
            if module.punica_wrapper is own:
                module.set_mapping(wrappers[name])
    manager._last_mapping = None  # which the new ones have not seen


def _rows_by_slot(slots: Tensor) -> Rows:
    found = [int(slot) for slot in slots.unique()]
    if len(found) == 1:
        return [(found[0], None)] if found[0] >= 0 else []
    return [(slot, (slots == slot).nonzero()[:, 0]) for slot in found if slot >= 0]


def _add(
    y: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], widths: Sequence[int], rows: Rows, scale: float
) -> None:
    y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
    for slot, own in rows:
        those = x if own is None else x.index_select(0, own)
        begin = 0
        for a_of, b_of, width in zip(a, b, widths, strict=True):
            inner = those.to(a_of.dtype) @ a_of[slot, 0].T
            part = y[:, begin : begin + width]
            # Vocabularies are padded to several sizes.
            added = torch.mm(inner, b_of[slot, 0].T)[:, : part.shape[1]].to(y.dtype)
            part = part[:, : added.shape[1]]
            if own is None:
                part.add_(added, alpha=scale)
            else:
                part.index_add_(0, own, added, alpha=scale)
            begin += width
