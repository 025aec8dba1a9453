"""`make bench-traffic` over a small lake: its figure, and the exit code where its bar is missed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from loadtests import bench_traffic


@pytest.mark.long
def test_a_missed_bar_is_on_the_last_line_and_ends_it_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_traffic", "--tokens", "50000"])
    monkeypatch.setattr(bench_traffic, "BAR_MIB", 10.0)  # imports take more
    with pytest.raises(SystemExit) as ended:
        bench_traffic.main()
    assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["bars"]["driver_peak_mib"] == {"bar": "at most 10", "verdict": "missed"}
    assert found["driver_peak_mib"] >= found["imports_mib"] > 10
    assert found["groups"] == 50_000 // 250 / 4
