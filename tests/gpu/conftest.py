"""The GPU suite: what can't run here is skipped, with a line for each test that says why.

``make test-gpu`` runs it with this conftest alone: the one above it needs what a machine with torch and transformers
alone has not got.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # without a pyproject's pythonpath, too

import pytest

from tests.gpu.gpu_suite import DEVICE, VARIABLE, reason_to_skip

if DEVICE == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    needs = item.get_closest_marker("needs")
    if needs is not None and (reason := reason_to_skip(needs.kwargs)) is not None:
        pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    def of(outcome: str) -> list[Any]:
        reports = terminalreporter.stats.get(outcome, [])
        return [report for report in reports if "gpu" in getattr(report, "keywords", ())]

    skipped, passed, failed = of("skipped"), of("passed"), of("failed") + of("error")
    if not skipped + passed + failed:
        return
    terminalreporter.section("GPU suite")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.write_line(f"skipped {report.nodeid}: {reason.removeprefix('Skipped: ')}")
    where = "device: cuda" if DEVICE == "cuda" else f"device: cpu ({VARIABLE}), which proves the tests and no GPU"
    terminalreporter.write_line(f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped; {where}")
