"""Whole GRPO steps, generation included, against TRL's GRPOTrainer: ``make bench-train``.

Both train the same random model on the same prompts with the same numbers of prompts, responses and tokens; neither
has a KL term. Each is a process of its own that stays, and they take turns, a step each, so that a machine whose speed
drifts treats them alike. TRL takes its fastest of float32 and bfloat16, found by trial steps; ours too, and
bfloat16 with generation compiled.
A turn is timed from outside. The last line printed is one JSON object; ``stages`` says where our time goes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loadtests.server import MILLRACE, Server, free_port, run
from loadtests.tiny_model import make_model_folder

HERE: Final = Path(__file__).parent
START_TIMEOUT_S: Final = 300
STEP_TIMEOUT_S: Final = 300
PROMPT_CHARACTERS: Final = 32
GROUP: Final = 8
STEPS: Final = 1_000
"""More than ever run: the jobs are stopped."""
HOOK: Final = """
from train.observe.hooks import Hook
from turns import Turns


class OneStepATurn(Hook):
    def on_start(self):
        self.turns = Turns()

    def on_step(self, step, metrics):
        self.turns.step_ended()
"""
BARS: Final = {"25M": 2.5, "3M": 1.3}


@dataclass(frozen=True)
class Case:
    """One model, and what a step samples."""

    name: str
    model: dict[str, int]
    completions: int
    tokens: int


CASES: Final = (
    Case("25M", {"hidden": 512, "layers": 8, "heads": 8, "intermediate": 1536}, 64, 128),
    Case("3M", {"hidden": 256, "layers": 4, "heads": 4, "intermediate": 1024}, 128, 8),
)


class Job:
    """A training process that makes a step when it gets a turn."""

    def __init__(self, name: str, command: list[str], folder: Path, **environment: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        path = folder / f"{name}.socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(1)
            with self.log.open("wb") as output:
                self._process = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env=os.environ | {"BENCH_TURNS": str(path)} | environment,
                    start_new_session=True,
                )
            deadline = time.monotonic() + START_TIMEOUT_S
            while True:
                with contextlib.suppress(TimeoutError):
                    self._turns, _ = listener.accept()
                    break
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._give_up("did not start")
        self._turns.settimeout(STEP_TIMEOUT_S)
        self._wait()

    def step(self) -> float:
        """Run a step; its seconds."""
        began = time.perf_counter()
        self._turns.sendall(b"go\n")
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        try:
            if self._turns.recv(16) != b"done\n":
                self._give_up("ended in the midst of a step")
        except TimeoutError:
            self._give_up(f"took no step in {STEP_TIMEOUT_S} s")

    def _give_up(self, what: str) -> None:
        self.stop()
        raise SystemExit(f"{self.name} {what}:\n{self.log.read_text(errors='replace')[-3000:]}")

    def stop(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self._turns.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def bench(case: Case, folder: Path, trl: Path, steps: int) -> dict[str, Any]:
    """One case: the fastest type of each side, then turns."""
    model = make_model_folder(folder / "model", 1, eos=False, printable=True, **case.model)
    prompts = make_prompts(case.completions // GROUP)
    (folder / "prompts.json").write_text(json.dumps(prompts))
    home = make_home(folder, model, prompts)
    with contextlib.ExitStack() as stack:

        def fastest(jobs: list[Job]) -> Job:
            for job in jobs:
                stack.callback(job.stop)
            times = {job: min(job.step() for _ in range(2)) for job in jobs}
            best = min(jobs, key=lambda job: times[job])
            for job in jobs:
                if job is not best:
                    job.stop()
            return best

        theirs = fastest([trl_job(case, folder, model, trl, dtype) for dtype in ("float32", "bfloat16")])
        kinds = (("float32", False), ("bfloat16", False), ("bfloat16", True))
        ours = fastest([our_job(case, home, dtype, compiled=compiled) for dtype, compiled in kinds])
        turns: dict[Job, list[float]] = {ours: [], theirs: []}
        for turn in range(steps):
            for job in (ours, theirs) if turn % 2 == 0 else (theirs, ours):
                turns[job].append(job.step())
    tokens = case.completions * case.tokens
    pairs = list(zip(turns[ours], turns[theirs], strict=True))
    return {
        "case": case.name,
        "completions": case.completions,
        "tokens": case.tokens,
        "ours": ours.name,
        "trl": theirs.name,
        "seconds": statistics.median(turns[ours]),
        "trl_seconds": statistics.median(turns[theirs]),
        "tokens_per_s": tokens / statistics.median(turns[ours]),
        "trl_tokens_per_s": tokens / statistics.median(turns[theirs]),
        "over_trl": statistics.median(b / a for a, b in pairs),
        "turns": [round(b / a, 2) for a, b in pairs],
        "stages": stages(home, ours.name, steps),
    }


def stages(home: Path, run: str, steps: int) -> dict[str, float]:
    """Median seconds of each stage of our last steps."""
    rows = [json.loads(line) for line in (home / "runs" / run / "metrics.jsonl").read_text().splitlines()][-steps:]
    names = [name for name in rows[-1] if name.startswith("seconds_")]
    return {name.removeprefix("seconds_"): statistics.median(row[name] for row in rows) for name in names}


def trl_job(case: Case, folder: Path, model: Path, python: Path, dtype: str) -> Job:
    settings = {
        "bf16": dtype == "bfloat16",
        "completions": case.completions,
        "group": GROUP,
        "tokens": case.tokens,
        "steps": STEPS,
        "threads": os.cpu_count(),
    }
    script = str(HERE / "trl_grpo.py")
    command = [str(python), script, str(model), str(folder / "prompts.json"), json.dumps(settings)]
    return Job(f"trl-{dtype}", command, folder, TOKENIZERS_PARALLELISM="false")


def our_job(case: Case, home: Path, dtype: str, *, compiled: bool) -> Job:
    run = f"millrace-{dtype}{'-compiled' if compiled else ''}"
    settings = {
        "dtype": dtype,
        "steps": STEPS,
        "threads_per_rank": os.cpu_count(),
        "micro_batch_tokens": case.completions * (case.tokens + PROMPT_CHARACTERS) // 4,
        "measure_kl": "false",
        "reward": "turns:reward",
        "hooks": json.dumps(["turns_hook:OneStepATurn"]),
        "algorithm.group_size": GROUP,
        "rollout.max_tokens": case.tokens,
        "rollout.enforce_eager": str(not compiled).lower(),
        "data.prompts_per_step": case.completions // GROUP,
        "data.min_prompts": case.completions // GROUP,
    }
    flags = [text for name, value in settings.items() for text in (f"--train.{name}", str(value))]
    every = {"evaluation.holdout": "0", "evaluation.scorer": "turns:reward"}  # is learned from, as TRL does
    flags += [text for name, value in every.items() for text in (f"--{name}", value)]
    return Job(run, [MILLRACE, "train", "--run", run, "--home", str(home), *flags], home)


def make_prompts(count: int) -> list[str]:
    chance = random.Random(1)
    return ["".join(chance.choices(string.ascii_letters, k=PROMPT_CHARACTERS)) for _ in range(count)]


def make_home(folder: Path, model: Path, prompts: list[str]) -> Path:
    """A home whose lake has the prompts, as a server has logged them."""
    home = folder / "home"
    home.mkdir()
    shutil.copy(HERE / "turns.py", home / "turns.py")
    (home / "turns_hook.py").write_text(HOOK)
    port = free_port()
    settings = ["--home", str(home), "--serve.port", str(port), "--serve.engine.kv_cache_bytes", str(64 << 20)]
    run("init", "--model", str(model), *settings, folder=home)
    with Server([MILLRACE, "serve", *settings], port, home / "serve.log") as server:
        for prompt in prompts:
            body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
            head = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{server.url}/generate", body, head)
            urllib.request.urlopen(request, timeout=60).close()
    return home


@contextlib.contextmanager
def trl_environment(python: Path | None) -> Iterator[Path]:
    """A Python that has TRL: the one named, or one in a new environment in runs/, which stays for the next time."""
    if python is not None:
        yield python
        return
    folder = Path("runs/trl").absolute()
    python = folder / "bin/python"
    if not (folder / "installed").exists():
        print(f"installing TRL into {folder}: a minute or two", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "-r", str(HERE / "requirements-trl.txt")], check=True, timeout=1800)
        (folder / "installed").touch()
    yield python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="only these")
    parser.add_argument("--steps", type=int, default=5, help="steps of each side in each case")
    parser.add_argument(
        "--trl-python", type=Path, help="a Python that has TRL; else an environment is created in runs/trl"
    )
    options = parser.parse_args()
    runs = Path("runs").absolute()
    runs.mkdir(exist_ok=True)
    results = []
    with trl_environment(options.trl_python) as python:
        for case in CASES:
            if case.name in (options.cases or BARS):
                with tempfile.TemporaryDirectory(prefix="bench-", dir=runs) as folder:
                    result = bench(case, Path(folder), python, options.steps)
                results.append({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()})
                print(json.dumps(results[-1]), flush=True)
    ratios = {result["case"]: result["over_trl"] for result in results}
    bars = {name: {"bar": f"at least {BARS[name]}", "met": ratio >= BARS[name]} for name, ratio in ratios.items()}
    stage = {result["case"]: result["stages"] for result in results}
    print(json.dumps({"tokens_per_s_over_trl": ratios, "stages": stage, "bars": bars, "cases": results}))


if __name__ == "__main__":
    main()
