"""Signals to all processes of a training, and of `millrace up` with one, at once, as a service manager sends them."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.config import root
from deploy.config.root import Settings, child_environment
from deploy.loop import records
from deploy.supervise.children import millrace
from loadtests.event_lines import read_lines
from tests.paths import ROOT
from tests.train.job_home import make_home
from tests.trees import exposed, left_of, send_to_all, tree

PATIENCE_S = 900
NOISE = ("Traceback", "Fatal Python", "*** SIG", "killed what did not", "it did not stop within", "Exception ignored")


@pytest.fixture
def home(settings: Settings) -> Settings:
    """A home whose training goes on for ever, with a hook that says how far it is."""
    make_home(settings.path("."))
    options = {
        "train.dtype": "float32",
        "train.steps": "100000",
        "train.micro_batch_tokens": "64",
        "train.rollout.max_tokens": "6",
        "train.rollout.max_model_len": "64",
        "train.rollout.kv_cache_bytes": str(16 << 20),
        "train.data.prompts_per_step": "4",
        "train.data.min_prompts": "4",
        "train.algorithm.group_size": "4",
        "train.checkpoint.every_steps": "5",
        "train.reward": "users_code:reward",
        "train.hooks": '["users_code:Diary"]',
        "serve.engine.kv_cache_bytes": str(16 << 20),
        "serve.engine.threads": "1",
        "schedule.first_after_seconds": "0",
        "cycle.min_new_rewards": "0",
        "cycle.stop_grace_s": "60",
        "up.stop_grace_s": "120",
    }
    return root.load(settings.snapshot(), list(options.items()), {})


def start(home: Settings, log: Path, *command: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            millrace("--config", home.snapshot(), *command),
            stdout=output,
            stderr=output,
            cwd=home.path("."),
            env=child_environment({"PYTHONPATH": str(ROOT)}),
        )


def until_it_trains(home: Settings, run: str, process: subprocess.Popen[bytes], log: Path) -> list[psutil.Process]:
    diary = home.path(home.train.runs) / run / "diary"
    deadline = time.monotonic() + PATIENCE_S
    while not (diary.exists() and "step" in diary.read_text()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return tree(process.pid)


def check_end(process: subprocess.Popen[bytes], code: int, before: list[psutil.Process], log: Path) -> None:
    assert process.wait(PATIENCE_S) == code, log.read_text()[-4000:]
    output = log.read_text()
    assert [noise for noise in NOISE if noise in output] == [], output[-4000:]
    assert left_of(before) == []


@pytest.mark.parametrize(
    ("launcher", "ranks", "number"),
    [
        ("ray", "1", signal.SIGINT),  # SIGTERM to Ray: in the next test
        ("torchrun", "2", signal.SIGTERM),
    ],
)
@pytest.mark.long
def test_a_training_listens_on_loopback_alone_and_ends_in_order_by_a_signal_to_all(
    launcher: str,
    ranks: str,
    number: signal.Signals,
    home: Settings,
    tmp_path: Path,
    nothing_left: Callable[[], list[str]],
) -> None:
    log = tmp_path / "train.log"
    how = ("--run", "r", "--train.launcher", launcher, "--train.ranks", ranks)
    process = start(home, log, "train", *how)
    try:
        processes = until_it_trains(home, "r", process, log)
        assert exposed(processes) == {}
        send_to_all(processes, number)
        check_end(process, 128 + number, processes, log)
    finally:
        process.kill()
    assert f"stopped by {number.name}" in log.read_text()
    assert nothing_left() == []


def test_sigterm_to_all_of_up_ends_its_requests_and_its_cycle_in_order(
    home: Settings, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    log = tmp_path / "up.log"
    process = start(home, log, "up")
    try:
        until_it_trains(home, "cycle-000001", process, log)
        request = {"prompt": "tail ab>", "max_tokens": 50, "stream": True}
        with httpx.stream("POST", f"{home.server_url}/generate", json=request, timeout=120) as answer:
            lines = read_lines(answer)
            first = next(lines)
            processes = tree(process.pid)
            assert exposed(processes) == {}
            send_to_all(processes, signal.SIGTERM)
            events = [line for line in (first, *lines) if line.startswith("event:")]
        assert events[-1] == "event: done", events
        check_end(process, 0, processes, log)
    finally:
        process.kill()
    (record,) = records.load_all(home)
    assert (record.status, record.reason) == ("stopped", "by SIGTERM")
    assert [(stage.name, stage.ok, stage.killed) for stage in record.stages][-1] == ("train", False, True)
    assert nothing_left() == []
