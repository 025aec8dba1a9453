"""A home that training jobs can run in: a tiny policy, a lake with prompts, a user's reward and hook; and the jobs."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from deploy.examples.demo.seed import make_untrained
from deploy.examples.demo.task import items
from feedback.config import LakeConfig
from feedback.journal.codec import to_batch
from feedback.lake.tables import Lake
from feedback.schema import TABLES
from serve.policies.store import PolicyStore
from tests.paths import ROOT

SFT_CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "launcher": "torchrun",
    "steps": 4,
    "micro_batch_tokens": 64,
    "algorithm": {"name": "sft"},
    "measure_kl": False,
    "data": {"prompts_per_step": 4, "min_prompts": 4, "held_out_share": 0},
    "checkpoint": {"every_steps": 2, "asynchronous": False},
    "start_timeout_s": 100,
    "step_timeout_s": 60,
}
"""Of four steps on what people have written, with a checkpoint after the second, without Ray."""

USERS_CODE = """
import random
from hashlib import sha256
from train.observe.hooks import Hook

def reward(batch):
    # It draws random numbers, as a careless one does.
    return [random.random() - len(ids) - 0.01 * sum(ids) for ids in batch["response_token_ids"].to_pylist()]

class Diary(Hook):
    def note(self, *words):
        with (self.run.folder / "diary").open("a") as file:
            print(*words, file=file)

    def on_start(self):
        self.note("start", self.run.first_step)

    def on_step(self, step, metrics):
        self.note("step", step)

    def on_evaluation(self, step, answers):
        return {"mean_tokens": sum(len(answer.response.token_ids) for answer in answers) / len(answers)}

    def on_checkpoint(self, steps, folder):
        self.note("checkpoint", steps)
        for weights in folder.parent.parent.glob("best/step-*/candidate/model.safetensors"):
            self.note("best", int(weights.parts[-3].removeprefix("step-")), sha256(weights.read_bytes()).hexdigest())

    def on_end(self, result, error):
        self.note("end", result and result.candidate, error)
"""


def make_home(root: Path, prepare: Callable[[Path], None] = lambda seed: None) -> None:
    """A policy store whose policy serves, a lake with prompts, and a user's module.

    ``prepare`` changes the folder of the policy before it is published.
    """
    tokenizer = make_untrained(root / "seed")
    prepare(root / "seed")
    store = PolicyStore(root / "policies")
    policy = store.publish(root / "seed", parent=None, lineage={}, metrics={})
    store.promote(policy.version, who="test", why="test", expected=None)
    lake = Lake(str(root / "lake"), LakeConfig())
    lake.create()
    rows = [row(str(i), x.prompt, tokenizer(x.prompt).input_ids) for i, x in enumerate(itertools.islice(items(1), 12))]
    lake.append("interactions", table(rows))
    (root / "users_code.py").write_text(USERS_CODE)


def row(number: str, prompt: str, token_ids: list[int]) -> dict[str, Any]:
    return {
        "response_id": number,
        "request_id": f"r{number}",
        "tenant": "default",
        "endpoint": "generate",
        "replica": "replica-0",
        "created_at": datetime(2026, 3, 1, 12, tzinfo=UTC),
        "completed_at": datetime(2026, 3, 1, 12, tzinfo=UTC),
        "prompt": prompt,
        "prompt_token_ids": token_ids,
        "response": "x",
        "response_token_ids": [4],
        "logprobs": [-0.25],
        "policy_spans": [{"start": 0, "policy_version": 1}],
        "sampling": {"temperature": 1.0, "max_tokens": 8, "n": 1, "stop": []},
        "finish_reason": "stop",
        "status": "complete",
        "timings": {"queue_ms": 0.5, "first_token_ms": 3.0, "total_ms": 9.0},
        "metadata": {},
    }


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_batches([to_batch(rows, TABLES["interactions"])])


def job_context(home: Path, run: str, **others: Any) -> dict[str, Any]:
    """The context of a job that samples nothing."""
    folders = {
        "runs": str(home / "runs"),
        "policies": str(home / "policies"),
        "reward_models": str(home / "reward_models"),
        "lake_uri": str(home / "lake"),
    }
    return {"run": run, "reward": {}, **folders, **others}


def run_jobs(home: Path, jobs: list[dict[str, Any]]) -> str:
    """What jobs, {config, context} each, printed when they ran one after the other in one process."""
    (home / "jobs.json").write_text(json.dumps(jobs))
    tests = ROOT / "tests" / "train"
    process = subprocess.Popen(
        [sys.executable, str(tests / "single_rank_driver.py"), str(home / "jobs.json")],
        env={**os.environ, "PYTHONPATH": f"{home}:{ROOT}:{tests}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed = process.communicate(timeout=800)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, printed
    return printed


def results_of(printed: str) -> list[dict[str, Any]]:
    """The results that ``run_jobs`` printed."""
    return [json.loads(line.removeprefix("RESULT ")) for line in printed.splitlines() if line.startswith("RESULT ")]


def metrics_of(home: Path, run: str) -> list[dict[str, float]]:
    """The metrics of a run's steps."""
    return [json.loads(line) for line in (home / "runs" / run / "metrics.jsonl").read_text().splitlines()]
