"""The bench of GPUs: what it takes of each bench's last line, and that it measures nothing without a GPU."""

from __future__ import annotations

import sys

import pytest

from loadtests import bench_gpu, bench_reshard


def test_a_swaps_gap_is_over_vllms_of_the_same_model() -> None:
    counts = {"swaps": 3, "failed": 0, "truncated": 0, "mislabelled": 0}
    found = bench_gpu.swap({"gap_ms": {"3M": 4.0, "0.6B": 6.0}, "vllm_gap_ms": {"3M": 8.0}, **counts})
    assert found["sizes"]["3M"] == {"gap_ms": 4.0, "vllm_gap_ms": 8.0, "over_vllm": 0.5}
    assert found["sizes"]["0.6B"]["over_vllm"] is None
    assert found["swaps"] == 3


def test_a_sync_within_one_rank_is_compared_by_its_seconds_alone() -> None:
    case = {"n": 1, "tp": 1, "training_tp": 1, "weight_bytes": 8, "received": 0, "least": 0, "excess": 0.0}
    case |= {"over_gather": None, "seconds": 0.1, "seconds_over_gather": 0.5}
    (taken,) = bench_gpu.weight_sync({"cases": [case]})["cases"]
    assert taken["over_gather"] is None
    line = bench_reshard.line(case | {"peak_extra_bytes": 1, "peak_extra_bytes_gather": 2})
    assert "a rank receives 0 bytes, least 0 (excess 0.0000), in 0.50 of its time" in line


def test_without_a_gpu_nothing_is_measured_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["bench_gpu"])
    assert bench_gpu.main() == 0
    assert capsys.readouterr().out == ("bench-gpu: skipped, torch finds no GPU on this machine; nothing was measured\n")
