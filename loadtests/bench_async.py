"""What sampling over several steps (train.rollout.staleness) saves: ``python -m loadtests.bench_async``.

The lengths of responses are spread as they are in reality (``loadtests.countdown``). Runs of each way, processes of
their own (``python -m deploy.examples.bench.training.asynchronous``, which takes the arguments that this one does not
know), take turns, in an order that changes from round to round. The last line is JSON: ``async_over_sync`` is of the
tokens trained on per second, with its interval; ``reward_difference`` of the mean rewards of the last steps, async less
sync, after the same number of samples. It fails if the speed is below ``--least``, or the rewards differ beyond noise.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil
from scipy.special import stdtrit

from loadtests.countdown import MOST, make_countdown
from loadtests.paired import CONFIDENCE, ratio

LAST: Final = 6
"""Steps at the end whose rewards are compared."""
GOOD: Final = 0.8
"""A reward, which begins at 0.5."""
BUSY: Final = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--ways", nargs="+", default=["sync", "async"], help="also: together")
    parser.add_argument("--median", type=int, default=24, help=f"length of responses; none has {MOST} times it")
    parser.add_argument("--sigma", type=float, default=0.95, help="of the logarithms of the lengths")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model, of 4 layers")
    parser.add_argument("--least", type=float, default=1.3, help="async_over_sync that it must show")
    parser.add_argument("--timeout-run", type=float, default=900.0, help="of each run, in seconds")
    arguments, rest = parser.parse_known_args()
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in arguments.ways}
    busy = []
    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden": arguments.hidden, "layers": 4, "heads": 4}
        policy = make_countdown(Path(folder) / "model", median=arguments.median, sigma=arguments.sigma, **shape)
        of_all = ["--policy", str(policy), "--tokens", str(MOST * arguments.median + 1), *rest]
        for number in range(arguments.rounds):
            for way in arguments.ways if number % 2 == 0 else reversed(arguments.ways):
                busy.append(busy_share())
                found = run([*of_all, "--way", way, "--seed", str(number)], arguments.timeout_run)
                print(way, json.dumps(found), flush=True)
                runs[way].append(found)
    figures = compared(runs) | {"busy": round(max(busy), 3), "trusted": max(busy) < BUSY}
    print(json.dumps(figures))
    if figures["async_over_sync"] < arguments.least or not figures["reward_within_noise"]:
        sys.exit(f"async_over_sync below {arguments.least:g}, or other rewards than without")


def run(arguments: list[str], timeout_s: float) -> dict[str, Any]:
    """What a run says of itself."""
    command = [sys.executable, "-P", "-m", "deploy.examples.bench.training.asynchronous", *arguments]
    done = subprocess.run(command, check=True, timeout=timeout_s, stdout=subprocess.PIPE, text=True)
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return found


def compared(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The figures, of runs by way, in rounds."""
    speeds = {way: [of["tokens"] / of["seconds"] for of in found] for way, found in runs.items()}
    speed = ratio(speeds["async"], speeds["sync"])
    ends = {way: [statistics.fmean(of["rewards"][-LAST:]) for of in found] for way, found in runs.items()}
    difference, noise = noisy_difference(ends["async"], ends["sync"])
    of_async, every = runs["async"], [of for found in runs.values() for of in found]
    return {
        **{f"{way}_tokens_per_s": round(statistics.fmean(found), 1) for way, found in speeds.items()},
        "async_over_sync": round(speed.value, 3),
        "interval": speed.interval(),
        **{f"{way}_reward": round(statistics.fmean(found), 4) for way, found in ends.items()},
        **{f"{way}_steps_to_{GOOD:g}": steps_to_good(found) for way, found in runs.items()},
        "reward_at_start": round(statistics.fmean(of["rewards"][0] for of in every), 4),
        "reward_difference": round(difference, 4),
        "reward_noise": round(noise, 4),
        "reward_within_noise": abs(difference) <= noise,
        "longest_over_median": round(max(of["longest"] for of in every) / every[0]["median_length"], 1),
        "staleness_mean": round(statistics.fmean(of["staleness_mean"] for of in of_async), 2),
        "partial_fraction": round(statistics.fmean(of["partial_fraction"] for of in of_async), 3),
    }


def steps_to_good(runs: list[dict[str, Any]]) -> float | None:
    """The mean number of steps until a step's mean reward was ``GOOD``; None if it was not in all of them."""
    found = [next((i for i, reward in enumerate(of["rewards"]) if reward >= GOOD), None) for of in runs]
    reached = [step + 1 for step in found if step is not None]
    return round(statistics.fmean(reached), 1) if len(reached) == len(runs) else None


def noisy_difference(a: list[float], b: list[float]) -> tuple[float, float]:
    """Of two means, and half the width of its 95 % interval (Student's t, one variance for both)."""
    difference = statistics.fmean(a) - statistics.fmean(b)
    if len(a) < 2:
        return difference, math.inf
    variance = (statistics.variance(a) + statistics.variance(b)) / 2
    quantile = float(stdtrit(2 * len(a) - 2, (1 + CONFIDENCE) / 2))
    return difference, quantile * math.sqrt(2 * variance / len(a))


def busy_share(seconds: float = 1.0) -> float:
    """How much of the machine's processors others use, 0 to 1, while this process sleeps."""
    time.sleep(2.0)
    return float(psutil.cpu_percent(seconds)) / 100


if __name__ == "__main__":
    main()
