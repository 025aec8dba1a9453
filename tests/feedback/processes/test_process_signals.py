"""Signals that are for the parent alone, sent to real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from feedback.config import LakeConfig
from feedback.ingest.sealer_process import Sealer
from feedback.lake.tables import Lake
from feedback.processes.exit import still_running
from feedback.processes.signals import (
    STOPPING,
    Stopped,
    StopSignal,
    handled_by,
    handlers_deferred,
    stop_on_signals,
    stop_signals_blocked,
)
from tests.paths import ROOT

CHILD = """
import os, signal, sys, threading
from feedback.processes.signals import handle_parent_signals
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())  # a handler of its own, as vLLM's engine has
if "heeds" in sys.argv:
    handle_parent_signals()
print("up", flush=True)
while sys.stdin.readline().strip() == "asked?":
    print(asked.is_set(), flush=True)
if not asked.wait(180):
    sys.exit("nobody asked")
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def is_asked(process: subprocess.Popen[str]) -> bool:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("asked?\n")
    process.stdin.flush()
    return process.stdout.readline() == "True\n"


def send_from_elsewhere(process: subprocess.Popen[str], *numbers: int) -> None:
    for number in numbers:
        subprocess.run(["kill", f"-{number}", str(process.pid)], check=True, timeout=60)


def test_a_process_that_is_started_with_signals_held_back_outlives_them_whatever_handler_it_has() -> None:
    with stop_signals_blocked():
        process = start()
    try:
        send_from_elsewhere(process, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        process.terminate()
        assert not is_asked(process)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_a_process_that_heeds_its_parent_acts_upon_its_parents_signals_alone() -> None:
    with stop_signals_blocked():
        process = start("heeds")
    try:
        send_from_elsewhere(process, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        assert not is_asked(process)
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait(180)


def test_what_comes_while_signals_are_held_back_comes_afterwards() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with stop_signals_blocked():
            os.kill(os.getpid(), signal.SIGTERM)
            assert came == []
        until = time.monotonic() + 120
        while not came and time.monotonic() < until:
            time.sleep(0.01)  # a library's thread may have taken it, and has to be scheduled first
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_process_that_nobody_has_asked_for_has_ended_all_the_same() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended, subprocess.Popen(["sleep", "600"]) as running:
        processes = [psutil.Process(ended.pid), psutil.Process(running.pid)]
        until = time.monotonic() + 120
        while still_running(processes, 0.0) != [processes[1]]:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert processes[0].status() == psutil.STATUS_ZOMBIE  # the test has not waited for it
        running.kill()
        assert still_running(processes, 120.0) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_sealer_ends_with_its_owner_and_by_no_signal(number: int, tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    (tmp_path / "journal").mkdir()
    sealer = Sealer(lake, tmp_path / "journal")
    sealer.start()
    try:
        assert sealer._child is not None
        child = psutil.Process(sealer._child.pid)
        child.send_signal(number)
        with pytest.raises(psutil.TimeoutExpired):
            child.wait(1)
    finally:
        sealer.close()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_an_exception_from_a_handler_comes_behind_the_block_and_not_in_its_midst() -> None:
    done: list[str] = []

    def stop(*_: object) -> None:
        raise StopSignal(143)

    def signalled_midway() -> None:
        with handlers_deferred():
            signal.raise_signal(signal.SIGTERM)
            done.append("whole")

    with handled_by(stop, [signal.SIGTERM]):
        with pytest.raises(StopSignal):
            signalled_midway()
        with pytest.raises(StopSignal):
            signal.raise_signal(signal.SIGTERM)
    assert done == ["whole"]


def test_a_second_signal_that_comes_with_the_first_is_not_reported_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)

    def stopped_by_two() -> None:
        with stop_on_signals():
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
            try:
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.pthread_kill(threading.get_ident(), number)  # another thread would not block it
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)  # both are there now

    with pytest.raises(Stopped):
        stopped_by_two()
    assert reported == []


def test_a_signal_that_comes_while_handlers_are_installed_stops_and_leaves_those_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {number: signal.getsignal(number) for number in STOPPING}
    install, sent = signal.signal, []

    def install_and_send(number: int, handler: Any) -> Any:
        found = install(number, handler)
        if not sent:
            sent.append(number)
            signal.raise_signal(number)
        return found

    monkeypatch.setattr(signal, "signal", install_and_send)
    with pytest.raises(Stopped) as stopped, stop_on_signals():
        pass
    assert stopped.value.code == 128 + sent[0]
    assert {number: signal.getsignal(number) for number in STOPPING} == before
