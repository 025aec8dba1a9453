"""Runs whose processes are killed, stopped or broken go on by themselves, or end with the cause.

Real jobs under torchrun, of which a hook of theirs does to itself what the file ``trouble`` says, once a line.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from job_home import SFT_CONFIG, job_context, make_home, metrics_of

from deploy.display.run_records import shown
from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from serve.policies.store import PolicyStore
from tests.feedback.feedback_rows import interaction, put, reward, said
from train.config.training import TrainConfig
from train.context import JobContext, JobResult
from train.launch import JobError, run_job
from train.run.record import read_metrics, read_record
from train.run.recovery.restarts import Restart, add_restart, note_ranks, read_restarts
from train.run.retention import run_folders
from train.workers.fewer_ranks import fewer

TROUBLE = """
import os
import signal
from train.observe.hooks import Hook

class Trouble(Hook):
    def on_step(self, step, metrics):
        file = self.run.folder.parent.parent / "trouble"
        lines = file.read_text().splitlines() if file.exists() else []
        if not lines or int(lines[0].split()[0]) != step:
            return
        file.write_text("".join(line + "\\n" for line in lines[1:]))
        what = lines[0].split()[1]
        if what == "raise":
            raise ArithmeticError("the users' own")
        if what == "memory":
            raise MemoryError("cannot allocate")
        if what == "silent":
            os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(os.getpid(), int(what))
"""
SETTINGS: dict[str, Any] = {
    **SFT_CONFIG,
    "steps": 5,
    "checkpoint": {"every_steps": 1, "asynchronous": False},
    "hooks": ["trouble:Trouble"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("restarts")
    make_home(root)
    (root / "trouble.py").write_text(TROUBLE)
    lake = Lake(str(root / "lake"), LakeConfig())
    sampled = {"response_token_ids": [10, 11, 1], "logprobs": [-2.0] * 3, "response": "ij"}
    names = [f"r-{i}" for i in range(12)]
    put(
        lake,
        "interactions",
        [
            interaction(name, prompt="odds ab>", prompt_token_ids=[30 + i, 20], **sampled)
            for i, name in enumerate(names)
        ],
    )
    put(lake, "feedback", [said(f"c-{name}", name, "correction", text="op", source="critic") for name in names])
    return root


@pytest.fixture(scope="module")
def whole(home: Path) -> bytes:
    """The weights of a run that nobody disturbed."""
    return weights(home, train(home, "whole", ""))


def train(home: Path, name: str, trouble: str, **settings: Any) -> JobResult:
    (home / "trouble").write_text(trouble)
    context = job_context(home, name, parent=1, python_path=[str(home)])
    silence_s = 8 if "silent" in trouble else 120  # a busy machine holds a process up for some seconds
    restarts = {"attempts": 3, "backoff_s": 0, "silence_s": silence_s}
    config = TrainConfig.model_validate({**SETTINGS, "restarts": restarts, **settings})
    return run_job(config, JobContext(**context))


def weights(home: Path, result: JobResult) -> bytes:
    assert result.candidate is not None
    return (PolicyStore(home / "policies").get(result.candidate).path / "model.safetensors").read_bytes()


@pytest.mark.long
def test_a_killed_run_on_logged_responses_goes_on_with_the_same_and_leaves_none_on_disk(home: Path) -> None:
    lake = Lake(str(home / "lake"), LakeConfig())
    full = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 8, "n": 1, "stop": []}
    sampled = {"response_token_ids": [10, 11, 1], "logprobs": [-2.0] * 3, "response": "ij", "sampling": full}
    names = [f"logged-{i:02}" for i in range(40)]
    prompts = [{"prompt": f"odds {i}>", "prompt_token_ids": [30 + i // 2, 21]} for i in range(40)]
    put(lake, "interactions", [interaction(n, **p, **sampled) for n, p in zip(names, prompts, strict=True)])
    put(lake, "rewards", [reward(name, float(i % 3)) for i, name in enumerate(names)])
    of_traffic = {**SFT_CONFIG["data"], "traffic_share": 1.0}
    settings = {"algorithm": {"name": "grpo"}, "data": of_traffic, "measure_kl": True, "steps": 8}
    found = {
        name: train(home, name, trouble, **settings) for name, trouble in (("steady", ""), ("felled", "2 9\n6 9\n"))
    }
    assert weights(home, found["steady"]) == weights(home, found["felled"])
    steps = {name: metrics_of(home, name) for name in found}
    assert [line["step"] for line in steps["felled"]] == list(range(8))
    for metric in ("reward", "loss", "grad_norm"):
        assert [line[metric] for line in steps["steady"]] == [line[metric] for line in steps["felled"]], metric
    assert all(line["grad_norm"] > 0 for line in steps["felled"])
    store = PolicyStore(home / "policies")
    learned = [store.learned_prompts(result.candidate or 0)[0] for result in found.values()]
    assert learned[0] == learned[1]
    assert len(learned[0]) >= 20
    assert all(path.is_dir() for path in (home / "runs").iterdir()), "of what was spooled nothing is left"


@pytest.mark.parametrize(
    ("name", "trouble", "kinds"),
    [
        ("killed", "1 9\n3 9\n", ["lost", "lost"]),
        pytest.param("stopped", "2 silent\n", ["hung"], marks=pytest.mark.long),
        pytest.param("crashed-and-raised", "1 11\n2 raise\n", ["crashed", "raised"], marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_by_itself_to_the_same_weights_and_says_so_on_record(
    home: Path, whole: bytes, capfd: pytest.CaptureFixture[str], name: str, trouble: str, kinds: list[str]
) -> None:
    before = PolicyStore(home / "policies").versions()
    result = train(home, name, trouble)
    assert weights(home, result) == whole
    assert PolicyStore(home / "policies").versions() == [*before, result.candidate]
    restarts = read_restarts(home / "runs" / name)
    assert [one.kind for one in restarts] == kinds
    assert [one.step for one in restarts] == [int(line.split()[0]) for line in trouble.splitlines()]
    assert [one.ranks for one in restarts] == [1] * len(kinds)
    assert result.restarts == len(kinds)
    steps = metrics_of(home, name)
    assert [line["step"] for line in steps] == list(range(5))
    assert steps[-1]["restarts"] == len(kinds)
    printed = capfd.readouterr().out
    assert printed.count(f"{name}: restart ") == len(kinds)
    assert f"goes on after step {restarts[0].step} in 0 s" in printed
    [folder] = [run for run in run_folders(home / "runs") if run.name == name]
    record = read_record(folder)
    assert record.restarts == restarts
    assert record.wrong is None
    text = shown(record, read_metrics(folder.folder))
    assert f"{kinds[0]}, went on after step {restarts[0].step}, ranks: 1" in text


@pytest.mark.long
def test_a_rank_that_hangs_is_killed_and_leaves_nothing(home: Path, whole: bytes) -> None:
    processes = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()}
    assert weights(home, train(home, "two", "1 silent\n", ranks=2, step_timeout_s=60)) is not None
    marked = [entry for entry in os.listdir("/proc") if entry.isdigit() and int(entry) not in processes]
    left = [line for line in map(command, marked) if "train.launch" in line and str(home) in line]
    assert left == [], "of this run: other tests run beside it"
    assert [one.kind for one in read_restarts(home / "runs" / "two")] == ["hung"]
    assert [one.ranks for one in read_restarts(home / "runs" / "two")] == [2]


def command(pid: str) -> str:
    try:
        return Path("/proc", pid, "cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("name", "trouble", "restarts", "words"),
    [
        pytest.param(
            "again",
            "2 raise\n2 raise\n",
            1,
            ["First cause after step 2: ", "the users' own", "after step 2 twice"],
            marks=pytest.mark.long,
        ),
        ("memory", "1 memory\n", 0, ["MemoryError", "lower train.micro_batch_tokens"]),
        pytest.param(
            "too-often",
            "".join(f"{i} 9\n" for i in (1, 1, 1, 1)),
            3,
            ["started again 3 times within 3600 s"],
            marks=pytest.mark.long,
        ),
        ("asked", "1 15\n", 0, ["torchrun ended with -15"]),
    ],
)
def test_a_run_that_would_fail_again_ends_with_its_first_cause(
    home: Path, name: str, trouble: str, restarts: int, words: list[str]
) -> None:
    before = PolicyStore(home / "policies").versions()
    with pytest.raises(JobError) as failed:
        train(home, name, trouble)
    assert [word for word in words if word not in str(failed.value)] == []
    assert len(read_restarts(home / "runs" / name)) == restarts
    assert PolicyStore(home / "policies").versions() == before


def test_settings_that_can_not_work_are_not_tried_again(home: Path) -> None:
    with pytest.raises(JobError, match="has no 'Nothing'"):
        train(home, "refused", "", hooks=["trouble:Nothing"])
    assert read_restarts(home / "runs" / "refused") == []


def test_ranks_are_put_on_record_once_they_are_known(tmp_path: Path) -> None:
    note_ranks(tmp_path, 2)
    assert read_restarts(tmp_path) == []
    restart = Restart(at=datetime.now(UTC), kind="lost", cause="a node", failed_after=3, step=2)
    add_restart(tmp_path, restart)
    note_ranks(tmp_path, 2)
    note_ranks(tmp_path, 1)
    add_restart(tmp_path, restart)
    assert [one.ranks for one in read_restarts(tmp_path)] == [2, None]
    assert json.loads((tmp_path / "restarts.json").read_text())[0]["cause"] == "a node"


def test_fewer_ranks_are_those_that_the_other_settings_divide() -> None:
    def ranks(**settings: Any) -> list[dict[str, int]]:
        config = TrainConfig.model_validate(settings)
        return [{name: one.ranks_of(name) for name in one.placement.pools} for one in fewer(config)]

    assert ranks(ranks=4) == [{"all": 3}, {"all": 2}, {"all": 1}]
    assert ranks(ranks=4, restarts={"min_ranks": 2}) == [{"all": 3}, {"all": 2}]
    assert ranks(ranks=4, restarts={"min_ranks": None}) == []
    assert ranks(ranks=4, fsdp={"sequence_parallel": 2}) == [{"all": 2}]
    assert ranks(ranks=4, rollout={"tensor_parallel_size": 2}) == [{"all": 2}]
    apart = {"pools": {"a": {"ranks": 4}, "b": {"ranks": 1}}, "actor": "a", "reference": "a", "rollout": "b"}
    assert ranks(placement=apart) == [{"a": 3, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 1}]
