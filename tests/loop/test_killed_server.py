"""A real server under load, its processes killed: nothing acknowledged is lost. `make crash-test` runs longer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1500)
@pytest.mark.long
def test_a_server_whose_processes_are_killed_under_load_loses_and_doubles_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadtests.crash", "--kills", "4", "--clients", "6", "--pause", "0.15"]
    command += ["--folder", str(tmp_path / "crash")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] >= 4
    assert result["acknowledged_responses"] > 20
    assert result["acknowledged_feedback"] > 20
    assert result["responses_in_lake"] >= result["acknowledged_responses_not_erased"] > 20
    for bad in ("lost_responses", "lost_feedback", "doubled_responses", "doubled_feedback", "recorded_though_refused"):
        assert result[bad] == 0, result
