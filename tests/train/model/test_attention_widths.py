"""Attention over packed sequences with heads that flash attention has no kernel for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from train.batch.prompt_rows import Span
from train.model.attention.calls import Packing
from train.model.attention.packed import flash_takes, packed_attention


@pytest.mark.parametrize(
    ("device", "dtype", "width", "value_width", "takes"),
    [
        ("cuda", torch.bfloat16, 128, 128, True),
        ("cuda", torch.float16, 256, 256, True),
        ("cuda", torch.bfloat16, 320, 320, False),
        ("cuda", torch.bfloat16, 192, 128, False),  # multi-head latent attention
        ("cuda", torch.float32, 128, 128, False),
        ("cpu", torch.bfloat16, 128, 128, False),
    ],
)
def test_flash_attention_gets_what_it_has_a_kernel_for(
    device: str, dtype: torch.dtype, width: int, value_width: int, takes: bool
) -> None:
    assert flash_takes(device, dtype, width, value_width) is takes


@pytest.mark.parametrize(("width", "value_width"), [(320, 320), (192, 128)])
def test_wide_heads_and_values_of_another_width_are_attended_to_as_by_each_sequence_alone(
    width: int, value_width: int
) -> None:
    spans = [Span(0, 3), Span(3, 4, 0, 3), Span(7, 2, 0, 3)]  # a prompt, and two responses that share it
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, of: int) -> torch.Tensor:
        return torch.randn(1, heads, 9, of, dtype=torch.float64, generator=generator)

    q, k, v = draw(4, width), draw(2, width), draw(2, value_width)
    module: Any = SimpleNamespace()
    out, _ = packed_attention(module, q, k, v, None, packing=Packing(spans, torch.device("cpu")))
    assert out.shape == (1, 9, 4, value_width)
    for span in spans:
        prefix = range(span.prefix_start, span.prefix_start + span.prefix)
        for i in range(span.start, span.start + span.length):
            seen = [*prefix, *range(span.start, i + 1)]
            for head in range(4):
                scores = k[0, head // 2, seen] @ q[0, head, i] / width**0.5
                expected = scores.softmax(0) @ v[0, head // 2, seen]
                torch.testing.assert_close(out[0, i, head], expected, rtol=1e-10, atol=1e-12)
