"""What the bench of the start makes of its turns."""

from __future__ import annotations

import pytest

from loadtests import bench_start


@pytest.mark.parametrize(
    ("ours", "verdict"), [([8.0, 9.0, 8.5], "met"), ([12.0, 13.0, 12.5], "missed"), ([5.0, 15.0, 9.0], "undecided")]
)
def test_the_bar_is_judged_by_the_interval_of_the_pairs_ratio(ours: list[float], verdict: str) -> None:
    found = bench_start.summary(
        {
            "millrace": [{"seconds": each, "cpu_seconds": 30.0} for each in ours],
            "vllm": [{"seconds": 10.0, "cpu_seconds": 20.0}] * 3,
        }
    )
    assert found["bars"] == {"ratio_seconds": {"bar": "at most 1", "verdict": verdict}}
    low, high = found["ratio_seconds_interval"]
    assert low < found["ratio_seconds"] < high
    assert found["ratio_seconds_range"] == [min(ours) / 10, max(ours) / 10]
    assert found["ratio_cpu_seconds_interval"] == [1.5, 1.5]
    assert (found["pairs"], found["vllm_seconds"]) == (3, 10.0)
