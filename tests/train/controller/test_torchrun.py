"""The same workers under torchrun, where there is no Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from job_home import job_context, make_home
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from feedback.processes import fork_server
from serve.policies.store import PolicyStore
from serve.swap.compatibility import require_compatible
from tests.paths import ROOT
from train.context import JobResult
from train.controller.torchrun_guard import exit_code
from train.launch import JobError

HERE = ROOT / "tests" / "train"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One in which Ray can not be imported, without what vLLM left in ours when another test ran it in this process."""
    folder = tmp_path_factory.mktemp("no_ray")
    (folder / "ray.py").write_text("raise ImportError('there is no Ray here')")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return {**clean, "PYTHONPATH": f"{folder}:{ROOT}:{HERE}", "OMP_NUM_THREADS": "1"}


def start(folder: Path, what: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    how = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "0"]
    command = [
        sys.executable,
        "-m",
        "train.controller.torchrun_guard",
        *how,
        str(HERE / "torchrun_driver.py"),
        str(folder),
        what,
    ]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def output_of(process: subprocess.Popen[str], timeout_s: float) -> str:
    try:
        return process.communicate(timeout=timeout_s)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("what", ["well", "idle", "threads"])
def test_calls_reach_two_ranks_by_their_rules_without_ray(
    tmp_path: Path, environment: dict[str, str], what: str
) -> None:
    process = start(tmp_path, what, environment)
    output = output_of(process, 120)
    assert process.returncode == 0, output
    assert "ALL WELL" in output


def test_a_rank_that_raises_ends_all_with_its_traceback(tmp_path: Path, environment: dict[str, str]) -> None:
    process = start(tmp_path, "raises", environment)
    output = output_of(process, 80)  # the collective that rank 0 waits in has 100 s
    assert process.returncode == 1, output
    assert "ArithmeticError: this rank is broken" in output


def test_a_rank_that_is_killed_ends_all_and_is_named(tmp_path: Path, environment: dict[str, str]) -> None:
    process = start(tmp_path, "killed", environment)
    marker = tmp_path / "hanging"
    deadline = time.monotonic() + 300
    while not (marker.exists() and marker.read_text()):
        assert time.monotonic() < deadline, "rank 1 was never called"
        time.sleep(0.02)
    os.kill(int(marker.read_text()), signal.SIGKILL)
    output = output_of(process, 50)
    assert process.returncode == 128 + signal.SIGKILL, "as under Ray: a cycle goes on with what a signal ended"
    assert "SIGKILL" in output or "Connection closed by peer" in output
    assert f"pid: {marker.read_text()}" in output, output


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([(-9, None)], 137),
        ([(-11, None), (-15, None)], 139),
        ([(1, "RuntimeError: Connection closed by peer"), (-9, None), (-15, None)], 137),
        ([(1, "ArithmeticError: this rank is broken"), (-15, None), (-9, None)], 1),
        ([(-6, "ArithmeticError: this rank is broken"), (-15, None)], 1),
        ([(-6, "RuntimeError: Connection closed by peer"), (-9, None)], 137),
        ([(2, None), (-15, None)], 1),
        ([(-15, None)], 1),
        ([(1, "RuntimeError: Connection closed by peer"), (-15, None)], 1),
    ],
)
def test_what_torchrun_ends_with_tells_a_rank_that_a_signal_ended_from_one_that_failed(
    tmp_path: Path, ends: list[tuple[int, str | None]], code: int
) -> None:
    failures = []
    for rank, (exitcode, traceback) in enumerate(ends):
        file = tmp_path / f"{rank}.json"
        if traceback is not None:
            extra = {"py_callstack": traceback, "timestamp": "1"}
            file.write_text(json.dumps({"message": {"message": "failed", "extraInfo": extra}}))
        failures.append(ProcessFailure(local_rank=rank, pid=1, exitcode=exitcode, error_file=str(file)))
    assert exit_code(failures) == code


def test_a_job_that_a_signal_ended_says_so_by_its_exit_code() -> None:
    assert [JobError("it failed", code).exit_code for code in (1, 2, 137, -9)] == [1, 1, 137, 137]


TIED = """
import subprocess, sys
from feedback.processes import fork_server
from train.controller.torchrun_guard import end_with_starter
end_with_starter()
sys.exit(subprocess.run([sys.executable, "-I", "-S", fork_server.__file__, sys.argv[1]]).returncode)
"""


def test_what_a_driver_starts_does_not_end_for_having_another_parent_than_the_driver(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "rank.py").write_text("print('a rank that a fork server is to fork')\n")
    variables = {**environment, fork_server.PARENT: str(os.getpid())}
    variables.pop(fork_server.ADDRESS, None)  # where no server forks it in time, it is an interpreter of its own
    command = [sys.executable, "-c", TIED, str(tmp_path / "rank.py")]
    assert subprocess.run(command, env=variables, timeout=60, check=False).returncode == 0


def test_ranks_end_with_the_process_that_started_torchrun(tmp_path: Path, environment: dict[str, str]) -> None:
    how = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "0", str(HERE / "torchrun_driver.py")]
    command = [sys.executable, "-m", "train.controller.torchrun_guard", *how, str(tmp_path), "killed"]
    starter = [sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"]
    process = subprocess.Popen(starter, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def left() -> list[int]:
        found = psutil.process_iter(["cmdline"])
        return [p.pid for p in found if str(tmp_path) in (p.info["cmdline"] or ()) and p.pid != process.pid]

    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "hanging").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(left()) == 3
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 180
    while left():
        assert time.monotonic() < deadline, "they go on"
        time.sleep(0.05)


def test_a_whole_job_runs_on_one_rank_without_torchrun_around_it_and_without_ray(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    spec = write_job(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "train.launch", "--launcher", "torchrun", str(spec)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output = output_of(process, 800)
    assert process.returncode == 0, output
    result = JobResult.model_validate_json((tmp_path / "runs" / "r" / "result.json").read_text())
    assert result.candidate == 2
    assert result.steps == 2
    parent, candidate = (PolicyStore(tmp_path / "policies").get(version) for version in (1, 2))
    kept = [{name: file["sha256"] for name, file in p.files.items() if "safe" not in name} for p in (parent, candidate)]
    assert kept[0] == kept[1], "all that decides an answer besides the weights is the parent's, byte by byte"
    assert {"config.json", "generation_config.json", "additional_chat_templates/tool_use.jinja"} < kept[0].keys()
    assert parent.files["model.safetensors"] != candidate.files["model.safetensors"]
    require_compatible(parent, candidate)
    warned = [line for line in output.splitlines() if re.search(r"\bWARNING\b|FutureWarning", line)]
    assert [line for line in warned if "LD_PRELOAD" not in line] == [], "nobody can do anything about it"
    assert torch.cuda.is_available() or "LD_PRELOAD" in os.environ or warned, "of this somebody can"


def as_a_hub_has_it(folder: Path) -> None:
    """With the config of an older transformers, two tokens that end a response, and a template for tools."""
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "4.43.1"}))
    ends = [config["eos_token_id"], config["pad_token_id"]]
    generation = {"eos_token_id": ends, "do_sample": True, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")


def write_job(root: Path) -> Path:
    """A policy that serves, a lake with prompts, and a job on them."""
    make_home(root, as_a_hub_has_it)
    (root / "by_length.py").write_text(
        "def reward(rows): return [-float(len(r)) for r in rows['response'].to_pylist()]"
    )
    config = {
        "dtype": "float32",
        "steps": 2,
        "micro_batch_tokens": 64,
        "rollout": {"max_tokens": 6, "max_model_len": 64, "kv_cache_bytes": 16 * 2**20},
        "data": {"prompts_per_step": 4, "min_prompts": 4},
        "algorithm": {"group_size": 4},
        "start_timeout_s": 200,
        "step_timeout_s": 100,
    }
    context = job_context(root, "r", reward="by_length:reward", python_path=[str(root)])
    spec = root / "runs" / "r" / "job.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"config": config, "context": context}))
    return spec
