"""Signs of life, and who misses them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.paths import ROOT
from train.controller.heartbeat import DRIVER, Heartbeat, Watch, driver_heartbeat, driver_step, forget_ranks, note_step

BEATING = """
import sys, time
from pathlib import Path
from train.controller.heartbeat import Heartbeat
Heartbeat(Path(sys.argv[1]), "all-1", 0.1)
print("beats", flush=True)
time.sleep(600)
"""


@pytest.fixture
def pass_seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """The clock of who watches: it moves when a test moves it."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def move(seconds: float) -> None:
        nonlocal now
        now += seconds

    return move


def wait_until(happened: Callable[[], bool]) -> None:
    """For a minute, by a clock that no test moves."""
    deadline = time.perf_counter() + 60
    while not happened():
        assert time.perf_counter() < deadline
        time.sleep(0.02)


def test_a_process_that_is_stopped_is_named_and_one_that_computes_is_not(
    tmp_path: Path, pass_seconds: Callable[[float], None]
) -> None:
    watch, file = Watch(tmp_path, silence_s=20, start_s=600), tmp_path / "alive" / "all-1"

    def wait_for_touch() -> None:
        before = file.stat().st_mtime_ns
        wait_until(lambda: file.stat().st_mtime_ns != before)

    def look_for(seconds: int) -> str | None:
        for _ in range(0, seconds, 4):
            pass_seconds(4)
            if why := watch.hung():
                return why
        return None

    process = subprocess.Popen(
        [sys.executable, "-c", BEATING, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "beats\n"
        assert watch.hung() is None
        for _ in range(6):
            wait_for_touch()
            assert look_for(4) is None
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert watch.hung() is None
        assert look_for(20) is None
        why = look_for(4)
        assert why is not None
        assert f"rank 1 of pool all (process {process.pid} on {os.uname().nodename}) has given no sign of life" in why
        process.send_signal(signal.SIGCONT)
        wait_for_touch()
        assert watch.hung() is None
    finally:
        process.kill()
        process.wait()


def test_a_driver_that_never_starts_and_one_that_never_ends_are_told_apart(
    tmp_path: Path, pass_seconds: Callable[[float], None]
) -> None:
    watch = Watch(tmp_path, silence_s=2, start_s=4)
    pass_seconds(4)
    assert watch.hung() is None
    pass_seconds(0.1)
    assert watch.hung() == "its driver has not started within 4 s (train.start_timeout_s)"
    watch = Watch(tmp_path, silence_s=2, start_s=600)
    with driver_heartbeat(tmp_path, 600):
        assert watch.hung() is None
    pass_seconds(2)
    assert watch.hung() is None
    pass_seconds(0.1)
    assert watch.hung() == "its driver has finished and does not end within 2 s (train.restarts.silence_s)"


def test_what_an_earlier_attempt_left_is_of_no_account(tmp_path: Path) -> None:
    Heartbeat(tmp_path, "all-0", 600)
    assert (tmp_path / "alive" / "all-0").exists()
    watch = Watch(tmp_path, silence_s=0.2, start_s=600)
    time.sleep(0.3)
    assert watch.hung() is None


def test_the_driver_says_how_many_steps_are_done_and_ranks_that_rest_are_forgotten(tmp_path: Path) -> None:
    note_step(1)  # nobody watches
    with driver_heartbeat(tmp_path, 600):
        assert driver_step(tmp_path) is None
        note_step(3)
        rank = Heartbeat(tmp_path, "all-0", 0.05)
        forget_ranks(tmp_path)
        assert driver_step(tmp_path) == 3
        rank._thread.join(120)
        assert not rank._thread.is_alive()
        assert [file.name for file in (tmp_path / "alive").iterdir()] == [DRIVER]
    assert driver_step(tmp_path) is None


def test_what_was_stopped_together_with_its_watch_is_not_called_hung(
    tmp_path: Path, pass_seconds: Callable[[float], None]
) -> None:
    watch = Watch(tmp_path, silence_s=60, start_s=600)

    def looks(seconds: int) -> list[str | None]:
        found = []
        for _ in range(0, seconds, 5):
            pass_seconds(5)
            found.append(watch.hung())
        return found

    heartbeat = Heartbeat(tmp_path, "all-0", 600)
    assert watch.hung() is None
    pass_seconds(3000)
    assert watch.hung() is None, "a container that was paused"
    assert looks(55) == [None] * 11, "5 s of the pause count"
    assert looks(5) != [None], "it was silent all the time"
    heartbeat.stop()
    assert watch.hung() is None
    pass_seconds(3000)
    assert watch.hung() is None, "its driver has finished, and it may end yet"
    assert looks(55) == [None] * 11
    assert looks(5) != [None]


def test_a_folder_that_can_not_be_read_for_a_while_says_nothing(tmp_path: Path) -> None:
    watch = Watch(tmp_path, silence_s=600, start_s=600)
    heartbeat = Heartbeat(tmp_path, "all-0", 600)
    wrong = tmp_path / "alive" / "all-1"
    wrong.symlink_to(wrong)  # stat raises an OSError that is no FileNotFoundError
    assert watch.hung() is None
    wrong.unlink()
    assert watch.hung() is None
    heartbeat.stop()
