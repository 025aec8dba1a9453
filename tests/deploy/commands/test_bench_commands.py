"""``millrace bench``: each measurement, small, with figures that add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import run


def measured(capsys: pytest.CaptureFixture[str], home: Path, *arguments: str) -> dict[str, Any]:
    assert run(["bench", *arguments, "--home", str(home)]) == 0
    assert list(home.iterdir()) == [], "nothing is left behind"
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


@pytest.mark.parametrize("rate", [None, 200.0])
def test_capture_seals_every_row_that_it_counts(capsys, tmp_path, rate):
    options = [] if rate is None else ["--rate", str(rate)]
    result = measured(capsys, tmp_path, "capture", "--seconds", "0.5", "--writers", "8", *options)
    assert result["rows"] == result["sealed_rows"] > 0
    assert 0 < result["ms_p50"] <= result["ms_p99"] <= result["ms_max"]
    assert result["rows_per_s"] == pytest.approx(result["rows"] / result["seconds"])
    if rate is not None:
        assert result["rows"] == 100


def test_storage_reads_back_what_it_wrote(capsys, tmp_path):
    result = measured(capsys, tmp_path, "storage", "--rows", "80")
    assert result["rows"] == 80
    assert all(value > 0 for value in result.values())


def test_scoring_scores_what_is_new_beside_both_histories(capsys, tmp_path):
    sizes = ["--history", "2000", "--small", "300", "--fresh", "100", "--turns", "1"]
    rules = ["--feedback.scoring.rules", "{exact: {ready: exact_match}}"]
    result = measured(capsys, tmp_path, "scoring", *sizes, *rules)
    assert result["history"] == 2000
    assert set(result["fresh_ms"]) == {"large new", "large late", "small new", "small late"}
    assert result["history_ratio"] > 0


def test_what_can_t_be_measured_is_refused(capsys, tmp_path):
    assert run(["bench", "capture", "--writers", "0", "--home", str(tmp_path)]) == 2
    assert "0 is not in the range" in capsys.readouterr().err
