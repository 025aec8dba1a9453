"""Which failures are worth another attempt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
from pydantic import ValidationError

from tests.paths import ROOT
from train.checkpoint.folders import CheckpointError
from train.config.sections import RestartsConfig
from train.config.training import TrainConfig
from train.controller.failure_kinds import Kind, text_is_out_of_memory
from train.controller.ray_pool import kind_of as kind_of_rays
from train.controller.worker_group import WorkerError
from train.run.recovery.failure import FAILURE, Failure, JobError, final_reason, keep, kind_of, of_exception, of_job

THREE = RestartsConfig(attempts=3)


def raised(number: int) -> Exception:
    """An exception with a traceback; two of one number come from one line, whatever their texts say."""
    try:
        assert number == 0, f"the {number}th reward is wrong"
        raise ArithmeticError("another line")
    except (AssertionError, ArithmeticError) as error:
        return error


def failure(kind: Kind, step: int | None = 3, where: str = "here") -> Failure:
    return Failure(kind=kind, what="it", where=where, step=step)


def settings_error() -> ValidationError:
    with pytest.raises(ValidationError) as wrong:
        TrainConfig.model_validate({"ranks": 0})
    return wrong.value


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerError("rank 1 died", died=True), "lost"),
        (WorkerError("Connection closed by peer", consequence=True), "lost"),
        (WorkerError("it did not answer within 3 s", kind="hung"), "hung"),
        (WorkerError("ArithmeticError: this rank is broken"), "raised"),
        (MemoryError(), "memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:125] DefaultCPUAllocator: can't allocate memory"), "memory"),
        (ray.exceptions.OutOfMemoryError("1 worker(s) were killed"), "memory"),
        (ray.exceptions.LocalRayletDiedError(), "lost"),
        (ray.exceptions.RaySystemError(ConnectionError("the GCS")), "lost"),
        (CheckpointError("every checkpoint is torn"), "refused"),
        (settings_error(), "refused"),
        (KeyboardInterrupt(), "stopped"),
        (AssertionError("a user's"), "raised"),
        (OSError(5, "Input/output error"), "raised"),
    ],
)
def test_an_exception_of_the_driver_is_of_a_kind(error: BaseException, kind: Kind) -> None:
    assert kind_of(error) == kind


def test_what_a_rank_raised_is_its_own_under_ray_and_what_ray_lost_is_not() -> None:
    def of_rank(cause: Exception) -> Exception:
        made: Exception = ray.exceptions.RayTaskError("call", "Traceback …", cause).as_instanceof_cause()
        return made

    assert kind_of_rays(of_rank(ArithmeticError("wrong"))) is None
    assert kind_of_rays(of_rank(torch.OutOfMemoryError("CUDA out of memory"))) == "memory"
    assert kind_of_rays(ray.exceptions.ActorDiedError()) == "lost"
    assert kind_of_rays(ray.exceptions.ActorUnavailableError("gone", b"0" * 16)) == "lost"


def test_a_lack_of_memory_is_told_by_the_type_that_a_traceback_names() -> None:
    assert text_is_out_of_memory("Traceback …\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    assert text_is_out_of_memory("Traceback …\nMemoryError")
    assert not text_is_out_of_memory('Traceback …\nValueError: "MemoryError" is no reward')


def test_an_exception_is_known_again_by_its_line_whatever_its_text_says() -> None:
    first, again, other = (of_exception(raised(number), 2) for number in (1, 2, 0))
    assert first.what != again.what
    assert first.where == again.where
    assert first.where.startswith("AssertionError at ")
    assert first.where.partition(" at ")[2].startswith(__file__)
    assert other.where != first.where


def test_of_a_driver_that_left_nothing_the_exit_code_tells(tmp_path: Path) -> None:
    found = {code: of_job(JobError("it ended", code), tmp_path, 4) for code in (1, 137, -9, 139, 143, -2)}
    kinds = {code: one.kind for code, one in found.items()}
    assert kinds == {1: "raised", 137: "lost", -9: "lost", 139: "crashed", 143: "stopped", -2: "stopped"}
    assert found[139].where == "signal 11"
    keep(tmp_path, failure("raised", 4))
    assert json.loads((tmp_path / FAILURE).read_text())["step"] == 4
    left = of_job(JobError("it ended", 137), tmp_path, None)
    assert (left.kind, left.step, left.code) == ("raised", 4, 137)
    assert of_job(JobError("it hangs", 137, "hung"), tmp_path, 7).kind == "hung"


@pytest.mark.parametrize(
    ("failures", "within", "words"),
    [
        ([failure("lost")], 0, None),
        ([failure("hung", None)], 0, None),
        ([failure("crashed")], 0, None),
        ([failure("raised")], 0, None),
        ([failure("lost"), failure("lost"), failure("lost")], 2, None),
        ([failure("lost")] * 4, 3, "3600 s, or from the same checkpoint (train.restarts.attempts"),
        ([failure("lost")] * 9, 2, None),  # the others are longer ago
        ([failure("raised", None)], 0, "before its first step"),
        ([failure("lost"), failure("raised", None)], 1, None),
        ([failure("raised", 3), failure("raised", 3)], 1, "it failed so after step 3 twice"),
        ([failure("raised", 3), failure("lost", 3), failure("raised", 3)], 2, "after step 3 twice"),
        ([failure("raised", 3), failure("raised", 4)], 1, None),
        ([failure("raised", 3), failure("raised", 3, "elsewhere")], 1, None),
        ([failure("crashed", 3, "signal 11"), failure("crashed", 3, "signal 11")], 1, "after step 3 twice"),
        ([failure("lost", 3), failure("lost", 3)], 1, None),
        ([failure("refused")], 0, "it would fail so again"),
        ([failure("memory")], 0, "too little memory again"),
        ([failure("stopped")], 0, ""),
    ],
)
def test_what_would_fail_again_is_not_started_again(failures: list[Failure], within: int, words: str | None) -> None:
    why = final_reason(failures, within, THREE)
    assert (why is None) == (words is None), why
    assert (words or "") in (why or "")


def test_no_attempts_are_none() -> None:
    assert final_reason([failure("lost")], 0, RestartsConfig(attempts=0)) == ""


def test_who_decides_that_needs_no_torch() -> None:
    code = "import sys, train.run.recovery.failure; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=120).returncode == 0
