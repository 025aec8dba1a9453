"""A home's server that sleeps while a command has its devices: here on a CPU, where it keeps its memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy import initialise
from deploy.config import root
from deploy.config.root import Settings, child_environment
from deploy.loop import records
from deploy.server_sleep import ServerAwake, asleep
from deploy.supervise.children import millrace
from feedback.lake.tables import Lake
from loadtests.server import free_port
from tests.paths import ROOT

LEASE_S = 5.0
HOLDER = """
import sys, time
from pathlib import Path
from deploy.config import root
from deploy.server_sleep import asleep
from feedback.processes.signals import stop_on_signals
with stop_on_signals(), asleep(root.load(Path(sys.argv[1]), [], {}), "train", say=lambda line: print(line, flush=True)):
    time.sleep(600)
"""

REWARD = """
def reward(batch):
    return [float(sum(ids) % 7) for ids in batch["response_token_ids"].to_pylist()]
"""


def home_of(model: Path, home: Path, *options: tuple[str, str]) -> Settings:
    home.mkdir()
    suite = "".join(f'{{"id": "{i}", "prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(60))
    (home / "suite.jsonl").write_text(suite)
    given = {
        "home": str(home),
        "serve.port": str(free_port()),
        "serve.engine.kv_cache_bytes": str(16 << 20),
        "serve.engine.threads": "1",
        "serve.engine.dtype": "float32",
        "serve.sleep.wait_s": "900",
        "serve.limits.timeout_s": "900",
        "feedback.scoring.rules.exact.ready": "exact_match",
        "feedback.journal.segment_seconds": "0.5",
        "feedback.lake.seal_seconds": "0.5",
        "feedback.lake.lock_timeout_s": "600",
        "devices.lease_s": str(LEASE_S),
    } | dict(options)
    settings = root.load(None, given.items(), {})
    initialise.initialise(settings, str(model), revision=None, who="tests")
    return settings


def started(settings: Settings, log: Path, *command: str) -> subprocess.Popen[bytes]:
    """A process of the command line that serves, once it does."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            millrace("--config", settings.snapshot(), *command),
            stdout=output,
            stderr=output,
            env=child_environment({"PYTHONPATH": str(ROOT)}),
        )
    until(lambda: state(settings) is not None, lambda: process.poll() is None, log)
    return process


def until(condition: Callable[[], bool], lives: Callable[[], bool], log: Path, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        assert lives(), log.read_text()
        time.sleep(0.05)


def state(settings: Settings) -> str | None:
    """What the server does; None if it does not answer yet."""
    try:
        answer = httpx.get(f"{settings.server_url}/health", timeout=10)
    except httpx.HTTPError:
        return None
    return str(answer.json().get("sleep", "awake")) if answer.status_code == 200 else None


@pytest.fixture(scope="module")
def serving(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """The settings of a home whose server runs, and has its devices in turns with training."""
    folder = tmp_path_factory.mktemp("turns")
    settings = home_of(model, folder / "home", ("devices.use", "in_turns"))
    process = started(settings, folder / "serve.log", "serve")
    yield settings
    process.send_signal(signal.SIGINT)
    assert process.wait(180) == 0, (folder / "serve.log").read_text()


def awake_within(settings: Settings, seconds: float) -> float:
    began = time.monotonic()
    until(lambda: state(settings) == "awake", lambda: True, settings.path("suite.jsonl"), seconds)
    return time.monotonic() - began


def test_it_sleeps_within_and_answers_what_has_waited_behind(serving: Settings) -> None:
    said: list[str] = []
    answers: list[httpx.Response] = []
    body = {"prompt": "1+1=", "max_tokens": 4}
    user = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{serving.server_url}/generate", json=body, timeout=120))
    )
    with asleep(serving, "train", say=said.append):
        assert state(serving) == "asleep"
        user.start()
        time.sleep(1.5 * LEASE_S)  # it is renewed meanwhile
        assert state(serving) == "asleep"
        assert not answers
        with asleep(serving, "evaluate", say=said.append):
            pass
        assert state(serving) == "asleep", "it is still this block's turn"
    user.join(60)
    assert [answer.status_code for answer in answers] == [200]
    assert state(serving) == "awake"
    assert said[:2] == ["waiting until the server sleeps, whose devices train has meanwhile", "the server sleeps"]
    assert said[-1] == "the server is awake"


def test_it_wakes_whatever_ends_the_block(serving: Settings) -> None:
    def fail() -> None:
        with asleep(serving, "evaluate", say=print):
            assert state(serving) == "asleep"
            raise RuntimeError("as training does")

    with pytest.raises(RuntimeError, match="as training does"):
        fail()
    assert state(serving) == "awake"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_wakes_when_the_process_that_has_its_devices_is_ended(
    serving: Settings, number: signal.Signals, tmp_path: Path
) -> None:
    log = tmp_path / "holder.log"
    with log.open("wb") as output:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(serving.snapshot())],
            stdout=output,
            stderr=output,
            env=child_environment({"PYTHONPATH": str(ROOT)}),
        )
    try:
        until(lambda: "the server sleeps" in log.read_text(), lambda: holder.poll() is None, log, 120)
        assert state(serving) == "asleep"
        holder.send_signal(number)
        holder.wait(60)
        awake_within(serving, LEASE_S + 20)
    finally:
        holder.kill()
    told = "the server is awake" in log.read_text()
    assert told is (number == signal.SIGTERM), log.read_text()


def test_where_no_server_runs_or_nothing_is_shared_the_block_begins_at_once(model: Path, tmp_path: Path) -> None:
    for use in ("in_turns", "auto"):
        with asleep(home_of(model, tmp_path / use, ("devices.use", use)), "train", say=pytest.fail):
            pass


def test_a_server_that_does_not_sleep_keeps_its_devices_and_training_is_refused(model: Path, tmp_path: Path) -> None:
    settings = home_of(model, tmp_path / "home")
    turns = root.load(settings.snapshot(), [("devices.use", "in_turns")], {})
    process = started(settings, tmp_path / "serve.log", "serve")
    try:
        refused = "does not sleep: this server was not started to sleep: set devices.use=in_turns"
        with pytest.raises(ServerAwake, match=refused), asleep(turns, "train", say=print):
            pytest.fail("it has begun")
        assert state(settings) == "awake"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(180)


class Users:
    """Asks a server all the time, one after the other."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.answers: list[httpx.Response] = []
        self.states: list[str | None] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._ask, self._look)]

    def __enter__(self) -> Users:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx.Client(base_url=self.settings.server_url, timeout=1000) as client:
            number = 0
            while not self._stop.is_set():
                body = {"prompt": f"{number % 90}+1=", "max_tokens": 4, "metadata": {"answer": str(number % 90 + 1)}}
                self.answers.append(client.post("/generate", json=body))
                number += 1
                self._stop.wait(0.05)

    def _look(self) -> None:
        while not self._stop.is_set():
            self.states.append(state(self.settings))
            self._stop.wait(0.1)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_cycle_in_turns_trains_and_evaluates_while_the_server_sleeps_and_no_request_is_lost(
    model: Path, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    settings = home_of(
        model,
        tmp_path / "home",
        ("devices.use", "in_turns"),
        ("cycle.recipe", "rlvr"),
        ("train.steps", "1"),
        ("train.reward", "rewards_in_turns:reward"),
        ("train.rollout.max_tokens", "8"),
        ("train.rollout.kv_cache_bytes", str(16 << 20)),
        ("train.rollout.temperature", "1"),
        ("train.data.prompts_per_step", "4"),
        ("train.data.min_prompts", "4"),
        ("train.dtype", "float32"),
        ("evaluation.max_tokens", "8"),
        ("evaluation.engine.kv_cache_bytes", str(16 << 20)),
        ("cycle.min_new_rewards", "0"),
    )
    (tmp_path / "rewards_in_turns.py").write_text(REWARD)
    log = tmp_path / "up.log"
    process = started(settings, log, "up", "--no-schedule")
    try:
        until(lambda: "serving on" in log.read_text(), lambda: process.poll() is None, log)
        with Users(settings) as users:
            until(lambda: len(users.answers) > 40, lambda: process.poll() is None, log)
            command = millrace("--config", settings.snapshot(), "cycle")
            own = child_environment({"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"})
            done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=own)
            assert done.returncode == 0, done.stdout + done.stderr
            so_far = len(users.answers)
            until(lambda: len(users.answers) > so_far + 5, lambda: process.poll() is None, log)
        assert state(settings) == "awake"
        process.send_signal(signal.SIGINT)
        assert process.wait(180) == 0, log.read_text()
    finally:
        process.kill()
    assert nothing_left() == []
    [record] = records.load_all(settings)
    stages = {stage.name: stage.ok for stage in record.stages}
    assert (stages["train"], stages["evaluate"]) == (True, True), record
    printed = log.read_text()
    slept = printed.count("asleep for train of process")
    assert "devices: the server sleeps while training or evaluation works" in printed
    assert slept == 1, printed
    assert printed.count("asleep for evaluate of process") == 1, printed
    assert users.states.count("asleep") > 10
    assert {answer.status_code for answer in users.answers} == {200}
    acknowledged = sorted(each["response_id"] for answer in users.answers for each in _responses(answer))
    resolved = settings.resolved()
    with Lake(resolved.feedback.lake.uri, resolved.feedback.lake).connect(
        Path(resolved.feedback.journal.folder)
    ) as there:
        rows = there.sql("SELECT response_id, status FROM interactions").fetchall()
    assert sorted(response_id for response_id, _ in rows) == acknowledged
    assert {status for _, status in rows} == {"complete"}


def _responses(answer: httpx.Response) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(answer.content)["responses"]
    return found
