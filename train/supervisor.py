"""Attempts at a run: one after the other, until it has a result or fails in a way that another would too.

Each attempt has processes of its own, of which nothing is left when the next one begins: a group that has lost a rank
is not mended. The next one goes on from the last whole checkpoint, as a run of the same name always does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from feedback.processes.exit import SIGNALLED
from train.checkpoint.folders import checkpoints, step_of, torn
from train.config.sections import RestartsConfig
from train.config.training import TrainConfig
from train.context import RESULT, JobContext, JobResult
from train.controller.heartbeat import Watch, driver_step
from train.observe.progress import say
from train.run.record import ERROR
from train.run.recovery.failure import FAILURE, MEMORY_ADVICE, Failure, JobError, final_reason, of_job
from train.run.recovery.restarts import RESTARTS, Restart, add_restart

_LONGEST_BACKOFF_S: Final = 60.0
_WORDS: Final = {"lost": "it lost a process", "hung": "it hung", "crashed": "a process crashed"}
"""Of kinds of failures after which a run is started again; of an exception "it failed" is all that is known."""

Attempt = Callable[[Watch, bool], None]
"""Run the job once; raises JobError. Of what tells whether it hangs, and whether it is a restart."""


def supervise(config: TrainConfig, context: JobContext, attempt: Attempt) -> JobResult:
    """Run the job, and again if it fails, as ``train.restarts`` says.

    Raises:
        JobError: the job failed, and is not started again; the message has the cause, the first one if there are
            several, and why.
    """
    folder, settings = context.folder, config.restarts
    result = folder / RESULT
    if not result.exists() and not checkpoints(folder / "checkpoints"):
        (folder / RESTARTS).unlink(missing_ok=True)  # of a run whose name is used anew
    failures: list[Failure] = []
    restarts: list[tuple[float, int]] = []  # after each failure but the last: when, and after which step it went on
    while True:
        (folder / ERROR).unlink(missing_ok=True)
        (folder / FAILURE).unlink(missing_ok=True)
        before, kills = _identity(result), kernel_kills()
        again = bool(failures)
        start_s = config.start_timeout_s + (settings.wait_s if again else 0.0)
        try:
            attempt(Watch(folder, settings.silence_s, start_s), again)
            if _identity(result) == before:
                raise JobError(f"{context.run} failed: its driver ended as if it were done, without a result", 1)
        except JobError as error:
            if _identity(result) == before:
                failures.append(_for_want_of_memory(of_job(error, folder, driver_step(folder)), kills))
                last = error
            else:
                say(f"{context.run}: it has its result, and then: {error}")
                return JobResult.model_validate_json(result.read_text())
        else:
            return JobResult.model_validate_json(result.read_text())
        now, step = time.monotonic(), last_step(folder)
        stuck = [one for one, (_, since) in zip(failures, restarts, strict=False) if since >= step]
        counted = sum(now - at < settings.window_s or since >= step for at, since in restarts)
        why = final_reason([*stuck, failures[-1]], counted, settings)
        if why is not None:
            raise _given_up(context.run, last, failures, why) from last
        restarts.append((now, step))
        _restart(context, failures[-1], step, counted + 1, settings)


def _restart(context: JobContext, failure: Failure, step: int, number: int, settings: RestartsConfig) -> None:
    """Put it on record, say so, and wait."""
    add_restart(
        context.folder,
        Restart(at=datetime.now(UTC), kind=failure.kind, cause=failure.what, failed_after=failure.step, step=step),
    )
    pause = min(settings.backoff_s * 2 ** (number - 1), _LONGEST_BACKOFF_S)
    from_where = f"goes on after step {step}" if step else "begins anew"
    say(
        f"{context.run}: restart {number} of at most {settings.attempts} within {settings.window_s:g} s, {from_where} "
        f"in {pause:g} s, as {_WORDS.get(failure.kind, 'it failed')}: {failure.what}"
    )
    time.sleep(pause)


def last_step(folder: Path) -> int:
    """The step of a run's last whole checkpoint; 0 if there is none."""
    return next((step_of(one) for one in checkpoints(folder / "checkpoints") if torn(one) is None), 0)


def kernel_kills() -> int | None:
    """How many processes of this one's control group the kernel has ended for want of memory; None if unknown."""
    try:
        [group] = [
            line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[0] == "0"
        ]
        for place in (Path("/sys/fs/cgroup", group.lstrip("/")), Path("/sys/fs/cgroup")):
            if (events := place / "memory.events").exists():
                return int(dict(line.split() for line in events.read_text().splitlines())["oom_kill"])
    except (OSError, ValueError, KeyError):
        pass
    return None


def _for_want_of_memory(failure: Failure, kills: int | None) -> Failure:
    """The same, or what the kernel did: it kills what has the most memory, which may need less the next time."""
    if failure.kind != "lost" or kills is None or kernel_kills() == kills:
        return failure
    what = f"{failure.what}\nThe kernel has ended a process meanwhile: {MEMORY_ADVICE}"
    return failure.model_copy(update={"kind": "crashed", "where": "out of memory", "what": what})


def _identity(result: Path) -> tuple[int, int] | None:
    """Of a file, which is replaced when it is written."""
    try:
        status = os.stat(result)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _given_up(run: str, last: JobError, failures: list[Failure], why: str) -> JobError:
    """The error to end with."""
    text = str(last)  # at the end, as a cycle's record has the last line
    if len(failures) > 1:
        first = failures[0]
        at = "" if first.step is None else f" after step {first.step}"
        text = f"{run} failed, and is not started again: {why}\nFirst cause{at}: {first.what}\nLast cause: {text}"
    if failures[-1].kind == "memory":
        text += f"\n{MEMORY_ADVICE}"
    code = failures[-1].code
    return JobError(text, code if code > SIGNALLED else 1, failures[-1].kind)
