"""Attention by tiles, and of responses to the prompt that they share, against one mask and all scores in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention_by_mask import by_one_mask
from train.batch.prompt_rows import Span
from train.model.attention import tiled
from train.model.attention.calls import Packing
from train.model.attention.cpu import CpuKernels
from train.model.attention.flash import copied
from train.model.attention.shared import attend_to_shared
from train.model.attention.tiled import Scoring, attend
from train.planner.model_shape import LiveBytes

SPANS = [
    (0, 9, 0, 0),
    (9, 4, 0, 9),
    (13, 7, 0, 9),
    (20, 7, 0, 9),
    (27, 5, 0, 0),
    (32, 3, 27, 5),
    (35, 12, 0, 0),
    (47, 1, 0, 0),
]
"""(start, length, prefix_start, prefix): two prompts with responses of several lengths, two sequences alone."""
ROWS = 48
CPU = torch.device("cpu")

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a soft cap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "a window": {"window": 4},
    "a window over a prompt's end": {"window": 11, "softcap": 2.0},
    "all of it": {"softcap": 1.5, "sinks": True, "window": 6},
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of rows and of spans."""
    monkeypatch.setattr(tiled, "TILE", {"cpu": 250})
    monkeypatch.setattr(tiled, "ROWS", (2, 5))


def drawn(heads: int, key_heads: int, width: int, value_width: int, rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, width), (key_heads, width), (key_heads, value_width), (heads, value_width))
    return [torch.randn(rows, *shape, dtype=torch.float64, generator=generator) for shape in shapes]


def packing_of(spans: list[tuple[int, int, int, int]]) -> Packing:
    return Packing([Span(*span) for span in spans], CPU)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [(4, 4, 8, 8), (6, 2, 8, 5)], ids=["as many heads", "grouped heads, narrow values"])
def test_tiles_give_what_all_scores_give_and_the_gradients_too(case: str, heads: tuple[int, int, int, int]) -> None:
    options = dict(CASES[case])
    sinks = torch.linspace(-1, 2, heads[0], dtype=torch.float64) if options.pop("sinks", False) else None
    q, k, v, weight = drawn(*heads)
    of = (q, k, v, *(() if sinks is None else (sinks,)))
    given, expected_of = ([x.clone().requires_grad_() for x in of] for _ in range(2))
    of_sinks = [None] if sinks is None else []
    out = attend(*given, *of_sinks, packing_of(SPANS).calls, Scoring(0.4, **options))
    window = options.pop("window", None)
    named = {} if sinks is None else {"sinks": expected_of[3]}
    expected = by_one_mask(SPANS, *expected_of[:3], scaling=0.4, sliding_window=window, **named, **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for found, exact in zip(given, expected_of, strict=True):
        torch.testing.assert_close(found.grad, exact.grad, rtol=0, atol=1e-11)


def test_gradients_are_those_of_finite_differences() -> None:
    spans = [(0, 3, 0, 0), (3, 2, 0, 3), (5, 2, 0, 3), (7, 2, 0, 0)]
    q, k, v, _ = (x.requires_grad_() for x in drawn(4, 2, 3, 2, rows=9))
    sinks = torch.tensor([0.1, -0.5, 1.0, 0.3], dtype=torch.float64, requires_grad=True)
    calls = packing_of(spans).calls

    def computed(*given: Tensor) -> Tensor:
        return attend(*given, calls, Scoring(0.5, softcap=1.0, window=4))

    assert torch.autograd.gradcheck(computed, (q, k, v, sinks))


def peak_bytes(rows: int, scoring: Scoring) -> int:
    q, k, v = (torch.randn(rows, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    calls = packing_of([(0, rows, 0, 0)]).calls
    with LiveBytes() as counted:
        attend(q, k, v, torch.zeros(4, requires_grad=True), calls, scoring).sum().backward()
    return counted.peak


def test_memory_grows_with_the_rows_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "TILE", {"cpu": 2**14})
    monkeypatch.setattr(tiled, "ROWS", (2, 64))
    scoring = Scoring(0.25, softcap=5.0)
    short, long = peak_bytes(512, scoring), peak_bytes(2048, scoring)
    assert long < 4.5 * short
    assert long < 4 * 2048**2 * 4 / 10, "a tenth of the scores of all heads in float32"


@pytest.mark.parametrize("way", ["tiles", "kernel"])
def test_responses_read_their_prompt_without_a_copy_for_each(way: str) -> None:
    prompt, responses, length = 600, 24, 4
    spans = [(0, prompt, 0, 0), *((prompt + i * length, length, 0, prompt) for i in range(responses))]
    rows = prompt + responses * length
    q, k, v = (torch.randn(rows, 2, 16, requires_grad=True) for _ in range(3))
    packing = packing_of(spans)
    with LiveBytes() as counted:
        if way == "tiles":
            attend(q, k, v, None, packing.calls, Scoring(0.25)).sum().backward()
        else:
            attend_to_shared(q, k, v, packing, CpuKernels(), 0.25).sum().backward()
    copies = responses * prompt * 2 * 16 * 4  # of the keys alone
    assert counted.peak < copies


@pytest.mark.parametrize("way", ["tiles", "kernel", "copies"])
def test_the_gradients_of_many_responses_add_up_in_float32(way: str) -> None:
    """Added up in bfloat16, a sum of so many like parts stands still long before the last."""
    prompt, responses = 3, 700
    spans = [(0, prompt, 0, 0), *((prompt + i, 1, 0, prompt) for i in range(responses))]
    packing = packing_of(spans)
    q, k, v = (torch.ones(prompt + responses, 1, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    if way != "copies":
        if way == "tiles":
            attend(q, k, v, None, packing.calls, Scoring(0.5)).sum().backward()
        else:
            attend_to_shared(q, k, v, packing, CpuKernels(), 0.5).sum().backward()
        assert v.grad is not None
        expected = responses / 4 + 1 / 3  # of the prompt's last row; a response sees four keys alike
        found = float(v.grad[prompt - 1, 0, 0])
    else:
        assert packing.keys is not None
        copied(v, packing.keys).sum().backward()
        assert v.grad is not None
        expected, found = responses + 1, float(v.grad[0, 0, 0])
    assert found == pytest.approx(expected, rel=2**-7)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["as many heads", "grouped heads"])
def test_a_shared_prompts_part_is_merged_as_if_it_had_been_copied_before_each_response(heads: tuple[int, int]) -> None:
    q, k, v, weight = drawn(*heads, 8, 8)
    given, exact = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    out = attend_to_shared(*given, packing_of(SPANS), CpuKernels(), 0.4)
    expected = by_one_mask(SPANS, *exact, scaling=0.4)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(given, exact, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-11)
