"""How long a server takes from its start to its first answer, against vLLM's own: ``make bench-start``.

Both serve the same model with the same flags and environment (``vllm_peer``), one after the other, in pairs of turns
whose order alternates; one that has started is asked for a token, and stopped, before the other starts.
``cpu_seconds`` is what all of a server's processes have used by then. The first pair fills the machine's file cache and
is not counted. The six pairs of the default take about seven minutes on two cores.

The last line printed is one JSON object. ``ratio_seconds`` is ours over theirs, the geometric mean of the pairs, with
its 95 % interval (``paired``) and the least and greatest pair; its bar is met or missed if the whole interval is on one
side of it, else undecided.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from loadtests import paired
from loadtests.bench_serve import Millrace, Vllm
from loadtests.server import run
from loadtests.tiny_model import make_model_folder

BAR: Final = 1.0


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
    parser.add_argument("--turns", type=int, default=6, help="pairs of turns")
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
    """Medians of each server, the pairs' ratios, and the bar."""
    result: dict[str, Any] = {}
    ratios = {}
    for key in ("seconds", "cpu_seconds"):
        ours, theirs = ([turn[key] for turn in found[name]] for name in ("millrace", "vllm"))
        ratios[key] = paired.ratio(ours, theirs)
        pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
        result |= {
            f"millrace_{key}": round(statistics.median(ours), 2),
            f"vllm_{key}": round(statistics.median(theirs), 2),
            f"ratio_{key}": round(ratios[key].value, 3),
            f"ratio_{key}_interval": ratios[key].interval(),
            f"ratio_{key}_range": [round(min(pairs), 3), round(max(pairs), 3)],
        }
    bar = {"bar": f"at most {BAR:g}", "verdict": ratios["seconds"].judge("at most", BAR)}
    return result | {"pairs": len(found["vllm"]), "bars": {"ratio_seconds": bar}}


if __name__ == "__main__":
    main()
