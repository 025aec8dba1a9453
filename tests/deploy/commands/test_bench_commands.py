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


@pytest.mark.long
def test_capture_measures_the_journal_in_turns_with_its_peers_and_finds_every_row_in_the_lake(capsys, tmp_path):
    options = ["--seconds", "0.3", "--writers", "8", "--rate", "200", "--turns", "2"]
    result = measured(capsys, tmp_path, "capture", *options)
    assert {"journal", "alone", "disk", "sqlite", "sqlite_grouped", "added_ms_p50", "fdatasync_ms_p99"} <= set(result)
    assert all(len(turns) == 2 and min(turns) > 0 for turns in result.values())
    assert all(fast <= slow for fast, slow in zip(result["added_ms_p50"], result["added_ms_p99"], strict=True))
    assert all(1 <= rows <= 8 for rows in result["rows_per_commit"])


def test_storage_reads_back_what_it_wrote(capsys, tmp_path):
    result = measured(capsys, tmp_path, "storage", "--rows", "80", "--turns", "2")
    assert result["rows"] == 80
    turns = [value for value in result.values() if isinstance(value, list)]
    assert turns
    assert {len(values) for values in turns} == {2}
    assert all(value > 0 for values in result.values() for value in (values if values in turns else [values]))


def test_scoring_scores_what_is_new_beside_both_histories(capsys, tmp_path):
    sizes = ["--history", "2000", "--small", "300", "--fresh", "100", "--turns", "1"]
    rules = ["--feedback.scoring.rules", "{exact: {ready: exact_match}}"]
    result = measured(capsys, tmp_path, "scoring", *sizes, *rules)
    assert result["history"] == 2000
    assert {name: len(turns) for name, turns in result["seconds"].items()} == dict.fromkeys(
        ("large new", "large late", "small new", "small late"), 1
    )
    assert len(result["scoring_rows_per_s"]) == 3
    assert min(result["scoring_rows_per_s"]) > 0


def test_what_can_t_be_measured_is_refused(capsys, tmp_path):
    assert run(["bench", "capture", "--writers", "0", "--home", str(tmp_path)]) == 2
    assert "0 is not in the range" in capsys.readouterr().err
