"""Why an attempt at a run failed, and whether another one may go otherwise. Imports no torch.

The driver knows its exception and leaves ``failure.json``; of a driver that was killed the exit code alone says
something.
"""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ValidationError

from evaluation.suites.suite import SuiteError
from feedback.exchange.record_files import RecordError
from feedback.files import replace_file
from feedback.processes.exit import SIGNALLED
from feedback.processes.signals import STOPPING
from serve.vllm.compat import IncompatibleVersion
from train.checkpoint.folders import CheckpointError
from train.config.sections import RestartsConfig
from train.controller.failure_kinds import Kind, is_out_of_memory
from train.planner.check import DoesNotFit

FAILURE: Final = "failure.json"
KILLED: Final = SIGNALLED + signal.SIGKILL

MEMORY_ADVICE: Final = (
    "out of memory: train adapters (train.lora), lower train.micro_batch_tokens or "
    "train.rollout.kv_cache_bytes, set train.activation_checkpointing, or end what else runs; `millrace plan` says how "
    "much is needed"
)

_REFUSED: Final = (CheckpointError, DoesNotFit, IncompatibleVersion, RecordError, SuiteError, ValidationError)


class JobError(RuntimeError):
    """The job failed; the message says why, and where its output is.

    ``exit_code``: of the process that waits for it: 128 + n if signal n has ended a process of the job. ``kind``: where
    who waited knows it better than by the exit code.
    """

    def __init__(self, message: str, code: int, kind: Kind | None = None) -> None:
        super().__init__(message)
        self.exit_code = code if code > SIGNALLED else SIGNALLED - code if code < 0 else 1
        self.kind = kind


class Failure(BaseModel):
    """``what``: the cause in words. ``where``: the type of an exception and the line that raised it, or a signal.
    ``step``: steps that were done; None if it didn't come to the first one of the attempt. ``code``: of the process."""

    kind: Kind
    what: str
    where: str = ""
    step: int | None = None
    code: int = 1


def of_exception(error: BaseException, step: int | None) -> Failure:
    """What the driver failed by."""
    text = str(error)
    ours = type(error).__module__.split(".")[0] in ("feedback", "serve", "evaluation", "train")  # these say it all
    return Failure(
        kind=kind_of(error),
        what=text if ours and text else f"{type(error).__name__}: {text}",
        where=where(f"{text}\n") or where("".join(traceback.format_exception(error))),
        step=step,
        code=getattr(error, "exit_code", 1),
    )


def kind_of(error: BaseException) -> Kind:
    """By the types of an exception; a WorkerError has its own ``kind``."""
    if (known := getattr(error, "kind", None)) is not None:
        kind: Kind = known
        return kind
    if is_out_of_memory(error):
        return "memory"
    if isinstance(error, _REFUSED):
        return "refused"
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "stopped"
    # A task's error is the rank's own exception; all others of Ray's are of a process, a node or a store that has gone.
    names = {base.__name__ for base in type(error).__mro__}
    return "lost" if "RayError" in names and "RayTaskError" not in names else "raised"


def where(text: str) -> str:
    """The type of the exception that a traceback tells of, and the line that raised it; empty if it is no traceback."""
    lines = re.findall(r'^\s*File "(.+?)", line (\d+)', text, re.M)
    types = re.findall(r"^([A-Za-z_][\w.]*)(?::|$)", text, re.M)
    return f"{types[-1] if types else 'an exception'} at {lines[-1][0]}:{lines[-1][1]}" if lines else ""


def of_job(error: JobError, folder: Path, step: int | None) -> Failure:
    """What is known of a failed attempt: what its driver left, else by how it ended."""
    if error.kind is not None:
        return Failure(kind=error.kind, what=str(error), step=step, code=error.exit_code)
    try:
        left = Failure.model_validate_json((folder / FAILURE).read_bytes())
    except (FileNotFoundError, ValidationError):
        left = None
    if left is not None:
        return left.model_copy(update={"code": error.exit_code})
    if (number := error.exit_code - SIGNALLED) <= 0:
        return Failure(kind="raised", what=str(error), where=where(str(error)), step=step)
    kind: Kind = "lost" if number == signal.SIGKILL else "stopped" if number in STOPPING else "crashed"
    named = f"signal {number}"
    return Failure(kind=kind, what=str(error), where=named, step=step, code=error.exit_code)


def keep(folder: Path, failure: Failure) -> None:
    """Leave it for ``of_job``."""
    replace_file(folder / FAILURE, failure.model_dump_json().encode())


def final_reason(failures: Sequence[Failure], within: int, config: RestartsConfig) -> str | None:
    """Why a run is not started again; None if it is.

    Args:
        failures: of the attempts since the run last came further, the last one last.
        within: restarts within the last ``window_s`` seconds, and earlier ones since it last came further.
    """
    last, before = failures[-1], failures[:-1]
    if config.attempts == 0 or last.kind == "stopped":
        return ""
    if last.kind == "refused":
        return "it would fail so again"
    if last.kind == "memory":
        return "there would be too little memory again"
    if last.kind == "raised" and last.step is None and not before:
        return "it failed before its first step, and would again"
    if last.kind in ("raised", "crashed") and any(
        (one.kind, one.where, one.step) == (last.kind, last.where, last.step) for one in before
    ):
        at = "before its first step" if last.step is None else f"after step {last.step}"
        return f"it failed so {at} twice, and would again"
    if within >= config.attempts:
        return (
            f"it was started again {within} times within {config.window_s:g} s, or from the same checkpoint "
            "(train.restarts.attempts, train.restarts.window_s)"
        )
    return None
