"""From a thumb to the policy that learned from it, under load: ``make bench-loop``.

`millrace up` serves a tiny model and turns the loop by the recipe rlhf. Users ask without end, and give each answer a
thumb: up if its letters come later in a list of sixteen than those of their last answers. So each cycle's candidate can
gain a little, which the gate must find on held-out prompts. A candidate that it refuses counts for nothing: its
thumbs are timed to the promoted policy that came later. The benchmark speaks HTTP and the CLI, and ends with as many
promotions as wanted.

Each thumb's way, by the clock of this machine: given → its reward → last step of the first promoted training that
learned from it → published → verdict → first answer by that policy that any user got. A policy learned from a thumb if
the versions of the lake that its record and its reward model's name have the thumb and its reward; which of their rows
a step drew is not on record. Thumbs that no promoted policy has learned from are not timed.

``cycle_over_work`` is a promoted cycle's seconds, from the end of the cycle before it to its own, over those of the
work alone, as cycles and the server record it: sampling, updates (of the policy and the reward model), the answers of
the evaluation, and copying (weights to the rollout engine, publishing up to the manifest, the swap's exchange).
``work_by_part_s`` are the parts that count, ``not_counted_s`` those that don't: medians over the cycles.
``ready_over_vllm`` is ``make bench-start``'s ratio. ``memory`` is what the processes that stay grow by per cycle (those
that ended, refused or promoted): for ``--ended 50``, say, as the first ten don't count; the lake grows meanwhile.

``intervals`` are at 95 %: Student's t on the ratios' logarithms, for thumbs a bootstrap over the policies that learned
from them. A bar is met or missed if all of the interval says so,
and undecided otherwise. The last line is one JSON object.
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
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import psutil

from loadtests import bench_start, memory
from loadtests.letters import LETTERS, mean_place
from loadtests.paired import CONFIDENCE, Ratio, mean
from loadtests.server import MILLRACE, Server, free_port, run
from loadtests.tiny_model import make_model_folder

LONGEST_S: Final = 300.0
LONGEST_CYCLE_S: Final = 120.0
POLL_S, SOON_S = 20.0, 3.0
LAUNCH_S: Final = 5.0
USERS, PACE_S, TOKENS = 4, 0.3, 24
ITEMS, ITEMS_PER_CYCLE = 8000, 600
"""Of the suite, at least and for each cycle: an item decides once."""
REMEMBERED: Final = 30
"""Answers that a user compares the next one with: people get used to what they have."""
BARS: Final = {"cycle_over_work": 2.0, "thumb_to_policy_s.p50": 60.0, "ready_over_vllm": 1.0, "failed": 0}
SHOWN: Final = {"thumb_to_policy_s.p95": 60.0}
"""Figures that are judged like those with a bar, and have none."""
STAGES: Final = ("scored", "stepped", "published", "verdict", "answered")
WORK: Final = {
    "train": ("generate", "update", "reshard", "publish"),
    "reward-model": ("update",),
    "evaluate": ("incumbent", "candidate"),
    "swap": ("exchange",),
}
"""Parts of stages that are a cycle's work: sampling, updating, evaluating and copying."""
DRAWS: Final = 2000
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
    "evaluation.gate.max_items": str(ITEMS_PER_CYCLE),
    # Who says more of a few characters says fewer distinct pairs, repeats them, and ends later.
    **{f"evaluation.gate.guardrails.{name}": "null" for name in ("distinct_n", "repetition", "truncation", "length")},
    "evaluation.suite": "suite.jsonl",
    "feedback.journal.segment_seconds": "1",
    "feedback.lake.seal_seconds": "1",
}


@dataclass(frozen=True)
class Thumb:
    """Of which response, and when it was given, in seconds of Unix time."""

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
                    given = time.time()
                    http.post("/feedback", json=thumb).raise_for_status()
                except httpx.HTTPError as error:
                    seen.failures.append(f"{time.time():.0f}: {error!r}")
                else:
                    with self._lock:
                        seen.first.setdefault(body["policy_version"], answered)
                        seen.places.setdefault(body["policy_version"], []).append(place)
                    seen.thumbs.append(Thumb(response["response_id"], given))
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
    """A cycle that promoted, in seconds of Unix time: when its training began, and when the rest was done.

    ``work`` and ``not_counted``: the seconds of each recorded part. ``thumbs``: the responses whose thumbs the policy
    has learned from, by its record.
    """

    version: int
    began: float
    stepped: float
    published: float
    verdict: float
    answered: float
    seconds: float
    work: dict[str, float]
    not_counted: dict[str, float]
    thumbs: Collection[str]


def promotions(
    cycles: Sequence[dict[str, Any]],
    policies: Mapping[int, dict[str, Any]],
    swaps: Mapping[int, dict[str, Any]],
    first: Mapping[int, float],
    thumbs: Mapping[int, Collection[str]],
) -> list[Promotion]:
    """Of the cycles, those whose policy has answered.

    Cycles are as of `status --json`; ``policies`` (`policies --json`), ``swaps`` (GET /policy), ``first`` (the time of
    the first answer) and ``thumbs`` (the responses with a thumb that it learned from) are by version.
    """
    found = []
    for cycle in sorted(cycles, key=lambda one: one["number"]):
        version = cycle["candidate"]
        if cycle["status"] != "promoted" or version not in first:
            continue
        stages = {stage["name"]: stage for stage in cycle["stages"]}
        trained = [stage for stage in cycle["stages"] if stage["name"].startswith(("train", "reward-model"))]
        stepped, published = policies[version]["metrics"]["last"]["time"], _at(policies[version]["created_at"])
        work, not_counted = parts(cycle, swaps.get(version), published - stepped)
        found.append(
            Promotion(
                version=version,
                began=_at(trained[0]["started_at"]),
                stepped=stepped,
                published=published,
                verdict=_at(stages["evaluate"]["started_at"], stages["evaluate"]["seconds"]),
                answered=first[version],
                seconds=_at(cycle["finished_at"]) - began_at(cycle, cycles),
                work=work,
                not_counted=not_counted,
                thumbs=thumbs[version],
            )
        )
    return found


def began_at(cycle: dict[str, Any], cycles: Sequence[dict[str, Any]]) -> float:
    """When the cycle before it ended: so its launch counts, the scheduler's interval, and what the one before still did
    behind its own end. That of a cycle which waited for something to do is its own start less LAUNCH_S."""
    started = _at(cycle["started_at"])
    ends = [_at(one["finished_at"]) for one in cycles if one["number"] < cycle["number"]]
    return max([started - LAUNCH_S, *ends])


def parts(
    cycle: dict[str, Any], swap: dict[str, Any] | None, publishing: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each part that is work (``WORK``), and of each that is not; what an earlier cycle did is neither.

    swap: as of GET /policy. publishing: seconds from the last step to the policy's manifest. Of "publish" no more
    counts: what comes behind that removes the run's files.
    """
    work, not_counted = dict[str, float](), dict[str, float]()
    for stage in cycle["stages"]:
        name = stage["name"]
        kind = next((kind for kind in WORK if name == kind or name.startswith(f"{kind}-")), name)
        if _at(stage["started_at"]) < _at(cycle["started_at"]):
            continue
        recorded = dict(stage["work"])
        if kind == "swap" and swap is not None:
            recorded = {"exchange": swap["hold_ms"] / 1e3, "prepare": swap["prepare_ms"] / 1e3}
        rest = (stage["seconds"] or 0.0) - sum(recorded.values())
        if kind == "train" and (more := recorded.get("publish", 0.0) - publishing) > 0:
            recorded |= {"publish": publishing, "publish, after its manifest": more}
        for part, seconds in recorded.items():
            (work if part in WORK.get(kind, ()) else not_counted)[f"{name}: {part}"] = seconds
        not_counted[f"{name}: starts and waits" if recorded else name] = rest
    return work, not_counted


def lake_versions(policy: dict[str, Any], reward_models: Mapping[str, dict[str, Any]]) -> dict[str, int]:
    """Delta versions of the feedback and the rewards that a policy learned from, by its lineage.

    The feedback is what its reward model learned from, if it had one. ``reward_models``: lineages by folder.
    """
    lineage = policy["lineage"]
    versions, reward = lineage["lake_versions"], lineage["reward"]
    model = reward["human"]["model"] if isinstance(reward, dict) else None
    feedback = versions if model is None else reward_models[model["name"]]["lake_versions"]
    return {"feedback": feedback["feedback"], "rewards": versions["rewards"]}


def ways(
    thumbs: Sequence[Thumb], scored: Mapping[str, Sequence[float]], promoted: Sequence[Promotion]
) -> dict[int, list[dict[str, float]]]:
    """Seconds from each thumb to each stage of the first promoted policy that learned from it, and ``began``.

    By version, without thumbs that none has learned from yet. ``scored``: when a response got a reward, each time.
    """
    found: dict[int, list[dict[str, float]]] = {}
    for thumb in thumbs:
        at = min((time_at for time_at in scored.get(thumb.response_id, ()) if time_at >= thumb.at), default=None)
        policy = next((one for one in promoted if thumb.response_id in one.thumbs), None)
        if at is not None and policy is not None:
            times = {"scored": at} | {name: getattr(policy, name) for name in ("began", *STAGES[1:])}
            found.setdefault(policy.version, []).append({name: of - thumb.at for name, of in times.items()})
    return found


def quantile(groups: Sequence[Sequence[float]], percent: int) -> Ratio:
    """A percentile of the values of all groups, and its interval: that of as many groups drawn with replacement."""

    def of(drawn: Sequence[Sequence[float]]) -> float:
        return float(np.quantile(np.concatenate(drawn), percent / 100, method="inverted_cdf"))

    if len(groups) == 1:
        return Ratio(of(groups), 0.0, math.inf)
    order = random.Random(0)
    drawn = [of(order.choices(groups, k=len(groups))) for _ in range(DRAWS)]
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Ratio(of(groups), float(low), float(high))


def summary(seen: Seen, scored: Mapping[str, Sequence[float]], promoted: Sequence[Promotion]) -> dict[str, Any]:
    """The figures of the loop."""
    by_policy = ways(seen.thumbs, scored, promoted)
    if not by_policy:
        raise SystemExit("no policy that learned from a thumb has answered: see up.log")
    timed = [way for of in by_policy.values() for way in of]
    ratios = [one.seconds / sum(one.work.values()) for one in promoted]
    cycles = mean([ratios])
    answered = [[way["answered"] for way in of] for of in by_policy.values()]
    thumbs = {f"p{percent}": quantile(answered, percent) for percent in (50, 95)}
    steps = dict(zip(STAGES, ("scored", *STAGES[:-1]), strict=True))
    return {
        "thumb_to_policy_s": {name: round(found.value, 2) for name, found in thumbs.items()},
        "thumb_to_scored_s": _quantiles([one["scored"] for one in timed]),
        "scored_to_training_s": _quantiles([one["began"] - one["scored"] for one in timed]),
        "training_to_last_step_s": _quantiles([one["stepped"] - one["began"] for one in timed]),
        **{
            f"{before}_to_{after}_s": _quantiles([one[after] - one[before] for one in timed])
            for after, before in steps.items()
            if after not in ("scored", "stepped")
        },
        "cycle_over_work": round(cycles.value, 2),
        "cycle_over_work_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "cycle_s": _quantiles([one.seconds for one in promoted]),
        "work_s": _quantiles([sum(one.work.values()) for one in promoted]),
        "work_by_part_s": _medians([one.work for one in promoted]),
        "not_counted_s": _medians(
            [
                one.not_counted | {"outside of stages": one.seconds - sum((one.work | one.not_counted).values())}
                for one in promoted
            ]
        ),
        "cycles": len(promoted),
        "thumbs": len(seen.thumbs),
        "timed_thumbs": len(timed),
        "requests": seen.requests,
        "failed": len(seen.failures),
        "mean_place": {version: round(statistics.mean(places), 3) for version, places in sorted(seen.places.items())},
        "intervals": {
            "cycle_over_work": cycles.interval(),
            **{f"thumb_to_policy_s.{name}": found.interval() for name, found in thumbs.items()},
        },
    }


def judged(figures: dict[str, Any], bars: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Each bar, what was measured, its interval, and what that says: None where it was not measured."""
    found = {}
    for name, bar in bars.items():
        value: Any = figures
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        interval = figures["intervals"].get(name, [value, value])
        low, high = (math.inf if end is None else end for end in interval)
        verdict = None if value is None else Ratio(value, low, high).judge("at most", bar)
        found[name] = {"bar": f"at most {bar:g}", "value": value, "interval": interval, "verdict": verdict}
    return found


def _medians(seconds: Sequence[dict[str, float]]) -> dict[str, float]:
    """By part; a cycle that doesn't have it has 0."""
    names = dict.fromkeys(name for one in seconds for name in one)
    return {name: round(statistics.median(one.get(name, 0.0) for one in seconds), 2) for name in names}


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

    def look(self) -> bool:
        """Whether one more has trained something and ended. Raises SystemExit if a cycle failed."""
        before = len(self.ended)
        for cycle in json.loads(run_anyway("status", "--json", folder=self.folder))["cycles"]:
            if cycle["status"] == "failed":
                raise SystemExit(f"cycle {cycle['number']} failed: {cycle['reason']}")
            if cycle["number"] not in self.cycles:
                self.cycles[cycle["number"]] = cycle
                if cycle["status"] != "skipped":
                    stages = ", ".join(f"{one['name']} {one['seconds'] or 0:.1f}" for one in cycle["stages"])
                    why = f": {cycle['reason']}" if cycle["reason"] else ""
                    print(f"cycle {cycle['number']} {cycle['status']} ({stages} s){why}", flush=True)
        return len(self.ended) > before

    @property
    def ended(self) -> list[str]:
        """How those that trained something ended."""
        return [cycle["status"] for cycle in self.cycles.values() if cycle["status"] != "skipped"]

    @property
    def promoted(self) -> list[dict[str, Any]]:
        return [cycle for cycle in self.cycles.values() if cycle["status"] == "promoted"]


def run_anyway(*arguments: str, folder: Path) -> str:
    """What a command prints whose exit code says what it found: status ends with 1 while the server starts, say."""
    done = subprocess.run([MILLRACE, *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=folder)
    return done.stdout


def turn(folder: Path, cycles: int, ended: int, users: int, options: dict[str, str]) -> dict[str, Any]:
    """Turn the loop in the folder until so many cycles have promoted, and so many have ended; the figures.

    It stops before, after LONGEST_S and LONGEST_CYCLE_S for each of them.
    """
    make_model_folder(folder / "model", 0, eos=False, letters=LETTERS)
    order = random.Random(-1)
    items = max(ITEMS, ITEMS_PER_CYCLE * max(cycles, ended))
    lines = (json.dumps({"id": str(i), "prompt": prompt(order)}) + "\n" for i in range(items))
    (folder / "home").mkdir()
    (folder / "home" / "suite.jsonl").write_text("".join(lines))
    port, loop, swaps = free_port(), Loop(folder), dict[int, dict[str, Any]]()
    samples, longest = list[memory.Sample](), LONGEST_S + LONGEST_CYCLE_S * max(cycles, ended)
    settings = OPTIONS | {"serve.port": str(port)} | options
    flags = list(itertools.chain(*((f"--{name}", value) for name, value in settings.items())))
    began = time.monotonic()
    with Server([MILLRACE, "up", "./model", *flags], port, folder / "up.log") as server:
        print(f"serves after {time.monotonic() - began:.1f} s", flush=True)
        with Users(server.url, users) as seen:
            looked = 0
            while (
                min(len(loop.promoted) - cycles, len(loop.ended) - ended) < 0
                or max(one["candidate"] for one in loop.promoted) not in seen.first
            ):
                if server.process.poll() is not None:
                    raise SystemExit(f"it ended: see {folder / 'up.log'}")
                if time.monotonic() - began > longest:
                    print(f"stopped after {longest:.0f} s", flush=True)
                    break
                until = time.monotonic() + POLL_S
                while time.monotonic() < until:
                    if len(seen.first) != looked:  # and the cycle ends
                        until = min(until, time.monotonic() + SOON_S)
                    time.sleep(0.5)
                looked = len(seen.first)
                if loop.look():
                    samples.append(memory.sample(psutil.Process(server.process.pid)))
                swaps |= {swap["to"]: swap for swap in httpx.get(f"{server.url}/policy", timeout=30).json()["swaps"]}
        scored: dict[str, list[float]] = {}
        for row in sql("SELECT response_id, epoch(scored_at) AS at FROM rewards WHERE reward IS NOT NULL", folder):
            scored.setdefault(row["response_id"], []).append(row["at"])
        policies = {one["version"]: one for one in json.loads(run("policies", "--json", folder=folder))}
        reward_models = {
            str((folder / one["path"]).resolve()): one["lineage"]
            for one in json.loads(run("reward-models", "--json", folder=folder))
        }
        thumbs = {
            one["candidate"]: thumbs_at(lake_versions(policies[one["candidate"]], reward_models), folder)
            for one in loop.promoted
        }
    for failure in seen.failures[:5]:
        print(f"failed: {failure}", flush=True)
    promoted = promotions(list(loop.cycles.values()), policies, swaps, seen.first, thumbs)
    ends = {end: loop.ended.count(end) for end in dict.fromkeys(loop.ended)}
    return summary(seen, scored, promoted) | {"ends": ends, "memory": memory.growth(samples)}


def thumbs_at(versions: Mapping[str, int], folder: Path) -> set[str]:
    """The responses that have a thumb, and a reward, at these versions of the lake's tables."""
    query = "SELECT DISTINCT response_id FROM rewards SEMI JOIN feedback USING (response_id) WHERE reward IS NOT NULL"
    return {row["response_id"] for row in sql(query, folder, versions)}


def sql(query: str, folder: Path, versions: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
    """Rows of the lake as it is, or as it was at these versions of its tables."""
    pinned = [word for table, version in (versions or {}).items() for word in ("--version", f"{table}={version}")]
    rows = run("lake", "sql", "--format", "jsonl", *pinned, query, folder=folder)
    return [json.loads(line) for line in rows.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=10, help="cycles that promote")
    parser.add_argument("--ended", type=int, default=0, help="cycles that promote or refuse, if those are more")
    parser.add_argument("--users", type=int, default=USERS, help="users that ask at once")
    parser.add_argument("--starts", type=int, default=6, help="starts of each server for ready_over_vllm; 0: none")
    parser.add_argument("--folder", type=Path, help="where to leave all of it; emptied first")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="more settings")
    arguments = parser.parse_args()
    if arguments.cycles < 1:
        parser.error("--cycles: at least 1, which the figures are of")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary) / "loop").absolute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        options = dict(each.split("=", 1) for each in arguments.option)
        figures = turn(folder, arguments.cycles, arguments.ended, arguments.users, options)
        if arguments.starts:
            print(json.dumps(figures), flush=True)
            starts = bench_start.measure(Path(temporary), arguments.starts)
            figures["ready_over_vllm"] = starts["ratio_seconds"]
            figures["intervals"]["ready_over_vllm"] = starts["ratio_seconds_interval"]
    figures |= {"bars": judged(figures, BARS), "shown": judged(figures, SHOWN)}
    print(json.dumps(figures))
    enough = figures["cycles"] >= arguments.cycles and sum(figures["ends"].values()) >= arguments.ended
    sys.exit(0 if enough and not figures["failed"] else 1)


if __name__ == "__main__":
    main()
