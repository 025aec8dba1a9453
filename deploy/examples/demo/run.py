"""Turn the whole loop on this machine, with simulated users, and count every request.

Seed policy → server and scheduler → users → cycles, while the users go on → the users leave → one cycle with a
learning rate that ruins the candidate, which the gate must refuse → what the users were acknowledged, against what the
lake holds.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

import deploy
from deploy.config import root
from deploy.config.root import Settings
from deploy.examples.demo import summary
from deploy.examples.demo.task import items
from deploy.examples.stages import Stages
from deploy.loop import records, wait_for_serving
from deploy.loop.records import CycleRecord
from deploy.supervise import preloaded, resident
from deploy.supervise.children import Child, start

HELD_OUT, TRAFFIC = 1200, 300  # prompts; the seed policy's corpus is drawn from those after them
RUINOUS_LEARNING_RATE = 0.05  # 170 times the demo's own
LONGEST_STAGE_S = 1200.0
ALGORITHMS: dict[str, dict[str, Any]] = {
    # A reward model's scores differ in every group, if by nothing but its errors: GRPO's division by their deviation
    # makes as much of those as of a real difference.
    "rlhf": {"name": "dr_grpo", "kl": {"coefficient": 0.05}},
    "rlvr": {"name": "grpo", "aggregation": "token_mean", "clip_high": 0.28},
}
RULE = "deploy.examples.demo.task:reward"
"""What knows the answers: the simulated users do, and the held-out suite. Training does with the recipe rlvr alone."""


class DemoFailed(RuntimeError):
    """The demo could not be run, or did not show what it is there to show."""


def run(folder: Path, *, recipe: str, cycles: int, users: int, seed: int) -> None:
    """Run the demo in ``folder``, which it empties first, and leave summary.json and report.html there.

    Raises DemoFailed if a part of it failed, or the figures are not those that a working loop has.
    """
    with Stages("demo", total=cycles + 6) as stages:
        users_file = Path(deploy.__file__).resolve().parent.parent / "loadtests" / "locustfile.py"
        if not users_file.exists():
            raise DemoFailed(f"the demo's users are not at {users_file}; run it from a checkout, not from a wheel")
        file = prepare(folder, recipe, cycles, seed)
        settings = root.load(file)
        with stages("seed"):
            seed_policy(folder, seed, stages.say)
        with (
            preloaded.serving(settings.path(settings.up.logs) / "preloaded.log"),
            resident.serving(settings, at_once=True),  # the schedule has ended when the last cycle is run by hand
        ):
            turn_the_loop(folder, settings, stages, users_file, cycles, users, seed)
        with stages("report"):
            figures = summary.write(settings, folder, account(folder), {**stages.seconds, "total": stages.elapsed})
    show(figures, folder)
    if problems := summary.problems(figures):
        raise DemoFailed("\n".join(problems))


def turn_the_loop(
    folder: Path, settings: Settings, stages: Stages, users_file: Path, cycles: int, users: int, seed: int
) -> None:
    """From the seed policy to the candidate that is refused."""
    with stages("init"):
        call(settings, stages.say, "init", "--model", str(folder / "seed"), "--no-write-config")
    with start(settings, "up", ["up"], log="demo-up.log", grace=60.0, follow=stages.say) as up:
        with stages("serve"):
            wait_for("the server", lambda: wait_for_serving.server_policy(settings) is not None, [up])
        command = users_command(users_file, folder, settings, users, seed)
        log = settings.path(settings.up.logs) / "demo-users.log"
        with Child("users", command, log=log, grace=60.0, patience=None) as crowd:  # locust patches ssl
            for number in range(1, cycles + 1):
                with stages(f"cycle {number}"):
                    wait_for(f"cycle {number}", lambda n=number: len(finished(settings)) >= n, [up, crowd])  # type: ignore[misc]
        with stages("refusal"):
            ruin = ["--train.optimizer.learning_rate", str(RUINOUS_LEARNING_RATE), "--train.steps", "2"]
            # It is refused whatever the users have said since.
            ruin += ["--cycle.min_on_policy_feedback", "0", "--train.reward_model.min_new_feedback", "1000000"]
            call(settings, stages.say, "cycle", *ruin)


# ------------------------------------------------------------------------------------------------------ the parts


def prepare(folder: Path, recipe: str, cycles: int, seed: int) -> Path:
    """Empty the folder; write prompts, held-out suite and config. The config's path."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "millrace.yaml").exists():
        raise DemoFailed(f"{folder} holds something that is not a demo; name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "home").mkdir(parents=True)
    task = items(seed)
    held_out = [
        {"id": str(i), "prompt": x.prompt, "answer": x.answer} for i, x in enumerate(itertools.islice(task, HELD_OUT))
    ]
    traffic = [{"prompt": x.prompt, "answer": x.answer} for x in itertools.islice(task, TRAFFIC)]
    for name, rows in (("heldout.jsonl", held_out), ("prompts.jsonl", traffic)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "millrace.yaml"
    file.write_text(yaml.safe_dump(demo_config(folder.resolve(), recipe, cycles, seed), sort_keys=False))
    return file


def demo_config(folder: Path, recipe: str, cycles: int, seed: int) -> dict[str, Any]:
    """The settings that differ from the defaults: all of them because the model is tiny and the machine is small."""
    context = {"max_model_len": 64, "kv_cache_bytes": 64 * 2**20}
    return {
        "home": str(folder / "home"),
        "serve": {"port": free_port(), "engine": {**context, "dtype": "float32", "threads": 1, "log_level": "ERROR"}},
        "feedback": {
            "journal": {"segment_seconds": 1.0},
            "lake": {"seal_seconds": 2.0},
            "scoring": {"rules": {"task": {"function": RULE}} if recipe == "rlvr" else {}},
        },
        "evaluation": {
            "suite": str(folder / "heldout.jsonl"),
            "scorer": RULE,
            "max_tokens": 12,
            # What the demo shows, accuracy on the same items by policy, is that of greedy answers. Its users sample.
            "sampling": {"source": "greedy"},
            "best_of": 2,
            "engine": {**context, "dtype": "float32"},
            # The whole suite's accuracy is what the demo shows; nobody chooses among candidates by it.
            "score_unused": True,
            # If each cycle's candidate uses all that it may, the ruined one still finds fresh items. Half of the right
            # answers are longer than the habits that they replace, or shorter.
            "gate": {"max_items": max((HELD_OUT - 50) // cycles, 50), "guardrails": {"length": None}},
        },
        "train": {
            "seed": seed,
            "ranks": 2,
            "dtype": "float32",
            "steps": 8 if recipe == "rlhf" else 6,
            "minibatches": 2,
            "micro_batch_tokens": 1024,
            "algorithm": ALGORITHMS[recipe],
            "optimizer": {"learning_rate": 3e-4},
            "rollout": {**context, "max_tokens": 12},
            "data": {"prompts_per_step": 40, "min_prompts": 64, "traffic_share": 0.2},
            "reward_model": {
                **{"steps": 48, "items_per_step": 96, "learning_rate": 5e-4, "vote_noise": 0.1},
                **{"min_items": 400, "min_new_feedback": 800},
            },
        },
        "cycle": {
            "recipe": recipe,
            "min_new_rewards": 100,
            "min_on_policy_feedback": 600 if recipe == "rlhf" else 0,
        },
        "schedule": {"interval_seconds": 3.0, "first_after_seconds": 5.0, "max_cycles": cycles},
    }


def free_port() -> int:
    """A free port below those that the system gives out by itself: no process of Ray takes it meanwhile."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("none of 100 ports between 20000 and 32000 is free")


def seed_policy(folder: Path, seed: int, say: Callable[[str], None]) -> None:
    command = [sys.executable, "-P", "-m", "deploy.examples.demo.seed"]
    command += [str(folder / "seed"), "--skip", str(HELD_OUT + TRAFFIC), "--seed", str(seed)]
    # Two threads that spin while they wait for each other are slow on a machine that does something else too.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"}
    finish(Child("seed", command, log=folder / "seed.log", environment=environment, grace=5.0, follow=say))


def call(settings: Settings, say: Callable[[str], None], name: str, *arguments: str) -> None:
    """Run a ``millrace`` command to its end."""
    finish(start(settings, name, [name, *arguments], log=f"demo-{name}.log", grace=10.0, follow=say))


def finish(child: Child) -> None:
    if code := child.finish(LONGEST_STAGE_S):
        raise DemoFailed(child.ended(code))


def users_command(users_file: Path, folder: Path, settings: Settings, users: int, seed: int) -> list[str]:
    options = {
        "--host": settings.server_url,
        "--users": str(users),
        "--spawn-rate": str(users),
        "--stop-timeout": "60",
        "--prompts": str(folder / "prompts.jsonl"),
        "--account": str(folder / "account.jsonl"),
        "--pace": "0.08",
        "--feedback-share": "1.0",
        "--random-seed": str(seed),
    }
    flags = ["--headless", "--only-summary"]
    command = [sys.executable, "-P", "-m", "locust", "-f", str(users_file), "FeedbackUser"]
    return [*command, *flags, *itertools.chain(*options.items())]


def finished(settings: Settings) -> list[CycleRecord]:
    """Cycles that trained something and came to an end. Raises DemoFailed if one failed."""
    history = records.load_all(settings)
    for record in history:
        if record.status == "failed":
            raise DemoFailed(f"cycle {record.number} failed: {record.reason}")
    return [r for r in history if r.status in ("promoted", "refused", "undecided")]


def wait_for(what: str, happened: Callable[[], bool], needed: list[Child]) -> None:
    deadline = time.monotonic() + LONGEST_STAGE_S
    while not happened():
        for child in needed:
            if (code := child.poll()) is not None:
                raise DemoFailed(child.ended(code))
        if time.monotonic() > deadline:
            raise DemoFailed(f"{what} took longer than {LONGEST_STAGE_S:.0f} s")
        time.sleep(0.25)


def account(folder: Path) -> list[dict[str, Any]]:
    """What the users noted of their requests, one entry a request."""
    file = folder / "account.jsonl"
    if not file.exists():
        raise DemoFailed(f"the users left no account: there is no {file}")
    return [json.loads(line) for line in file.read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------- the tables


def show(figures: dict[str, Any], folder: Path) -> None:
    console = Console()
    policies = Table(title="Policies, on prompts that no training saw")
    for column in ("policy", "parent", "held-out accuracy", "95 % interval of the gain", "verdict"):
        policies.add_column(column)
    gates = {g["candidate"]: g for g in figures["gate"]}
    for p in figures["policies"]:
        g = gates.get(p["version"])
        policies.add_row(
            f"v{p['version']}",
            f"v{p['parent']}" if p["parent"] else "–",
            f"{p['heldout_accuracy']:.1%} of {p['n']}",
            f"{g['ci_low']:+.1%} to {g['ci_high']:+.1%}" if g and g["ci_low"] is not None else "–",
            {None: "the seed", "pass": "promoted", "refuse": "refused", "undecided": "undecided"}[
                g["verdict"] if g else None
            ],
        )
    console.print(policies)
    counts = Table(title="Counted from both sides")
    for column in ("", "acknowledged by the users", "in the lake"):
        counts.add_column(column)
    for kind in ("interactions", "feedback"):
        counts.add_row(kind, str(figures[f"{kind}_acknowledged"]), str(figures[f"{kind}_in_lake"]))
    console.print(counts)
    console.print(
        f"{figures['requests']} requests, {figures['failed_requests']} failed, {figures['swaps']} swaps under load, "
        f"{figures['seconds']['total']:.0f} s in all"
    )
    console.print(f"summary: {folder / 'summary.json'}\nreport:  {folder / 'report.html'}")
