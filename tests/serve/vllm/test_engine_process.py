"""The process that is forked before there is an engine, and becomes one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest

from serve.vllm import engine_process
from serve.vllm.engine_process import WaitingProcess
from tests.paths import ROOT


def never() -> bool:
    return False


def write_what_it_sees(file: Path) -> None:
    listening = sum(each.status == psutil.CONN_LISTEN for each in psutil.Process().net_connections())
    blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    file.write_text(f"{os.getpid()} {os.environ.get('GIVEN')} {listening} {blocked}")


def write_threads(file: Path) -> None:
    import torch

    file.write_text(str(torch.get_num_threads()))


def fail() -> None:
    sys.exit(7)


def started(waiting: WaitingProcess, target: object, *arguments: object) -> multiprocessing.process.BaseProcess:
    process = engine_process._Context(waiting).Process(target=target, args=arguments)
    process.start()
    return process


def test_it_runs_what_it_is_given_in_the_environment_of_that_time_and_holds_no_socket_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)):
        waiting = WaitingProcess()
        monkeypatch.setenv("GIVEN", "later")
        process = started(waiting, write_what_it_sees, tmp_path / "seen")
        process.join(120)
    stops = sorted([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    assert (process.exitcode, process.pid) == (0, waiting.pid)
    assert (tmp_path / "seen").read_text() == f"{waiting.pid} later 0 {stops}"


def test_it_computes_with_as_many_threads_as_are_set_though_torch_was_imported_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    # An engine that another test has run in this process has put a function that does nothing in its place.
    monkeypatch.setattr(torch, "set_num_threads", torch._C.set_num_threads)
    threads = torch.get_num_threads() + 1
    waiting = WaitingProcess()
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    process = started(waiting, write_threads, tmp_path / "threads")
    process.join(120)
    assert (process.exitcode, (tmp_path / "threads").read_text()) == (0, str(threads))


def test_its_exit_code_and_its_end_are_seen_as_those_of_any_child() -> None:
    process = started(WaitingProcess(), fail)
    assert wait([process.sentinel], 30) == [process.sentinel]
    process.join(120)
    assert process.exitcode == 7


def test_it_can_be_killed_while_it_works() -> None:
    process = started(WaitingProcess(), time.sleep, 600)
    assert process.is_alive()
    process.kill()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def test_one_that_gets_nothing_to_run_ends_when_it_is_closed_and_one_that_runs_does_not() -> None:
    idle, busy = WaitingProcess(), WaitingProcess()
    process = started(busy, time.sleep, 600)
    idle.close()
    idle.close()
    busy.close()
    assert not psutil.pid_exists(idle.pid)
    assert process.is_alive()
    process.kill()
    process.join(120)


def test_a_second_process_and_one_for_a_child_that_is_closed_or_dead_are_new_interpreters() -> None:
    once, closed, dead = WaitingProcess(), WaitingProcess(), WaitingProcess()
    closed.close()
    os.kill(dead.pid, signal.SIGKILL)
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    first = started(once, fail)
    others = [started(waiting, fail) for waiting in (once, closed, dead)]
    for process in (first, *others):
        process.join(60)
    assert [process.exitcode for process in (first, *others)] == [7, 7, 7, 7]
    assert first.pid == once.pid
    assert len({process.pid for process in (first, *others)} - {closed.pid, dead.pid}) == 4


@pytest.mark.parametrize("works", [False, True])
def test_it_dies_with_its_parent_waiting_or_at_work(works: bool) -> None:
    start = "engine_process._Context(waiting).Process(target=time.sleep, args=(600,)).start()" if works else ""
    program = (
        "import time\nfrom serve.vllm import engine_process\n"
        f"waiting = engine_process.WaitingProcess()\n{start}\nprint(waiting.pid, flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait(120)
    parent.stdout.close()
    deadline = time.monotonic() + 120
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_what_can_not_be_pickled_is_refused_and_the_child_can_still_be_closed() -> None:
    waiting = WaitingProcess()
    with pytest.raises((AttributeError, TypeError)):
        started(waiting, lambda: None)
    waiting.close()
    assert not psutil.pid_exists(waiting.pid)


def test_nothing_is_forked_beside_other_threads_which_may_hold_locks() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    assert engine_process.prepare(lambda: True, never) is None
    release.set()
    thread.join()


def test_nothing_is_forked_where_what_was_imported_does_not_survive_it() -> None:
    assert engine_process.prepare(lambda: False, never) is None


def test_imports_that_fail_raise_and_a_stop_does_not_wait_for_them() -> None:
    def fails() -> bool:
        raise ImportError("no such library")

    with pytest.raises(ImportError, match="no such library"):
        engine_process.prepare(fails, never)
    release = threading.Event()
    assert engine_process.prepare(release.wait, lambda: True) is None
    release.set()
