"""From a thumb to the policy that learned from it, under load: ``make bench-loop``.

`millrace up` serves a tiny model and turns the loop by the recipe rlhf. Users ask without end, and give each answer a
thumb: up if its letters come later in a list of sixteen than those of their last answers. So each cycle's candidate can
gain a little, which the gate must find on held-out prompts. A candidate that it refuses counts for nothing: its
thumbs are timed to the promoted policy that came later. The benchmark speaks HTTP and the CLI, and ends with as many
promotions as wanted.

Each thumb's way, by the clock of this machine: given (acknowledged) → its response scored → last step of the first
promoted training that began after that → published → verdict → first answer by that policy that any user got.
``cycle_over_work`` is a promoted cycle's seconds over those that sampling, updating, publishing, evaluating and the
swap took by themselves, as cycles record them (scoring is not among them). ``ready_over_vllm`` is ``make
bench-start``'s ratio. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import httpx

from loadtests import bench_start
from loadtests.letters import LETTERS, mean_place
from loadtests.server import MILLRACE, Server, free_port, run
from loadtests.tiny_model import make_model_folder

LONGEST_S: Final = 1500.0
POLL_S, SOON_S = 20.0, 3.0
USERS, PACE_S, TOKENS = 4, 0.3, 24
ITEMS: Final = 8000
REMEMBERED: Final = 30
"""Answers that a user compares the next one with: people get used to what they have."""
BARS: Final = {"cycle_over_work": 2.0, "thumb_to_policy_s.p50": 60.0, "ready_over_vllm": 1.0, "failed": 0}
STAGES: Final = ("scored", "stepped", "published", "verdict", "answered")
OPTIONS: Final = {
    "schedule.interval_seconds": "1",
    "schedule.first_after_seconds": "10",
    "cycle.recipe": "rlhf",
    "cycle.min_new_rewards": "60",
    "train.dtype": "float32",
    "train.steps": "8",
    "train.algorithm.name": "grpo",
    "train.optimizer.learning_rate": "7e-5",
    "train.rollout.max_tokens": str(TOKENS),
    "train.data.prompts_per_step": "32",
    "train.reward_model.steps": "20",
    "train.reward_model.items_per_step": "96",
    "train.reward_model.learning_rate": "1e-3",
    "train.reward_model.min_items": "60",
    "train.reward_model.min_new_feedback": "60",
    "evaluation.holdout": "0",
    "evaluation.scorer": "loadtests.letters:reward",
    "evaluation.max_tokens": str(TOKENS),
    "evaluation.gate.max_items": "600",
    # Who says more of a few characters says fewer distinct pairs, repeats them, and ends later.
    **{f"evaluation.gate.guardrails.{name}": "null" for name in ("distinct_n", "repetition", "truncation", "length")},
    "evaluation.suite": "suite.jsonl",
    "feedback.journal.segment_seconds": "1",
    "feedback.lake.seal_seconds": "1",
}


@dataclass(frozen=True)
class Thumb:
    """Of which response, and when it was acknowledged, in seconds of Unix time."""

    response_id: str
    at: float


@dataclass
class Seen:
    """What users have seen. ``first``: the time of the first answer by each version."""

    thumbs: list[Thumb] = field(default_factory=list)
    first: dict[int, float] = field(default_factory=dict)
    places: dict[int, list[float]] = field(default_factory=dict)
    requests: int = 0
    failures: list[str] = field(default_factory=list)


class Users:
    """People who ask, wait for the answer and give a thumb, each in a thread of its own. A context manager."""

    def __init__(self, url: str, count: int) -> None:
        self.seen, self._stop, self._lock = Seen(), threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._go_on, args=(url, i), daemon=True) for i in range(count)]

    def _go_on(self, url: str, number: int) -> None:
        order, seen, known = random.Random(number), self.seen, deque[float](maxlen=REMEMBERED)
        with httpx.Client(base_url=url, timeout=60) as http:
            while not self._stop.wait(order.uniform(0.5, 1.5) * PACE_S):
                try:
                    answer = http.post("/generate", json={"prompt": prompt(order), "max_tokens": TOKENS})
                    answer.raise_for_status()
                    answered, body = time.time(), answer.json()
                    [response] = body["responses"]
                    place = mean_place(response["text"])
                    up = place > (statistics.mean(known) if known else 0.5)
                    known.append(place)
                    thumb = {"response_id": response["response_id"], "kind": "thumb", "value": int(up)}
                    http.post("/feedback", json=thumb).raise_for_status()
                except httpx.HTTPError as error:
                    seen.failures.append(f"{time.time():.0f}: {error!r}")
                else:
                    with self._lock:
                        seen.first.setdefault(body["policy_version"], answered)
                        seen.places.setdefault(body["policy_version"], []).append(place)
                    seen.thumbs.append(Thumb(response["response_id"], time.time()))
                seen.requests += 2

    def __enter__(self) -> Seen:
        for thread in self._threads:
            thread.start()
        return self.seen

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def prompt(order: random.Random) -> str:
    return "".join(order.choices(LETTERS, k=12))


# ------------------------------------------------------------------------------------------------------- the figures


@dataclass(frozen=True)
class Promotion:
    """A cycle that promoted, in seconds of Unix time: when its training began, and when the rest was done."""

    cycle: int
    version: int
    began: float
    stepped: float
    published: float
    verdict: float
    answered: float
    seconds: float
    work: dict[str, float]


def promotions(
    cycles: Sequence[dict[str, Any]],
    policies: Sequence[dict[str, Any]],
    swaps: dict[int, float],
    first: dict[int, float],
) -> list[Promotion]:
    """Of the cycles, those whose policy has answered; by `status --json`, `policies --json` and GET /policy.

    ``swaps``: seconds of preparing and exchanging, by version.
    """
    by_version, found = {policy["version"]: policy for policy in policies}, []
    for cycle in sorted(cycles, key=lambda one: one["number"]):
        version = cycle["candidate"]
        if cycle["status"] != "promoted" or version not in first:
            continue
        stages = {stage["name"]: stage for stage in cycle["stages"]}
        trained = [stage for stage in cycle["stages"] if stage["name"].startswith(("train", "reward-model"))]
        work = {f"{name}: {part}": value for name, stage in stages.items() for part, value in stage["work"].items()}
        found.append(
            Promotion(
                cycle=cycle["number"],
                version=version,
                began=_at(trained[0]["started_at"]),
                stepped=by_version[version]["metrics"]["last"]["time"],
                published=_at(by_version[version]["created_at"]),
                verdict=_at(stages["evaluate"]["started_at"], stages["evaluate"]["seconds"]),
                answered=first[version],
                seconds=_at(cycle["finished_at"]) - _at(cycle["started_at"]),
                work=work | {"swap": swaps.get(version, 0.0)},
            )
        )
    return found


def ways(thumbs: Sequence[Thumb], scored: dict[str, float], promoted: Sequence[Promotion]) -> list[dict[str, float]]:
    """Seconds from each thumb to each stage of the first promoted policy that learned from it, and ``began``.

    Without thumbs that none has learned from yet.
    """
    begins, found = [one.began for one in promoted], []
    for thumb in thumbs:
        at = scored.get(thumb.response_id)
        if at is None or (which := bisect_left(begins, at)) == len(promoted):
            continue
        policy = promoted[which]
        times = {name: getattr(policy, name) for name in ("began", *STAGES[1:])}
        found.append({name: time_at - thumb.at for name, time_at in ({"scored": at} | times).items()})
    return found


def summary(seen: Seen, scored: dict[str, float], promoted: Sequence[Promotion]) -> dict[str, Any]:
    """The figures of the loop."""
    timed = ways(seen.thumbs, scored, promoted)
    if not timed:
        raise SystemExit("no policy that learned from a thumb has answered: see up.log")
    ratios = [one.seconds / sum(one.work.values()) for one in promoted]
    steps = dict(zip(STAGES, ("scored", *STAGES[:-1]), strict=True))
    return {
        "thumb_to_policy_s": _quantiles([one["answered"] for one in timed]),
        "thumb_to_scored_s": _quantiles([one["scored"] for one in timed]),
        "scored_to_training_s": _quantiles([one["began"] - one["scored"] for one in timed]),
        "training_to_last_step_s": _quantiles([one["stepped"] - one["began"] for one in timed]),
        **{
            f"{before}_to_{after}_s": _quantiles([one[after] - one[before] for one in timed])
            for after, before in steps.items()
            if after not in ("scored", "stepped")
        },
        "cycle_over_work": round(statistics.median(ratios), 2),
        "cycle_over_work_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "cycle_s": _quantiles([one.seconds for one in promoted]),
        "work_s": _quantiles([sum(one.work.values()) for one in promoted]),
        "work_by_part_s": {
            part: round(statistics.median(one.work.get(part, 0.0) for one in promoted), 2)
            for part in dict.fromkeys(part for one in promoted for part in one.work)
        },
        "cycles": len(promoted),
        "thumbs": len(seen.thumbs),
        "timed_thumbs": len(timed),
        "requests": seen.requests,
        "failed": len(seen.failures),
        "mean_place": {version: round(statistics.mean(places), 3) for version, places in sorted(seen.places.items())},
    }


def bars(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each bar, what was measured, and whether it was met; None where it was not measured."""
    found = {}
    for name, bar in BARS.items():
        value: Any = figures
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        found[name] = {"bar": f"at most {bar:g}", "value": value, "met": None if value is None else value <= bar}
    return found


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": round(ordered[math.ceil(p / 100 * len(ordered)) - 1], 2) for p in (50, 95)}


def _at(text: str, seconds: float = 0.0) -> float:
    return (datetime.fromisoformat(text) + timedelta(seconds=seconds)).timestamp()


# ---------------------------------------------------------------------------------------------------------- the loop


class Loop:
    """The cycles of a home as `millrace status --json` shows them, which knows the last few alone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cycles = folder, dict[int, dict[str, Any]]()

    def look(self) -> None:
        """Raises SystemExit if a cycle failed."""
        for cycle in json.loads(run_anyway("status", "--json", folder=self.folder))["cycles"]:
            if cycle["status"] == "failed":
                raise SystemExit(f"cycle {cycle['number']} failed: {cycle['reason']}")
            if cycle["number"] not in self.cycles:
                self.cycles[cycle["number"]] = cycle
                if cycle["status"] != "skipped":
                    stages = ", ".join(f"{one['name']} {one['seconds'] or 0:.1f}" for one in cycle["stages"])
                    why = f": {cycle['reason']}" if cycle["reason"] else ""
                    print(f"cycle {cycle['number']} {cycle['status']} ({stages} s){why}", flush=True)

    @property
    def promoted(self) -> list[dict[str, Any]]:
        return [cycle for cycle in self.cycles.values() if cycle["status"] == "promoted"]


def run_anyway(*arguments: str, folder: Path) -> str:
    """What a command prints whose exit code says what it found: status ends with 1 while the server starts, say."""
    done = subprocess.run([MILLRACE, *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=folder)
    return done.stdout


def turn(folder: Path, cycles: int, users: int, options: dict[str, str]) -> dict[str, Any]:
    """Turn the loop in the folder until so many cycles have promoted, or LONGEST_S are over; the figures."""
    make_model_folder(folder / "model", 0, eos=False, letters=LETTERS)
    order = random.Random(-1)
    lines = (json.dumps({"id": str(i), "prompt": prompt(order)}) + "\n" for i in range(ITEMS))
    (folder / "home").mkdir()
    (folder / "home" / "suite.jsonl").write_text("".join(lines))
    port, loop, swaps = free_port(), Loop(folder), dict[int, float]()
    settings = OPTIONS | {"serve.port": str(port)} | options
    flags = list(itertools.chain(*((f"--{name}", value) for name, value in settings.items())))
    began = time.monotonic()
    with Server([MILLRACE, "up", "./model", *flags], port, folder / "up.log") as server:
        print(f"serves after {time.monotonic() - began:.1f} s", flush=True)
        with Users(server.url, users) as seen:
            looked = 0
            while len(loop.promoted) < cycles or max(one["candidate"] for one in loop.promoted) not in seen.first:
                if server.process.poll() is not None:
                    raise SystemExit(f"it ended: see {folder / 'up.log'}")
                if time.monotonic() - began > LONGEST_S:
                    print(f"stopped after {LONGEST_S:.0f} s", flush=True)
                    break
                until = time.monotonic() + POLL_S
                while time.monotonic() < until:
                    if len(seen.first) != looked:  # and the cycle ends
                        until = min(until, time.monotonic() + SOON_S)
                    time.sleep(0.5)
                looked = len(seen.first)
                loop.look()
                for swap in httpx.get(f"{server.url}/policy", timeout=30).json()["swaps"]:
                    swaps[swap["to"]] = (swap["prepare_ms"] + swap["hold_ms"]) / 1e3
        query = "SELECT response_id, epoch(min(scored_at)) AS at FROM rewards GROUP BY response_id"
        rows = map(json.loads, run("lake", "sql", "--format", "jsonl", query, folder=folder).splitlines())
        scored = {row["response_id"]: row["at"] for row in rows}
        policies = json.loads(run("policies", "--json", folder=folder))
    for failure in seen.failures[:5]:
        print(f"failed: {failure}", flush=True)
    promoted = promotions(list(loop.cycles.values()), policies, swaps, seen.first)
    ends = [cycle["status"] for cycle in loop.cycles.values() if cycle["status"] != "skipped"]
    return summary(seen, scored, promoted) | {"ends": {end: ends.count(end) for end in dict.fromkeys(ends)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=10, help="cycles that promote")
    parser.add_argument("--users", type=int, default=USERS, help="users that ask at once")
    parser.add_argument("--starts", type=int, default=2, help="starts of each server for ready_over_vllm; 0: none")
    parser.add_argument("--folder", type=Path, help="where to leave all of it; emptied first")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="more settings")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary) / "loop").absolute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        options = dict(each.split("=", 1) for each in arguments.option)
        figures = turn(folder, arguments.cycles, arguments.users, options)
        if arguments.starts:
            print(json.dumps(figures), flush=True)
            starts = bench_start.measure(Path(temporary), arguments.starts)
            figures |= {"ready_over_vllm": starts["ratio_seconds"], "ready_range": starts["ratio_seconds_range"]}
    figures["bars"] = bars(figures)
    print(json.dumps(figures))
    sys.exit(0 if figures["cycles"] >= arguments.cycles and not figures["failed"] else 1)


if __name__ == "__main__":
    main()
