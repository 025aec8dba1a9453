"""What the bench of swaps makes of its streams, worked out by hand."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from loadtests import bench_swap
from loadtests.bench_swap import Stream, Target, Window


def stream(letters: str, *, step: float = 0.1, late: float = 0.0) -> Stream:
    """A letter each ``step`` seconds; the first capital one comes ``late``."""
    first = next((at for at, letter in enumerate(letters) if letter.isupper()), len(letters))
    return Stream(len(letters), [(at * step + late * (at >= first), letter) for at, letter in enumerate(letters)])


def mode(name: str, added: list[float | None]) -> dict[str, Any]:
    figures = {"gap_ms": 20.0, "gap_worst_ms": 30.0, "control_gap_ms": 15.0, "decode_step_ms": 10.0}
    return {"mode": name, "model": "3M", "swaps": 1, "failed": 0, "truncated": 0, "mislabelled": 0} | (
        figures | {"added_ms": added}
    )


def test_one_swap_leaves_the_intervals_ends_open_and_the_line_is_json() -> None:
    assert bench_swap.interval([1.0], [2.0]) == [None, None]
    low, high = bench_swap.interval([3.0, 4.0, 5.0], [1.0, 2.0, 3.0])
    assert low is not None
    assert high is not None
    assert low < 2.0 < high
    found = bench_swap.result_of([mode("default", [None, None]), mode("vllm", [None, None])])
    json.dumps(found, allow_nan=False)
    assert found["bars"]["3M default"]["verdict"] == "undecided"
    assert (found["gap_ms"], found["gap_worst_ms"], found["vllm_gap_worst_ms"]) == (
        {"3M": 20.0},
        {"3M": 30.0},
        {"3M": 30.0},
    )


@pytest.mark.parametrize(
    ("added", "verdict"), [([-5.0, 9.0], "met"), ([11.0, 20.0], "missed"), ([5.0, 15.0], "undecided")]
)
def test_the_bar_is_one_decode_step(added: list[float | None], verdict: str) -> None:
    assert bench_swap.result_of([mode("default", added)])["bars"]["3M default"]["verdict"] == verdict


def test_the_longest_gap_of_each_swap_counts_and_gaps_across_policies_apart() -> None:
    streams = [stream("abcdABCD", late=0.5), stream("abcdABCD")]
    swapped, normal = [Window(0.25, 1.0, 2)], [Window(1.0, 2.0, 2)]
    found = bench_swap.summary(streams, normal, swapped, labelled=False)
    assert found["gap_ms"] == found["gap_worst_ms"] == pytest.approx(600.0)
    assert found["control_gap_ms"] == pytest.approx(100.0)
    assert found["crossed"] == 2
    assert found["failed"] == found["truncated"] == 0


def test_a_reload_that_changes_no_letters_ends_the_benchmark() -> None:
    streams = [stream("abcdABCD")]
    bench_swap.require_letters(streams, [Window(0.0, 0.35, 1), Window(0.35, 0.9, 2)])
    with pytest.raises(SystemExit, match="did not bring policy 1: of 4 letters that came after it, 4 are another"):
        bench_swap.require_letters(streams, [Window(0.35, 0.9, 1)])
    with pytest.raises(SystemExit, match="of 0 letters"):
        bench_swap.require_letters(streams, [Window(2.0, 3.0, 2)])


def test_each_window_without_a_swap_is_as_long_as_the_swap_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Swaps:
        """Each swap takes a second more."""

        def __init__(self) -> None:
            self.now = 0.0
            self.versions: list[int] = []

        async def swap(self, version: int) -> Window:
            self.versions.append(version)
            began, self.now = self.now, self.now + len(self.versions)
            return Window(began, self.now, version)

        async def idle(self, after: Window) -> Window:
            began, self.now = self.now, self.now + after.ended - after.began
            return Window(began, self.now, after.version)

    async def at_once(_: float) -> None:
        pass

    monkeypatch.setattr(asyncio, "sleep", at_once)
    swaps = Swaps()
    streamed: list[Stream] = []

    async def client(*_: Any) -> None:
        pass

    monkeypatch.setattr(bench_swap, "client", client)
    normal, swapped = asyncio.run(bench_swap.measure(cast("Target", swaps), streamed, 2, 3))
    assert swaps.versions == [2, 1, 2, 1]
    assert [each.ended - each.began for each in swapped] == [2.0, 3.0, 4.0]
    assert [(each.ended - each.began, each.version) for each in normal] == [(2.0, 1), (3.0, 2), (4.0, 1)]
