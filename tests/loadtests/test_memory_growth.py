"""What the processes of a run grow by, from samples of them."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from loadtests import memory


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/venv/bin/python", "/venv/bin/millrace", "up", "./model"], "millrace up"),
        (["/venv/bin/python", "-P", "-m", "deploy.cli", "--config", "a.yaml", "serve"], "millrace serve"),
        (["/venv/bin/python", "-P", "-m", "deploy.cli", "--config", "a.yaml", "score"], "millrace"),
        (["/venv/bin/python", "-P", "-m", "feedback.ingest.sealer_process"], "feedback.ingest.sealer_process"),
        (["ray::Host", "", ""], "ray::Host"),
        (["/ray/core/raylet --resource=1", "-m"], "raylet"),
        ([], "no command"),
        ([""], "no command"),
    ],
)
def test_a_process_is_named_by_what_it_runs(command: list[str], name: str) -> None:
    assert memory.name(command) == name


def test_a_sample_has_a_process_and_all_below_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = memory.sample(psutil.Process())
    finally:
        child.communicate(b"\n", timeout=30)
    mib = {pid: mib for (pid, _), (_, mib) in found.items()}
    assert mib[os.getpid()] > 0
    assert mib[child.pid] > 0


def test_growth_is_that_of_the_processes_that_stay() -> None:
    """One grows by 2 MiB a sample, one stays as it is, a third comes and goes; the first samples don't count."""
    samples = [{(1, 0.0): ("api", 1000.0 - i)} for i in range(memory.SETTLED)]
    for i in range(20):
        title = "engine at work" if i % 3 == 2 else "engine"
        one: memory.Sample = {(1, 0.0): ("api", 500.0 + 2 * i), (2, 0.0): (title, 300.0)}
        samples.append(one | ({(3, float(i)): ("api", 70.0)} if i % 2 else {}))
    found = memory.growth(samples)
    assert found["api"] == {"mib_first": 500, "mib_last": 538, "mib_each": 2, "mib_each_interval": [2, 2]}
    assert found["engine"] == {"mib_first": 300, "mib_last": 300, "mib_each": 0, "mib_each_interval": [0, 0]}
    assert found["all"]["mib_first"] == 800
    assert found["all"]["mib_each"] == 2


def test_the_interval_of_growth_is_that_of_the_slope() -> None:
    """Deviations of 1, -1, -1, 1 leave the slope at 3; its error is sqrt(4 / 2 / 5), and t of two is 4.303."""
    mib = [11.0, 12.0, 15.0, 20.0]
    samples: list[memory.Sample] = [{(1, 0.0): ("api", each)} for each in [0.0] * memory.SETTLED + mib]
    found = memory.growth(samples)["api"]
    assert found["mib_each"] == pytest.approx(3)
    assert found["mib_each_interval"] == pytest.approx([3 - 4.303 * 0.4**0.5, 3 + 4.303 * 0.4**0.5], abs=1e-3)


def test_no_growth_of_too_few_samples() -> None:
    assert memory.growth([{(1, 0.0): ("api", 1.0)}] * (memory.SETTLED + 2)) == {}
    apart: list[memory.Sample] = [{(i, 0.0): ("api", 1.0)} for i in range(memory.SETTLED + 3)]
    assert memory.growth(apart) == {}
