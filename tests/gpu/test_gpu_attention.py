"""Attention, the head's tiles and checksums on a device, against plain formulas in float64 on the CPU."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.attention_by_mask import by_one_mask
from tests.gpu.gpu_suite import DEVICE, device_type, gpu_test

SPANS = [(0, 37, 0, 0), (37, 11, 0, 37), (48, 29, 0, 37), (77, 64, 0, 0), (141, 1, 0, 0)]
"""(start, length, prefix_start, prefix) of rows: a prompt and two responses to it, a sequence alone, a single row."""
ROWS = 142

CASES: dict[str, dict[str, Any]] = {
    "as many heads": {"heads": 4, "kv_heads": 4, "width": 64},
    "grouped heads": {"heads": 8, "kv_heads": 2, "width": 64},
    "wide heads": {"heads": 2, "kv_heads": 1, "width": 128},
    "the widest heads": {"heads": 2, "kv_heads": 2, "width": 256},
    "a sliding window": {"heads": 4, "kv_heads": 2, "width": 64, "sliding_window": 16},
    "a scale": {"heads": 4, "kv_heads": 2, "width": 64, "scaling": 0.05},
    "a soft cap": {"heads": 4, "kv_heads": 2, "width": 64, "softcap": 2.0},
    "sinks": {"heads": 4, "kv_heads": 2, "width": 64, "sinks": True},
    "heads that flash attention has no kernel for": {"heads": 4, "kv_heads": 2, "width": 320},
    "values narrower than keys": {"heads": 4, "kv_heads": 4, "width": 192, "value_width": 128},
    "values narrower than keys, of prompts that are not shared": {
        **{"heads": 4, "kv_heads": 4, "width": 192, "value_width": 128},
        "spans": [(start, length, 0, 0) for start, length, _, _ in SPANS],
    },
}
"""The last two are of multi-head latent attention: with a shared prompt it is computed in tiles, else by SDPA."""
NOT_FLASH = (
    "a soft cap",
    "sinks",
    *(name for name, case in CASES.items() if case["width"] > 256 or "value_width" in case),
)


def require_flash() -> None:
    """Skip where torch's attention over sequences of any lengths can't be called as training calls it."""
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no attention over packed batches")
    if lacking := {"scale", "window_size", "enable_gqa"} - inspect.signature(varlen.varlen_attn).parameters.keys():
        pytest.skip(f"this torch's varlen_attn has no {', '.join(sorted(lacking))}, which training passes")


@gpu_test("part", "the kernel is a CPU's, not flash attention", torch_only=True)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_over_a_packed_batch_is_that_of_each_sequence_alone(
    case: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from train.batch.prompt_rows import Span
    from train.model.attention import packed as attention
    from train.model.attention.calls import Packing

    options = dict(CASES[case])
    heads, kv_heads, width = (options.pop(name) for name in ("heads", "kv_heads", "width"))
    values, spans = options.pop("value_width", width), options.pop("spans", SPANS)
    flash = DEVICE == "cuda" and dtype == "bfloat16" and case not in NOT_FLASH
    if flash:
        require_flash()
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype))

    # [1, heads, rows, width] as models call it: a view of [rows, heads, width].
    of_keys, of_values = [(heads, width), (kv_heads, width)], [(kv_heads, values), (heads, values)]
    whole = [some(1, ROWS, *shape) for shape in of_keys + of_values]
    sinks = some(heads).float() if options.pop("sinks", False) else None
    q, k, v, weight = (x.to(device_type(), copy=True) for x in whole)
    for x in (q, k, v):
        x.requires_grad_()
    calls = []
    original = attention.flash
    monkeypatch.setattr(attention, "flash", lambda *a: calls.append(1) or original(*a))
    packing = Packing([Span(*span) for span in spans], q.device)
    moved = None if sinks is None else sinks.to(q.device)
    out, _ = attention.packed_attention(
        torch.nn.Identity(), *(x.transpose(1, 2) for x in (q, k, v)), None, packing=packing, s_aux=moved, **options
    )
    assert bool(calls) == flash, "flash attention must be what computes in half precision on a GPU, and nothing else"
    (out * weight).sum().backward()

    exact = [x.double().requires_grad_() for x in whole[:3]]
    expected = by_one_mask(spans, *(x[0] for x in exact), sinks=sinks, **options)
    (expected * whole[3][0].double()).sum().backward()
    close = {"atol": 2e-4, "rtol": 1e-4} if dtype == "float32" else {"atol": 0.06, "rtol": 0.03}
    torch.testing.assert_close(out[0].cpu().double(), expected.detach(), **close)
    # A key of a prompt gathers the gradients of all responses to it.
    loose = close if dtype == "float32" else {"atol": 0.25, "rtol": 0.06}
    for name, found, target in zip("qkv", (q, k, v), exact, strict=True):
        assert found.grad is not None
        torch.testing.assert_close(
            found.grad.cpu().double(), target.grad, **loose, msg=lambda text, n=name: f"{n}: {text}"
        )


@gpu_test("part", "the tiles are those of a CPU", torch_only=True)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_log_probs_by_tiles_are_those_of_the_whole_distribution(dtype: str) -> None:
    import torch

    from train.model.fused_log_probs import TILE, log_probs_and_entropy

    tokens, entries, width = 300, TILE[device_type()][1] * 2 + 77, 64
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(tokens, width, generator=generator).to(getattr(torch, dtype))
    weight = (0.3 * torch.randn(entries, width, generator=generator)).to(getattr(torch, dtype))
    targets = torch.randint(entries, (tokens,), generator=generator)
    temperatures = torch.linspace(0.5, 1.5, tokens)
    a, b = (x.to(device_type(), copy=True).requires_grad_() for x in (hidden, weight))
    log_probs, entropy = log_probs_and_entropy(a, b, None, targets.to(a.device), temperatures.to(a.device))
    assert log_probs.dtype == torch.float32
    (log_probs.sum() + entropy.sum()).backward()

    c, d = (x.double().requires_grad_() for x in (hidden, weight))
    every = (c @ d.T / temperatures[:, None].double()).log_softmax(-1)
    chosen, spread = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    (chosen.sum() + spread.sum()).backward()
    close = {"atol": 1e-3, "rtol": 1e-3} if dtype == "float32" else {"atol": 0.12, "rtol": 0.05}
    torch.testing.assert_close(log_probs.detach().cpu().double(), chosen.detach(), **close)
    torch.testing.assert_close(entropy.detach().cpu().double(), spread.detach(), **close)
    for found, exact in ((a.grad, c.grad), (b.grad, d.grad)):
        assert found is not None
        error = (found.cpu().double() - exact).norm() / exact.norm()
        assert error < (1e-3 if dtype == "float32" else 0.03), float(error)


@gpu_test("all", torch_only=True)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_checksum_says_the_same_of_the_same_values_on_any_device(dtype: str) -> None:
    import torch

    from train.weight_sync.checksums import checksum

    values = torch.randn(70, 333, generator=torch.Generator().manual_seed(3))
    box, kind = ((5, 75), (1000, 1333)), getattr(torch, dtype)
    found = checksum(values.to(device_type()), box, kind)
    assert found == checksum(values, box, kind)
    parts = [(box[0][0], 40), (40, box[0][1])]
    parts_sum = sum(checksum(values[a - 5 : b - 5].to(device_type()), ((a, b), box[1]), kind) for a, b in parts)
    assert (found - parts_sum) % 2**64 == 0
    values[3, 4] += 1
    assert found != checksum(values.to(device_type()), box, kind)
