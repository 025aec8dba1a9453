from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from deploy.config.root import child_environment
from deploy.supervise.children import Child
from feedback.processes.signals import Stopped, stop_on_signals
from tests.paths import ROOT

PATIENCE_S = 240
DAEMON = """
import os, signal, sys, time
def daemon():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)   # and doesn't listen
    os.setsid()                                     # in a session of its own
    if os.fork(): os._exit(0)                       # whose parent is gone
    time.sleep(600)
if os.fork() == 0: daemon()
time.sleep(0.5)
"""


def child(code: str, tmp_path: Path, grace: float = 2.0, **more: object) -> Child:
    return Child(
        "test",
        [sys.executable, "-c", code],
        log=tmp_path / "test.log",
        environment=child_environment(),
        grace=grace,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("pass", 0)])
def test_a_daemon_that_left_group_and_session_is_gone_when_its_command_has_ended(
    end: str, code: int, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    assert child(DAEMON + end, tmp_path).wait(120) == code
    assert nothing_left() == []


def test_stop_ends_a_command_that_ignores_sigterm_and_all_it_started(
    tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    running = child(
        DAEMON + "signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)", tmp_path, grace=1.0
    )
    _until(lambda: "up" in running.tail())
    assert running.stop() == 137
    assert nothing_left() == []


def test_everything_goes_when_the_parent_is_killed(tmp_path: Path, nothing_left: Callable[[], list[str]]) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"""
import sys, time
from pathlib import Path
from deploy.supervise.children import Child
from deploy.config.root import child_environment
Child("x", [sys.executable, "-c", {DAEMON + "time.sleep(600)"!r}], log=Path({str(tmp_path / "x.log")!r}),
      environment=child_environment(), grace=1.0)
time.sleep(600)
""",
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    _until(lambda: len(nothing_left()) >= 4)  # parent, subreaper, command, daemon
    time.sleep(0.3)
    parent.kill()
    parent.wait(120)
    _until(lambda: nothing_left() == [])


def test_everything_goes_when_the_subreaper_is_killed(tmp_path: Path, nothing_left: Callable[[], list[str]]) -> None:
    running = child("import time; print('up', flush=True); time.sleep(600)", tmp_path)
    _until(lambda: "up" in running.tail())
    psutil.Process(running.pid).kill()
    assert running.wait(120) == -signal.SIGKILL
    _until(lambda: nothing_left() == [])


def test_the_output_is_followed_line_by_line_and_kept_in_the_log(tmp_path: Path) -> None:
    lines: list[str] = []
    running = child("print('one'); print('a\\rb\\rtwo'); print('three', end='')", tmp_path, follow=lines.append)
    assert running.wait(120) == 0
    assert lines == ["one", "two", "three"]
    assert (tmp_path / "test.log").read_text().startswith("one\n")
    assert running.tail(2) == "two\nthree"


def test_waiting_has_an_end(tmp_path: Path) -> None:
    running = child("import time; time.sleep(600)", tmp_path)
    with pytest.raises(TimeoutError, match=r"test still runs after 0 s"):
        running.wait(0.3)
    running.stop()


def test_what_ran_before_a_block_without_leftovers_runs_on(tmp_path: Path) -> None:
    code = """
import psutil, subprocess
from deploy.supervise.children import no_leftovers
sleep = ["sleep", "600"]
with subprocess.Popen(sleep) as before:
    with no_leftovers(grace=60):
        inside = subprocess.Popen(sleep)
    print(before.poll(), psutil.pid_exists(inside.pid))
    before.kill()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.split() == ["None", "False"], done.stderr


def test_what_holds_signals_back_is_killed_at_once_and_not_waited_for(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys
from deploy.supervise.children import no_leftovers
from feedback.processes.signals import stop_signals_blocked
with no_leftovers(grace={PATIENCE_S}):
    with stop_signals_blocked():
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep({2 * PATIENCE_S})"])
print("all gone")
"""
    running = child(code, tmp_path)
    assert running.wait(PATIENCE_S / 2) == 0
    assert running.tail() == "all gone"  # and nobody is named who would not stop


def test_a_signal_becomes_stopped_once() -> None:
    def stopped_in_the_middle() -> None:
        with stop_on_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        stopped_in_the_middle()
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


IN_A_DESTRUCTOR = """
import os, signal, time
from feedback.processes.signals import Stopped, stop_on_signals

class Slow:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

try:
    with stop_on_signals():
        Slow()
        print("goes on", flush=True)
        time.sleep(60)
        print("was not stopped")
except Stopped as stopped:
    print(stopped, stopped.code)
"""


def test_a_signal_that_comes_while_a_destructor_runs_stops_all_the_same() -> None:
    """Python drops what a destructor raises, and says so on stderr alone."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_DESTRUCTOR],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout.splitlines() == ["goes on", "SIGINT 130"], done.stderr


STARTS = """
import time
from feedback.processes.signals import Stopped, stop_on_signals
from serve.local_ray.cluster import local_ray
try:
    with stop_on_signals(), local_ray(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20):
        time.sleep(600)
except Stopped as stopped:
    print(stopped, stopped.code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_ray_starts_ends_it_in_order(
    number: signal.Signals, nothing_left: Callable[[], list[str]]
) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    starting = subprocess.Popen(
        [sys.executable, "-c", STARTS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        below = psutil.Process(starting.pid)
        _until(lambda: "gcs_server" in {p.name() for p in below.children(recursive=True)}, timeout=300)
        starting.send_signal(number)
        printed, errors = starting.communicate(timeout=300)
    finally:
        starting.kill()
    assert printed == f"{number.name} {128 + number}\n"
    assert "Traceback" not in errors, errors
    assert "***" not in errors, errors
    assert nothing_left() == []


WAITS = """
import ray, time
from feedback.processes.signals import Stopped, stop_on_signals
from serve.local_ray.cluster import local_ray
@ray.remote
class Worker:
    def sleep(self): time.sleep(3600)
with local_ray(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, logging_level="ERROR"):
    worker = Worker.remote()
    try:
        with stop_on_signals():
            print("up", flush=True)
            ray.get(worker.sleep.remote())
    except Stopped as stopped:
        print(stopped, stopped.code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_wait_for_ray(number: signal.Signals, nothing_left: Callable[[], list[str]]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    waiting = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "up\n"
        time.sleep(2)  # until it waits
        waiting.send_signal(number)
        printed, _ = waiting.communicate(timeout=120)
    finally:
        waiting.kill()
    assert printed == f"{number.name} {128 + number}\n"
    assert nothing_left() == []


def _until(condition: Callable[[], bool], timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


RAY = """
import os, ray, time
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, logging_level="ERROR")
@ray.remote
class Worker:
    def sleep(self): time.sleep(600)
Worker.remote().sleep.remote()
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("by", ["stop", "kill of the driver", "kill of the subreaper"])
def test_no_process_of_ray_survives(by: str, tmp_path: Path, nothing_left: Callable[[], list[str]]) -> None:
    running = child(RAY, tmp_path, grace=10.0)
    _until(lambda: "up" in running.tail(), timeout=600)
    daemons = [p.name() for p in psutil.Process(running.pid).children(recursive=True)]
    assert {"raylet", "gcs_server"} <= set(daemons)
    (driver,) = psutil.Process(running.pid).children()
    if by == "stop":
        running.stop()
    elif by == "kill of the driver":
        driver.kill()
    else:
        psutil.Process(running.pid).kill()
    _until(lambda: nothing_left() == [], timeout=60)
    assert running.wait(120) != 0
