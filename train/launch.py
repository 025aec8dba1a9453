"""Where a training job runs: over a Ray of its own in this process or in resident workers, as a job on a cluster, or
under torchrun.

``python -m train.launch SPEC.json`` is what a cluster runs, in a Ray that is there. With ``--launcher torchrun`` it
needs no Ray: as it is for one rank, under ``torchrun --nproc-per-node N -m train.launch …`` for several.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from feedback.fork_server import PARENT, fork
from feedback.process_exit import SIGNALLED, end_process, skip_teardown, teardown_is_skipped
from feedback.resident_socket import GONE_S, ask, connect, hang_up, wait_until_gone
from feedback.user_code import search_last, search_path
from serve.local_ray.cluster import LOOPBACK, local_ray, loopback_sockets, search_as_here
from train.config.training import TrainConfig
from train.context import JUDGE_KEY, JobContext, JobResult, judge_key, with_judge_key, write_job
from train.controller import torchrun
from train.controller.dispatch import Layout
from train.job import run
from train.observe.progress import say
from train.run.record import ERROR
from train.workers.resident_pools import ResidentPools, stays
from train.workers.role_groups import environment, sizes

_STOP_S, _FORK_S = 20.0, 10.0
_TRIES = 3
_ON_THIS_MACHINE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class JobError(RuntimeError):
    """The job failed; the message says why, and where its output is.

    ``exit_code``: of the process that waits for it: 128 + n if signal n has ended a process of the job.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code if code > SIGNALLED else SIGNALLED - code if code < 0 else 1


def run_job(config: TrainConfig, context: JobContext) -> JobResult:
    """Run the job by ``config.launcher``: torchrun; Ray, on the cluster of ``config.ray_address`` or its own.

    That is the resident workers' where there are some.

    Raises:
        JobError: the job failed on the cluster, under torchrun or in the resident workers.
    """
    context.folder.mkdir(parents=True, exist_ok=True)
    (context.folder / ERROR).unlink(missing_ok=True)
    spec = write_job(config, context)
    if config.launcher == "torchrun":
        run_torchrun(config, context, spec)
    elif config.ray_address:
        submit(config, context, spec)
    elif not run_resident(config, context):
        run_locally(config, context)
    return JobResult.model_validate_json((context.folder / "result.json").read_text())


def run_resident(config: TrainConfig, context: JobContext) -> bool:
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
                word, *rest = _ask_residents(connection, config, context)
            except EOFError:
                died = f"{context.run} failed: the resident workers died, see resident.log"
                raise JobError(died, SIGNALLED + signal.SIGKILL) from None
            except BaseException:  # nobody waits for its candidate any more
                hang_up(connection)
                wait_until_gone(connection)
                raise
            if word == "failed":
                code, why = rest
                wait_until_gone(connection)
                raise JobError(f"{context.run} failed in the resident workers: {error_of(context) or why}", code)
            if word != "restart":
                return bool(word == "done")
            wait_until_gone(connection)  # the next request gets new ones
    return False


def _ask_residents(connection: Connection, config: TrainConfig, context: JobContext) -> tuple[Any, ...]:
    """How they answer in the end. Raises EOFError if they die."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    answer = ask(connection, "train", config, context, os.getcwd(), timeout_s=GONE_S)
    if answer[0] != "go":
        return answer
    for file in (1, 2):
        send_handle(connection, file, answer[1])
    try:
        ended: tuple[Any, ...] = connection.recv()
    except ConnectionResetError as error:
        raise EOFError from error
    return ended


def run_locally(config: TrainConfig, context: JobContext) -> None:
    """Run the job on a Ray of its own. Raises LocalRayError if that does not start."""
    search_last(context.python_path)
    with ray_of(config):
        run_spec(config, context)


def ray_of(config: TrainConfig) -> AbstractContextManager[None]:
    """A Ray with the cores of a job. Entering raises LocalRayError if it does not start."""
    return local_ray(
        num_cpus=config.cores,
        include_dashboard=False,
        object_store_memory=256 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
    )


def run_torchrun(config: TrainConfig, context: JobContext, spec: Path) -> None:
    """Run the job in processes of torchrun, or in one that needs none; they write to this process' output.

    Raises:
        JobError: a rank failed. Its traceback is in ``torchrun.log`` of the run's folder.
    """
    log = context.folder / "torchrun.log"
    search_last(context.python_path)
    variables = {**os.environ, **_ON_THIS_MACHINE, **loopback_sockets(), **search_path(), **judge_key(context)}
    variables[PARENT] = str(os.getpid())
    with log.open("w") as output, tempfile.TemporaryDirectory(prefix="millrace-torchrun-") as folder:
        if config.ranks_of(config.placement.actor) == 1:
            command = [sys.executable, "-P", "-m", "train.launch", "--launcher", "torchrun", str(spec)]
            forked = fork(command, environment=variables, files=(0, 1, output.fileno()), patience=_FORK_S)
            process = forked or subprocess.Popen(command, stderr=output, env=variables)
        else:
            command = torchrun_command(config, spec, "train.controller.torchrun_guard", f"{folder}/store")
            process = subprocess.Popen(command, stderr=output, env=variables)
        try:
            code = process.wait()
        except BaseException:  # nobody waits for its candidate any more
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if code:
        why = (
            error_of(context) or f"torchrun ended with {code}, and its output with:\n{log.read_text()[-4000:].rstrip()}"
        )
        raise JobError(f"{context.run} failed; all of its output is in {log}\n{why}", code)


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


def submit(config: TrainConfig, context: JobContext, spec: Path) -> None:
    """Run the job by Ray's job API; its output is printed as it comes.

    Raises:
        JobError: the job failed.
    """
    from ray.job_submission import JobSubmissionClient

    if judge_key(context):
        say(f"{context.run}: the judge's key is not sent to the cluster: its jobs have it from their own {JUDGE_KEY}")
    client = JobSubmissionClient(config.ray_address)
    job_id = client.submit_job(entrypoint=f"{sys.executable} -P -m train.launch {spec}", metadata={"run": context.run})
    say(f"{context.run}: submitted as {job_id} to {config.ray_address}")
    printed = 0
    try:
        while True:
            status = client.get_job_status(job_id)
            logs = client.get_job_logs(job_id)
            print(logs[printed:], end="", flush=True)
            printed = len(logs)
            if status.is_terminal():
                break
            time.sleep(1.0)
    except BaseException:
        client.stop_job(job_id)  # nobody waits for its candidate any more
        raise
    if status != "SUCCEEDED":
        info = client.get_job_info(job_id)
        why = error_of(context) or f"{info.message}\n{logs[-2000:].rstrip()}"
        code = info.driver_exit_code or 1
        raise JobError(f"{context.run} failed; Ray job {job_id} ended as {status}\n{why}", code)


def main() -> None:
    """Run the job that the command line names, or a rank of it."""
    parser = argparse.ArgumentParser(prog="python -m train.launch", description="Run a training job from its file.")
    parser.add_argument(
        "--launcher", choices=["ray", "torchrun"], help="what runs the ranks; by default the job's own setting"
    )
    parser.add_argument("spec", type=Path, metavar="SPEC.json", help="the job: {config, context}")
    arguments = parser.parse_args()
    config, context = read(arguments.spec, arguments.launcher)
    search_last(context.python_path)
    try:
        if config.launcher == "torchrun":
            run_as_rank(config, context, arguments.spec)
            skip_teardown("torch's threads may still run when the interpreter has gone, which aborts")
            end_process(0)
        else:
            import ray

            ray.init(address="auto", log_to_driver=False, **search_as_here({}))
            run_spec(config, context)
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
        run(config, context, resident)
    except Exception as error:
        ours = type(error).__module__.split(".")[0] in ("feedback", "serve", "evaluation", "train")  # these say it all
        (context.folder / ERROR).write_text(str(error) if ours else f"{type(error).__name__}: {error}")
        raise


def error_of(context: JobContext) -> str | None:
    """What the driver of the job failed by; None if it left no message."""
    file = context.folder / ERROR
    return file.read_text() if file.exists() else None


def read(spec: Path, launcher: str | None = None) -> tuple[TrainConfig, JobContext]:
    """A job's file; ``launcher`` replaces its own. The judge's key is from the environment."""
    job = json.loads(spec.read_text())
    if launcher is not None:
        job["config"]["launcher"] = launcher
    context = JobContext.model_validate(job["context"])
    return TrainConfig.model_validate(job["config"]), with_judge_key(context, os.environ.get(JUDGE_KEY))


if __name__ == "__main__":
    main()
