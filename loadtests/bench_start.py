"""How long a server takes from its start to its first answer, against vLLM's own: ``make bench-start``.

Both serve the same model with the same flags, one after the other, taking turns; one that has started is asked for a
token, and stopped, before the other starts. ``cpu_seconds`` is what all of a server's processes have used by then. The
first turn of each fills the machine's file cache and is not counted. The last line printed is one JSON object;
``ratio_seconds`` is ours over theirs, the median of the pairs, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from loadtests.bench_serve import Millrace, Vllm
from loadtests.server import run
from loadtests.tiny_model import make_model_folder


def start(target: type[Millrace] | type[Vllm], home: Path, model: Path) -> dict[str, float]:
    """Start, ask for a token, stop; seconds from the start, and seconds of processors."""
    began = time.monotonic()
    with target(home, model) as server:
        body = {"prompt": "a", "max_tokens": 1} | ({"model": "model"} if target is Vllm else {})
        path = "/v1/completions" if target is Vllm else "/generate"
        httpx.post(f"{server.url}{path}", json=body, timeout=60).raise_for_status()
        seconds = time.monotonic() - began
        root = psutil.Process(server.process.pid)
        times = [process.cpu_times() for process in [root, *root.children(recursive=True)]]
        return {"seconds": seconds, "cpu_seconds": sum(each.user + each.system for each in times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="turns of each server")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), arguments.turns)))


def measure(home: Path, turns: int) -> dict[str, Any]:
    """Start both in an empty folder so many times, and once before that counts for nothing; the figures."""
    model = make_model_folder(home / "model", 0, eos=False)
    run("init", "--model", str(model), "--home", str(home), folder=home)
    found: dict[str, list[dict[str, float]]] = {"millrace": [], "vllm": []}
    for turn in range(turns + 1):
        for target in (Millrace, Vllm) if turn % 2 else (Vllm, Millrace):
            seen = start(target, home, model)
            print(json.dumps({"turn": turn, "server": target.name, **seen}), flush=True)
            if turn:
                found[target.name].append(seen)
    return summary(found)


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of each server and of the pairs' ratios."""
    result: dict[str, Any] = {}
    for key in ("seconds", "cpu_seconds"):
        ratios = [ours[key] / theirs[key] for ours, theirs in zip(found["millrace"], found["vllm"], strict=True)]
        result |= {f"{name}_{key}": round(statistics.median(each[key] for each in found[name]), 2) for name in found}
        result |= {
            f"ratio_{key}": round(statistics.median(ratios), 3),
            f"ratio_{key}_range": [round(min(ratios), 3), round(max(ratios), 3)],
        }
    return result | {"bars": {"ratio_seconds": {"bar": "at most 1", "met": result["ratio_seconds"] <= 1}}}


if __name__ == "__main__":
    main()
