"""What Millrace does on this machine's GPUs, by its other benches: ``make bench-gpu``.

Each part is one of them, run in a process of its own with the sizes of a GPU, and taken by its last line:

- ``serving``: Millrace's server against vLLM's own, by ``bench-serve``, with responses of one length, so that the
  ratios of requests/s are those of tokens/s.
- ``step``: seconds and tokens/s of a GRPO step of 25M parameters; over TRL's where TRL is in runs/trl, by
  ``bench-train``.
- ``weight_sync``: seconds and bytes from training to generation, over gathering whole tensors, by ``bench-reshard``.
- ``swap``: the longest gap that a swap makes in a stream, over vLLM's own way, by ``bench-swap``.
- ``plan``: the planner's errors, predicted over measured less one, by ``bench-plan``.

A part that fails is named under ``failed``, and the others go on; then the exit code is 1. The last line printed is one
JSON object. Without a GPU nothing is run: a line says so, and the exit code is 0. The project itself has measured
none of these figures on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loadtests import bench_train
from loadtests.tiny_model import make_model_folder

ROOT: Final = Path(__file__).resolve().parents[1]
TIMEOUT_S: Final = 1800


@dataclass(frozen=True)
class Part:
    """``module`` with ``arguments``; ``figures``: what is taken of its last line."""

    module: str
    arguments: tuple[str, ...]
    figures: Callable[[dict[str, Any]], dict[str, Any]]


def serving(found: dict[str, Any]) -> dict[str, Any]:
    """Ratios, and of each cell the tokens/s."""
    names = ("min_ratio_rps", "max_ratio_p50", "max_ratio_p99", "api_cpu_over_vllm", "engine_cpu_over_vllm")
    return {name: found[name] for name in names if name in found} | {"cells": found.get("cells")}


def step(found: dict[str, Any]) -> dict[str, Any]:
    """Of a step alone, or of turns with TRL."""
    return found


def weight_sync(found: dict[str, Any]) -> dict[str, Any]:
    """Of each case what moved, and how fast."""
    names = ("n", "tp", "training_tp", "weight_bytes", "received", "over_gather", "seconds", "seconds_over_gather")
    return {"cases": [{name: case[name] for name in names} for case in found["cases"]]}


def swap(found: dict[str, Any]) -> dict[str, Any]:
    """The gap in milliseconds, by size, and over vLLM's."""
    figures = {}
    for size, gap in found["gap_ms"].items():
        theirs = found["vllm_gap_ms"].get(size)
        figures[size] = {"gap_ms": gap, "vllm_gap_ms": theirs, "over_vllm": gap / theirs if theirs else None}
    return {"sizes": figures, **{name: found[name] for name in ("swaps", "failed", "truncated", "mislabelled")}}


def plan(found: dict[str, Any]) -> dict[str, Any]:
    """The greatest errors, and all of them."""
    names = ("title", "memory_predicted", "memory", "memory_error", "seconds_predicted", "seconds", "time_error")
    return {
        "memory_error_max": found["memory_error_max"],
        "time_error_max": found["time_error_max"],
        "cases": [{name: case[name] for name in names} for case in found["cases"]],
    }


def parts(devices: int) -> dict[str, Part]:
    """By name; with TRL where it is installed, as a machine without a network can't install it."""
    with_trl = Path("runs/trl/installed").exists()
    alone = Part("loadtests.bench_gpu", ("--step-alone",), step)
    return {
        "serving": Part("loadtests.bench_serve", ("--minutes", "4", "--only", "plain", "stream"), serving),
        "step": Part("loadtests.bench_train", ("--cases", "25M"), step) if with_trl else alone,
        "weight_sync": Part("loadtests.bench_reshard", ("--most-ranks", str(devices)), weight_sync),
        "swap": Part("loadtests.bench_swap", (), swap),
        "plan": Part("deploy.examples.bench.training.plan", (), plan),
    }


NAMES: Final = tuple(parts(1))


def main() -> int:
    """Run the parts, and print what they found."""
    parser = argparse.ArgumentParser(description="Millrace's benches on this machine's GPUs.")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="run these parts alone")
    parser.add_argument("--step-alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step_alone:
        print(json.dumps(step_alone()))
        return 0
    if not (devices := gpus()):
        print("bench-gpu: skipped, torch finds no GPU on this machine; nothing was measured")
        return 0
    figures: dict[str, Any] = {"devices": devices}
    failed: dict[str, str] = {}
    for name, part in parts(len(devices)).items():
        if name in arguments.only:
            figures[name], failure = run(part)
            if failure is not None:
                failed[name] = failure
            print(f"{name}: {failure or json.dumps(figures[name])}", flush=True)
    print(json.dumps({**figures, "failed": failed}))
    return 1 if failed else 0


def step_alone(turns: int = 5) -> dict[str, Any]:
    """Our steps of ``bench-train``, without its peer."""
    case = next(case for case in bench_train.CASES if case.name == "25M")
    runs = Path("runs").absolute()
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=runs) as folder:
        prompts = bench_train.make_prompts(case.completions // bench_train.GROUP)
        model = make_model_folder(Path(folder, "model"), 1, eos=False, printable=True, **case.model)
        job = bench_train.our_job(case, bench_train.make_home(Path(folder), model, prompts), "bfloat16", compiled=True)
        try:
            job.step()
            seconds = statistics.median(job.step() for _ in range(turns))
        finally:
            job.stop()
    tokens = case.completions * case.tokens
    return {"case": case.name, "seconds": seconds, "tokens_per_s": tokens / seconds, "over_trl": None}


def gpus() -> list[str]:
    """Names of the devices, by torch in a process of its own."""
    code = (
        "import json, torch as t; print(json.dumps([t.cuda.get_device_name(i) for i in range(t.cuda.device_count())]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(part: Part) -> tuple[dict[str, Any] | None, str | None]:
    """(figures, why there is something wrong with them). A bench that misses a bar of a CPU's still has figures."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", part.module, *part.arguments],
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"{part.module} did not end in {TIMEOUT_S} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    try:
        return part.figures(json.loads(lines[-1])), None
    except (IndexError, ValueError, KeyError) as error:
        return None, f"{part.module} ended with {done.returncode}, {error!r}: {done.stderr[-2000:]}"


if __name__ == "__main__":
    sys.exit(main())
