"""Where a training job runs: in a process with a Ray of its own or in resident workers, as a job on a cluster, or
under torchrun.

``python -m train.launch SPEC.json`` is what a cluster runs, in a Ray that is there; with ``--own-ray`` it starts one.
With ``--launcher torchrun`` it needs no Ray: as it is for one rank, under ``torchrun --nproc-per-node N -m train.launch
…`` for several.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic.multiprocessing.errors import record

from feedback.processes.exit import SIGNALLED, end_process, skip_teardown, teardown_is_skipped
from feedback.processes.fork_server import PARENT, ForkedProcess, fork
from feedback.processes.resident_socket import GONE_S, ask, connect, hang_up, wait_until_gone
from feedback.processes.signals import STOPPING, Stopped, stop_on_signals
from feedback.user_code import search_last, search_path
from serve.kv_cache import machine_memory
from serve.local_ray.cluster import LOOPBACK, local_ray, loopback_sockets, search_as_here
from serve.local_ray.reaper import end_marked
from train.cluster_job import Cluster
from train.config.training import TrainConfig
from train.context import (
    JUDGE_KEY,
    TEACHER_KEY,
    JobContext,
    JobResult,
    api_keys,
    with_judge_key,
    with_teacher_key,
    write_job,
)
from train.controller import torchrun
from train.controller.dispatch import Layout
from train.controller.failure_kinds import Kind
from train.controller.heartbeat import Watch, driver_heartbeat, driver_step, forget_ranks, interval
from train.controller.torchrun_guard import end_with_starter
from train.job import run
from train.observe.progress import say
from train.run.record import ERROR
from train.run.recovery.failure import KILLED, JobError, of_exception
from train.run.recovery.failure import keep as keep_failure
from train.run.recovery.resume import only_supervisor
from train.supervisor import supervise
from train.workers.fewer_ranks import fitting
from train.workers.resident_pools import ResidentPools, stays
from train.workers.role_groups import environment, sizes

_STOP_S, _FORK_S, _TURN_S = 20.0, 10.0, 1.0
_TRIES = 3
ATTEMPT = "MILLRACE_ATTEMPT"
"""The environment variable by which all processes of an attempt on this machine are known."""
_TOKEN_BYTES: Final = 64
"""Of a token in a batch: its id, masks and numbers, each in eight bytes at most."""
_STORE_BYTES: Final = 256 * 2**20  # the least that Ray's object store has
_ON_THIS_MACHINE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def run_job(config: TrainConfig, context: JobContext) -> JobResult:
    """Run the job by ``config.launcher``: torchrun; Ray, on the cluster of ``config.ray_address`` or its own.

    That is the resident workers' where there are some. Its driver is another process than this one, and is started
    again as ``config.restarts`` says.

    Raises:
        JobError: the job failed.
        train.checkpoint.folders.CheckpointError: another process runs it, which nothing here has disturbed.
    """
    with only_supervisor(context):
        return _run_alone(config, context)


def _run_alone(config: TrainConfig, context: JobContext) -> JobResult:
    spec = write_job(config, context)

    def attempt(watch: Watch, again: bool) -> None:
        if config.launcher == "torchrun":
            run_torchrun(config, context, spec, watch, again=again)
        elif config.ray_address:
            submit(config, context, spec, watch, again=again)
        elif not run_resident(config, context, watch):
            run_on_own_ray(config, context, spec, watch)

    return supervise(config, context, attempt)


def run_resident(config: TrainConfig, context: JobContext, watch: Watch) -> bool:
    """Run the job in the resident workers; False if there are none, or they are at work, or take no such job.

    It writes to this process' own stdout and stderr. If this process is stopped, so are they.

    Raises:
        JobError: the job failed, and the workers have ended.
    """
    if not config.resident.enabled or not stays(config):
        return False
    for _ in range(_TRIES):
        if (connection := connect(start=True)) is None:
            return False
        with connection:
            try:
                word, *rest = _ask_residents(connection, config, context, watch)
            except EOFError:
                died = f"{context.run} failed: the resident workers died, see resident.log"
                raise JobError(died, KILLED, "lost") from None
            except JobError:  # it hangs, and has been killed
                wait_until_gone(connection)
                raise
            except TimeoutError as error:
                hang_up(connection)
                wait_until_gone(connection)
                raise JobError(f"{context.run} failed: {error}", KILLED, "hung") from error
            except BaseException:  # nobody waits for its candidate any more
                hang_up(connection)
                wait_until_gone(connection)
                raise
            if word == "failed":
                code, why = rest
                wait_until_gone(connection)
                kind: Kind | None = "lost" if code - SIGNALLED in STOPPING else None  # their owner ends, not this run
                raise JobError(f"{context.run} failed in the resident workers: {error_of(context) or why}", code, kind)
            if word != "restart":
                return bool(word == "done")
            wait_until_gone(connection)  # the next request gets new ones
    return False


def _ask_residents(connection: Connection, config: TrainConfig, context: JobContext, watch: Watch) -> tuple[Any, ...]:
    """How they answer in the end. Raises EOFError if they die, JobError if they hang."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    answer = ask(connection, "train", config, context, os.getcwd(), timeout_s=GONE_S)
    if answer[0] != "go":
        return answer
    try:
        for file in (1, 2):
            send_handle(connection, file, answer[1])
        while not connection.poll(_TURN_S):
            if why := watch.hung():
                with suppress(ProcessLookupError):
                    os.kill(answer[1], signal.SIGKILL)  # its subreaper ends all that is below it
                raise JobError(f"{context.run} hangs: {why}", KILLED, "hung")
        ended: tuple[Any, ...] = connection.recv()
    except (BrokenPipeError, ConnectionResetError) as error:
        raise EOFError from error
    return ended


def run_on_own_ray(config: TrainConfig, context: JobContext, spec: Path, watch: Watch) -> None:
    """Run the job in a process with a Ray of its own; it writes to this process' output.

    Raises:
        JobError: it failed, or hangs.
    """
    search_last(context.python_path)
    variables = {**os.environ, **search_path(), **api_keys(config, context)}
    command = [sys.executable, "-P", "-m", "train.launch", "--own-ray", str(spec)]
    if code := _run(command, variables, context, watch):
        raise JobError(f"{context.run} failed: {error_of(context) or f'its driver ended with code {code}'}", code)


def ray_of(config: TrainConfig) -> AbstractContextManager[None]:
    """A Ray with the cores of a job. Entering raises LocalRayError if it does not start."""
    return local_ray(
        num_cpus=config.cores,
        include_dashboard=False,
        object_store_memory=object_store_bytes(config),
        log_to_driver=False,
        logging_level="ERROR",
    )


def object_store_bytes(config: TrainConfig) -> int:
    """Of Ray's object store on this machine: for two of a step's batches, as it goes to ranks and comes back from them.

    With less Ray would write them to disk and read them again. At most a quarter of the machine's memory.
    """
    group = config.algorithm.group_size if config.samples else 1
    context = config.rollout.max_model_len or config.longest_response
    step = config.data.prompts_per_step * group * context * _TOKEN_BYTES
    return max(_STORE_BYTES, min(2 * step, machine_memory() // 4))


def run_torchrun(config: TrainConfig, context: JobContext, spec: Path, watch: Watch, *, again: bool = False) -> None:
    """Run the job in processes of torchrun, or in one that needs none; they write to this process' output.

    ``again``: what an attempt before wrote stays in the log.

    Raises:
        JobError: a rank failed, or hangs. Its traceback is in ``torchrun.log`` of the run's folder.
    """
    log = context.folder / "torchrun.log"
    search_last(context.python_path)
    variables = {**os.environ, **_ON_THIS_MACHINE, **loopback_sockets(), **search_path(), **api_keys(config, context)}
    with log.open("a" if again else "w") as output, tempfile.TemporaryDirectory(prefix="millrace-torchrun-") as folder:
        several = config.ranks_of(config.placement.actor) > 1
        command = [sys.executable, "-P", "-m", "train.launch", "--launcher", "torchrun", str(spec)]
        if several:
            command = torchrun_command(config, spec, "train.controller.torchrun_guard", f"{folder}/store")
        code = _run(command, variables, context, watch, forkable=not several, stderr=output.fileno())
    if code:
        why = (
            error_of(context) or f"torchrun ended with {code}, and its output with:\n{log.read_text()[-4000:].rstrip()}"
        )
        raise JobError(f"{context.run} failed; all of its output is in {log}\n{why}", code)


def _run(
    command: list[str],
    variables: dict[str, str],
    context: JobContext,
    watch: Watch,
    *,
    forkable: bool = True,
    stderr: int = 2,
) -> int:
    """Run a driver to its end; its exit code. Unless that is 0 nothing of it is left. Raises JobError if it hangs."""
    mark = f"{ATTEMPT}={uuid.uuid4().hex}"
    variables = variables | {PARENT: str(os.getpid()), ATTEMPT: mark.partition("=")[2]}
    forked = fork(command, environment=variables, files=(0, 1, stderr), patience=_FORK_S) if forkable else None
    process = forked or subprocess.Popen(command, stderr=None if stderr == 2 else stderr, env=variables)
    code = None
    try:
        code = _wait_for(process, context, watch)
    except JobError:
        process.kill()
        process.wait(_STOP_S)
        raise
    except BaseException:  # nobody waits for its candidate any more
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    finally:
        if code != 0 and not end_marked(mark, _STOP_S):
            say(f"{context.run}: some of its processes do not end though they were killed {_STOP_S:g} s ago")
    return code


def _wait_for(process: subprocess.Popen[bytes] | ForkedProcess, context: JobContext, watch: Watch) -> int:
    """The exit code. Raises JobError if a process of the run hangs."""
    while True:
        try:
            return process.wait(_TURN_S)
        except subprocess.TimeoutExpired:
            if why := watch.hung():
                raise JobError(f"{context.run} hangs: {why}", KILLED, "hung") from None


def torchrun_command(
    config: TrainConfig, spec: Path, torchrun: str = "torch.distributed.run", file: str = ""
) -> list[str]:
    """``torchrun``: the module to run; ``train.controller.torchrun_guard`` ends with the process that starts it.

    ``file``: where torchrun keeps what a rendezvous needs; a temporary one by default.
    """
    ranks = config.ranks_of(config.placement.actor)
    how = ["--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=0", f"--local-addr={LOOPBACK}"]
    # torchrun's own store would listen on all addresses; the ranks' store is in the first of them instead.
    how += [f"--rdzv-id={uuid.uuid4().hex}", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]
    how += [f"--rdzv-endpoint={file}"]
    return [sys.executable, "-P", "-m", torchrun, *how, "-m", "train.launch", "--launcher", "torchrun", str(spec)]


def submit(config: TrainConfig, context: JobContext, spec: Path, watch: Watch, *, again: bool = False) -> None:
    """Run the job by Ray's job API; its output is printed as it comes.

    A job of this run that is at work, as of a process like this one that was killed, is stopped before. ``again``: the
    job takes fewer ranks if the cluster has no room for all of them.

    Raises:
        JobError: the job failed, hangs, or the cluster can't be reached for ``train.restarts.wait_s``.
    """
    for name in api_keys(config, context):
        whose = "judge" if name == JUDGE_KEY else "teacher"
        say(f"{context.run}: the {whose}'s key is not sent to the cluster: its jobs have it from their own {name}")
    cluster = Cluster(config, context, patient=again)
    cluster.stop_earlier()
    entrypoint = [sys.executable, "-P", "-m", "train.launch", *(["--again"] if again else []), str(spec)]
    job_id = cluster.submit(shlex.join(entrypoint))
    say(f"{context.run}: submitted as {job_id} to {config.ray_address}")
    printed = 0
    try:
        while True:
            status, logs = cluster.look(job_id)
            print(logs[printed:], end="", flush=True)
            printed = len(logs)
            if status.is_terminal():
                break
            if why := watch.hung():
                raise JobError(f"{context.run} hangs: {why}", KILLED, "hung")
            time.sleep(_TURN_S)
    except BaseException:
        cluster.stop(job_id)  # nobody waits for its candidate any more
        raise
    if status != "SUCCEEDED":
        code, message = cluster.end_of(job_id)
        why = error_of(context) or f"{message}\n{logs[-2000:].rstrip()}"
        raise JobError(f"{context.run} failed; Ray job {job_id} ended as {status}\n{why}", code)


def main() -> None:
    """Run the job that the command line names, or a rank of it."""
    parser = argparse.ArgumentParser(prog="python -m train.launch", description="Run a training job from its file.")
    parser.add_argument(
        "--launcher", choices=["ray", "torchrun"], help="what runs the ranks; by default the job's own setting"
    )
    parser.add_argument("--own-ray", action="store_true", help="start a Ray for the job, and end it behind it")
    parser.add_argument("--again", action="store_true", help="take fewer ranks if the cluster has no room for all")
    parser.add_argument("spec", type=Path, metavar="SPEC.json", help="the job: {config, context}")
    arguments = parser.parse_args()
    config, context = read(arguments.spec, arguments.launcher)
    search_last(context.python_path)
    try:
        if config.launcher == "torchrun":
            run_as_rank(config, context, arguments.spec)
            skip_teardown("torch's threads may still run when the interpreter has gone, which aborts")
            end_process(0)
        elif arguments.own_ray:
            end_with_starter()
            with stop_on_signals(), ExitStack() as held:
                with cause_kept(context):
                    held.enter_context(ray_of(config))
                run_spec(config, context)
        else:
            import ray

            with cause_kept(context):
                ray.init(address="auto", log_to_driver=False, **search_as_here({}))
                config = fitting(config, context) if arguments.again else config
            run_spec(config, context)
    except Stopped as stopped:
        end_process(stopped.code)
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        if code == 1 and not teardown_is_skipped():
            raise
        traceback.print_exc()
        end_process(code)


def run_as_rank(config: TrainConfig, context: JobContext, spec: Path) -> None:
    """Be one rank of the job; several without torchrun around them are started by it."""
    ranks = config.ranks_of(config.placement.actor)
    if "RANK" not in os.environ and ranks > 1:
        command = torchrun_command(config, spec)
        os.execve(command[0], command, {**os.environ, **_ON_THIS_MACHINE, **loopback_sockets(), **search_path()})
    layout = Layout(ranks, **sizes(config, config.placement.actor))
    record(torchrun.run_rank)(config, layout, environment(config), partial(run_spec, config, context))


def run_spec(config: TrainConfig, context: JobContext, resident: ResidentPools | None = None) -> None:
    """Run a job where its ranks can be started, and leave beside its metrics why it has no result, if it has none."""
    try:
        with driver_heartbeat(context.folder, interval(config.restarts.silence_s)), cause_kept(context):
            run(config, context, resident)
    finally:
        forget_ranks(context.folder)


@contextmanager
def cause_kept(context: JobContext) -> Iterator[None]:
    """Have who started the job know by what the block failed."""
    try:
        yield
    except Exception as error:
        failure = of_exception(error, driver_step(context.folder))
        keep_failure(context.folder, failure)
        (context.folder / ERROR).write_text(failure.what)
        raise


def error_of(context: JobContext) -> str | None:
    """What the driver of the job failed by; None if it left no message."""
    file = context.folder / ERROR
    return file.read_text() if file.exists() else None


def read(spec: Path, launcher: str | None = None) -> tuple[TrainConfig, JobContext]:
    """A job's file; ``launcher`` replaces its own. Keys of APIs are from the environment."""
    job = json.loads(spec.read_text())
    if launcher is not None:
        job["config"]["launcher"] = launcher
    context = JobContext.model_validate(job["context"])
    config = with_teacher_key(TrainConfig.model_validate(job["config"]), os.environ.get(TEACHER_KEY))
    return config, with_judge_key(context, os.environ.get(JUDGE_KEY))


if __name__ == "__main__":
    main()
