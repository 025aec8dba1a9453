"""What who starts a run does between one driver and the next, and what a second one may not do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from multiprocessing import Pipe
from pathlib import Path

import pytest
from job_home import job_context

from serve.local_ray import reaper
from serve.local_ray.cluster import LocalRayError
from train import launch
from train.checkpoint.folders import CheckpointError, checkpoints
from train.config.training import TrainConfig
from train.context import RESULT, JobContext, JobResult, write_job
from train.controller.heartbeat import Heartbeat, Watch
from train.controller.worker_group import WorkerError
from train.launch import JobError, _ask_residents, cause_kept, run_job
from train.run.recovery.failure import FAILURE, KILLED, Failure, keep, of_job
from train.run.recovery.restarts import read_restarts
from train.run.recovery.resume import checkpoints_of, only_run, only_supervisor
from train.run.recovery.unfinished import give_up, holder_of
from train.supervisor import supervise


@pytest.fixture
def context(tmp_path: Path) -> JobContext:
    made = JobContext(**job_context(tmp_path, "attempts", parent=1))
    made.folder.mkdir(parents=True)
    return made


def config(**restarts: float) -> TrainConfig:
    return TrainConfig.model_validate({"restarts": {"backoff_s": 0, **restarts}})


def test_a_run_that_dies_ever_before_its_next_checkpoint_is_not_started_again_for_ever(context: JobContext) -> None:
    attempts = 0

    def killed(watch: Watch, again: bool) -> None:
        nonlocal attempts
        attempts += 1
        assert attempts < 9, "it never ends"
        if attempts == 3:  # it has come further: those before are forgotten
            add_checkpoint(context, 2)
        raise JobError("its driver was killed", KILLED)

    with pytest.raises(JobError, match=r"started again 2 times within .* or from the same checkpoint"):
        supervise(config(attempts=2, window_s=1e-9), context, killed)
    assert attempts == 5
    assert [one.step for one in read_restarts(context.folder)] == [0, 0, 2, 2]


def test_what_failed_before_a_run_came_further_is_no_sign_that_it_would_again(context: JobContext) -> None:
    ends = [KILLED, 1, KILLED, 1, 0]  # twice a Ray that did not start, on a busy machine

    def attempt(watch: Watch, again: bool) -> None:
        code, done = ends.pop(0), len(checkpoints(checkpoints_of(context)))
        if code == KILLED:
            add_checkpoint(context, done + 1)
        if code:
            raise JobError("its driver ended", code)
        ended = JobResult(run="attempts", parent=1, steps=9, candidate=2, reason=None, metrics={}, seconds=1.0)
        (context.folder / RESULT).write_text(ended.model_dump_json())

    assert supervise(config(attempts=4), context, attempt).steps == 9
    assert [one.step for one in read_restarts(context.folder)] == [1, 1, 2, 2]


def test_checkpoints_that_are_torn_in_turn_are_no_way_forward(context: JobContext) -> None:
    attempts = 0

    def killed(watch: Watch, again: bool) -> None:
        nonlocal attempts
        attempts += 1
        assert attempts < 9, "it never ends"
        if attempts % 2:
            add_checkpoint(context, 1)
            add_checkpoint(context, 2)
        else:
            (checkpoints_of(context) / "step-00000002" / "whole.json").unlink()
        raise JobError("its driver was killed", KILLED)

    with pytest.raises(JobError, match="started again 3 times"):
        supervise(config(attempts=2, window_s=1e-9), context, killed)


def add_checkpoint(context: JobContext, step: int) -> None:
    folder = checkpoints_of(context) / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "whole.json").write_text('{"format": 2, "files": {}}')


def test_a_run_between_two_drivers_is_at_work(context: JobContext) -> None:
    add_checkpoint(context, 1)
    assert holder_of(context.folder) is None
    with only_supervisor(context):
        assert holder_of(context.folder) == f"pid {os.getpid()} on {socket.gethostname()}"
        assert give_up([context.folder]) == []
    assert give_up([context.folder]) == ["attempts"]
    assert not checkpoints(checkpoints_of(context))


def test_a_driver_waits_for_one_that_is_about_to_end(context: JobContext) -> None:
    begun = threading.Event()

    def end_later() -> None:
        with only_run(context):
            begun.set()
            time.sleep(2.5)  # a driver whose supervisor was killed ends its Ray yet

    thread = threading.Thread(target=end_later)
    thread.start()
    assert begun.wait(60)
    with only_run(context):
        pass
    thread.join()


def test_a_driver_that_ends_well_without_a_result_has_failed(context: JobContext) -> None:
    (context.folder / RESULT).write_text("that of a run of this name before, whose rows were erased")
    with pytest.raises(JobError, match="without a result"):
        supervise(config(), context, lambda watch, again: None)


def test_a_run_that_is_at_work_is_not_disturbed_by_a_second_start(context: JobContext) -> None:
    heartbeat = Heartbeat(context.folder, "driver", 600)
    failure = Failure(kind="lost", what="that of the first one")
    keep(context.folder, failure)
    with only_supervisor(context), pytest.raises(CheckpointError, match="in the middle of run attempts"):
        run_job(config(), context)
    assert (context.folder / "alive" / "driver").exists()
    assert Failure.model_validate_json((context.folder / FAILURE).read_bytes()) == failure
    assert not (context.folder / "job.json").exists()
    heartbeat.stop()


def test_what_fails_before_the_job_begins_is_known_by_its_cause(context: JobContext) -> None:
    with pytest.raises(WorkerError), cause_kept(context):
        raise WorkerError("there is no room to go on", kind="lost")
    found = of_job(JobError("its driver ended with code 1", 1), context.folder, None)
    assert (found.kind, found.what) == ("lost", "there is no room to go on")


def test_a_ray_that_does_not_start_is_the_cause_that_is_reported(
    context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/proc/no-folder-can-be-made-here")
    monkeypatch.setattr(launch, "end_with_starter", lambda: None)  # this process is to stay
    monkeypatch.setattr(launch, "teardown_is_skipped", lambda: False)
    monkeypatch.setattr(sys, "argv", ["launch", "--own-ray", str(write_job(config(), context))])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(LocalRayError):
        launch.main()
    found = of_job(JobError("its driver ended with code 1", 1), context.folder, None)
    assert found.what.startswith("Ray can't be started")


def test_resident_workers_that_die_as_they_are_handed_the_output_have_died(context: JobContext) -> None:
    ours, theirs = Pipe()

    def die() -> None:
        theirs.recv()
        with socket.socket(fileno=os.dup(theirs.fileno())) as same:
            same.shutdown(socket.SHUT_RD)
        theirs.send(("go", os.getpid()))

    thread = threading.Thread(target=die)
    thread.start()
    with pytest.raises(EOFError):
        _ask_residents(ours, config(), context, Watch(context.folder, 600, 600))
    thread.join()
    for end in (ours, theirs):
        end.close()


def test_what_a_killed_drivers_ray_leaves_on_disk_goes_with_its_processes(tmp_path: Path) -> None:
    token = tmp_path / "ray" / "token"
    token.parent.mkdir()
    token.touch()
    mark = f"{launch.ATTEMPT}={uuid.uuid4().hex}"
    variables = {"RAY_AUTH_TOKEN_PATH": str(token), launch.ATTEMPT: mark.partition("=")[2]}
    command = [sys.executable, "-I", reaper.__file__, str(token)]
    for stops in (False, True):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=variables)
        assert process.stdin is not None
        if stops:
            process.send_signal(signal.SIGSTOP)
        process.stdin.close()  # as when its owner, the driver, has been killed
        threading.Thread(target=process.wait).start()
        assert reaper.end_marked(mark, 2.0 if stops else 120.0)
        assert not token.parent.exists()
        assert process.wait(60) == (-signal.SIGKILL if stops else 0)
