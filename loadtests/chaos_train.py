"""Kill or stop processes of trainings again and again, each of whatever kind, and compare what comes out.

    python -m loadtests.chaos_train --kills 50

A home has one policy, prompts of its own and a reward. Runs of `millrace train` have the launchers of LAUNCHERS in
turn. At random moments a process of it gets SIGKILL or SIGSTOP: a rank (which has the engine), a rank that rewards, the
driver, one of Ray's (the raylet is the node), torchrun's, or the command itself, which is then given once more. A run
nobody disturbed says, by launcher, which weights must come out. The last line printed is one JSON object; the exit code
is 1 if anything in ``BAD`` is not 0.

A black box: it speaks the command line, looks at processes, and reads a run's records and policies as they lie there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from loadtests.server import MILLRACE, run
from loadtests.tiny_model import make_model_folder

BAD = ("failed_runs", "published_twice", "published_nothing", "wrong_weights", "unrecorded_restarts", "left_running")
"""What must be 0."""

SETTINGS: dict[str, Any] = {
    "train": {
        "dtype": "float32",
        "steps": 8,
        "micro_batch_tokens": 256,
        "reward": "chaos_reward:reward",
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
        "rollout": {"max_tokens": 8, "max_model_len": 64, "kv_cache_bytes": 16 << 20},
        "data": {"prompts": [{"path": "prompts.jsonl"}], "traffic_weight": 0, "prompts_per_step": 4, "min_prompts": 4},
        "algorithm": {"name": "grpo", "group_size": 4},
        "checkpoint": {"every_steps": 1},
        "resident": {"enabled": False},
        "start_timeout_s": 200,
        "step_timeout_s": 60,
        "restarts": {"attempts": 30, "backoff_s": 0.1, "silence_s": 8},
    }
}
LAUNCHERS: dict[str, dict[str, Any]] = {
    "ray": {"placement": {"pools": {"all": {}, "rewards": {}}, "reward": "rewards"}},
    "torchrun": {"launcher": "torchrun", "ranks": 2},
    "torchrun, one rank": {"launcher": "torchrun"},
}
REWARD = """
def reward(rows):
    return [-abs(sum(ids) % 7 - 3.0) for ids in rows["response_token_ids"].to_pylist()]
"""
SIGNS = {
    "reaper": "local_ray/reaper.py",
    "torchrun": "train.controller.torchrun_guard",
    "driver": "--own-ray",
    "rank": "ray::Host",
    "raylet": "raylet/raylet",
    "gcs": "gcs_server",
    "agent": "/agent",
    "torchrun rank": "--launcher torchrun",
    "command": "deploy.cli train",
}
"""Kinds of processes by a part of their command lines; the first that is found counts."""
STOPPED_SHARE = 0.25
"""Of the disturbances, those that stop a process (SIGSTOP) rather than kill it."""
NOTICED_KINDS = ("driver", "rank", "torchrun", "torchrun rank")
"""Whose kill must end in a restart that is on record, if the run had no result by then."""
MOST_PER_RUN = 3
RUN_TIMEOUT_S = 900
END_TIMEOUT_S = 30


@dataclass
class Seen:
    """What was done and what came of it."""

    disturbed: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    restarts: int = 0
    recovery_s: list[float] = field(default_factory=list)

    def report(self, what: str, text: str) -> None:
        self.bad[what] += 1
        self.problems.append(f"{what}: {text}")
        print(f"  {what}: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="processes to kill or stop")
    parser.add_argument("--seed", type=int, help="of what is killed when; by default another one each time")
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS), metavar="NAME")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="millrace-chaos-") as folder:
        found = chaos(Path(folder), arguments.kills, random.Random(seed), arguments.launchers)
    print(json.dumps({"seed": seed} | found))
    sys.exit(any(found[name] for name in BAD))


def chaos(home: Path, kills: int, chance: random.Random, launchers: list[str]) -> dict[str, Any]:
    """Disturb runs until so many processes were killed or stopped; the counts."""
    started = time.monotonic()
    make_home(home)
    expected: dict[str, str] = {}
    for name in launchers:
        run_name = f"whole-{launchers.index(name)}"
        begun = time.monotonic()
        code = Training(home, run_name, name).wait()
        if code:
            raise SystemExit(f"an undisturbed run ended with {code}: {(home / f'{run_name}.log').read_text()[-3000:]}")
        expected[name] = weights(home, published(home, run_name)[0])
        print(f"{name}: {time.monotonic() - begun:.0f} s undisturbed", flush=True)
    seen, runs = Seen(), 0
    while sum(seen.disturbed.values()) < kills:
        name = launchers[runs % len(launchers)]
        runs += 1
        left = min(MOST_PER_RUN, kills - sum(seen.disturbed.values()))
        one_run(home, f"run-{runs}", name, expected[name], chance.randint(1, left), chance, seen)
    return {
        "kills": sum(seen.disturbed.values()),
        "by_kind": dict(sorted(seen.disturbed.items())),
        "runs": runs,
        "restarts": seen.restarts,
        **{name: seen.bad[name] for name in BAD},
        "problems": seen.problems,
        "median_recovery_s": round(statistics.median(seen.recovery_s), 1) if seen.recovery_s else None,
        "longest_recovery_s": round(max(seen.recovery_s), 1) if seen.recovery_s else None,
        "seconds": round(time.monotonic() - started),
    }


class Training:
    """`millrace train` of one run, given once more when it was killed itself."""

    def __init__(self, home: Path, name: str, launcher: str) -> None:
        self.home, self.name, self.starts = home, name, 0
        self.folder, self.log = home / "runs" / name, home / f"{name}.log"
        settings = home / f"{name}.json"
        settings.write_text(json.dumps({"train": {**SETTINGS["train"], **LAUNCHERS[launcher]}}))
        self.command = [MILLRACE, "train", "--run", name, "--home", str(home), "--config", str(settings)]
        self.family: dict[int, psutil.Process] = {}
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.home, start_new_session=True)
        self.starts += 1

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Those that run, by kind."""
        found: dict[str, list[psutil.Process]] = {}
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            for process in (top, *top.children(recursive=True)):
                with suppress(psutil.Error):
                    if process.status() == psutil.STATUS_ZOMBIE:
                        continue
                    self.family[process.pid] = process
                    words = " ".join([process.name(), *process.cmdline()])
                    kind = "command" if process == top else next((k for k, s in SIGNS.items() if s in words), "other")
                    found.setdefault(kind, []).append(process)
        return found

    @property
    def steps(self) -> int:
        """Lines of its metrics."""
        with suppress(FileNotFoundError):
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    @property
    def restarts(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            return list(json.loads((self.folder / "restarts.json").read_text()))
        return []

    @property
    def has_result(self) -> bool:
        return (self.folder / "result.json").exists()

    def wait(self) -> int:
        """The exit code of the command, which is not waited for for ever."""
        try:
            return self.process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return -signal.SIGKILL

    def left(self) -> list[str]:
        """What still runs of it after a while."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline and (alive := [p for p in self.family.values() if lives(p)]):
            time.sleep(0.2)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        return [f"{process.pid}" for process in alive]


def one_run(home: Path, name: str, launcher: str, expected: str, kills: int, chance: random.Random, seen: Seen) -> None:
    """One run that is disturbed so many times, unless it ends before."""
    training, must, before = Training(home, name, launcher), 0, set(versions(home))
    for _ in range(kills):
        wait_for_moment(training, chance)
        if training.process.poll() is not None:
            break
        here = training.processes()
        kinds = sorted(here.keys() - {"other"})
        if not kinds:
            continue
        kind = chance.choice(kinds)
        number = signal.SIGSTOP if kind != "command" and chance.random() < STOPPED_SHARE else signal.SIGKILL
        had, known, at = training.has_result, len(training.restarts), time.monotonic()
        with suppress(psutil.NoSuchProcess):
            chance.choice(here[kind]).send_signal(number)
        seen.disturbed[f"{kind} {number.name}"] += 1
        print(f"{name} ({launcher}): {number.name} to {kind} after {training.steps} steps", flush=True)
        if kind == "command":
            training.process.wait(END_TIMEOUT_S)
            if gone := training.left():
                seen.report("left_running", f"{name}: {gone} after its command was killed")
            training.start()
            continue
        if kind in NOTICED_KINDS and not had:
            while len(training.restarts) == known and training.process.poll() is None:
                if time.monotonic() - at > RUN_TIMEOUT_S:
                    break
                training.processes()
                time.sleep(0.05)
            if len(training.restarts) == known and training.process.poll() != 0:
                seen.report("unrecorded_restarts", f"{name}: after {number.name} to {kind}")
            must += len(training.restarts) > known
            seen.recovery_s.append(time.monotonic() - at)
    while training.process.poll() is None and training.processes():
        time.sleep(0.2)
    finish(training, must, before, expected, seen)


def finish(training: Training, must: int, before: set[int], expected: str, seen: Seen) -> None:
    """See what came of a run."""
    code, name = training.wait(), training.name
    log = training.log.read_text()
    if code:
        seen.report("failed_runs", f"{name} ended with {code}: {log[-1500:]}")
    new = sorted(set(versions(training.home)) - before)
    if len(new) > 1:
        seen.report("published_twice", f"{name}: policies {new}")
    if not new:
        seen.report("published_nothing", name)
    elif weights(training.home, new[0]) != expected:
        seen.report("wrong_weights", f"{name}: policy {new[0]}")
    said = log.count(f"{name}: restart ")
    if said != len(training.restarts) or said < must:
        seen.report("unrecorded_restarts", f"{name}: {said} in its log, {len(training.restarts)} on record, {must} due")
    seen.restarts += len(training.restarts)
    if gone := training.left():
        seen.report("left_running", f"{name}: {gone}")


def wait_for_moment(training: Training, chance: random.Random) -> None:
    """Until a random moment of a run: sometimes of its start, mostly after some step."""
    if chance.random() < 0.3:
        deadline = time.monotonic() + chance.uniform(0, 12)
        while time.monotonic() < deadline and training.process.poll() is None:
            time.sleep(0.05)
        return
    at = training.steps + chance.randint(1, 3)
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while training.steps < at and not training.has_result and training.process.poll() is None:
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 0.6))


def make_home(home: Path) -> None:
    """One policy that serves, prompts and a reward."""
    model = make_model_folder(home / "model", 1)
    run("init", "--model", str(model), "--home", str(home), "--no-write-config")
    shutil.rmtree(model)
    (home / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {c}{c}:"}) + "\n" for c in "abcdefghijkl"))
    (home / "chaos_reward.py").write_text(REWARD)


def versions(home: Path) -> list[int]:
    """The policies that are published."""
    return sorted(int(path.parent.name[1:]) for path in (home / "policies").glob("v[0-9]*/policy.json"))


def published(home: Path, name: str) -> list[int]:
    """The policies of a run, by their manifests' lineage."""
    start = json.loads((home / "runs" / name / "start.json").read_text())["id"]
    manifests = {v: json.loads((home / "policies" / f"v{v:06d}" / "policy.json").read_text()) for v in versions(home)}
    return [version for version, manifest in manifests.items() if start in json.dumps(manifest)]


def weights(home: Path, version: int) -> str:
    """The sha256 of a policy's weights."""
    files = sorted((home / "policies" / f"v{version:06d}").glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main()
