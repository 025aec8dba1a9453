"""What the trials share: a policy that knows the demo's task, its copies and spoiled ones, a server, and the users."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import deploy
from deploy import initialise
from deploy.config import root
from deploy.config.root import Settings
from deploy.examples.demo.run import free_port, users_command
from deploy.examples.demo.task import items
from deploy.loop.wait_for_serving import server_policy
from deploy.supervise.children import Child, start
from serve.policies import probe
from serve.policies.store import Policy

PROMPTS: Final = 300
"""What the users ask; the policy learns from the prompts after them."""
USERS: Final = 8
QUESTIONS_OF_A_USER: Final = 3
"""In a fleet, which draws for users: each comes, asks so many questions, and goes."""
_SEED_ARGUMENTS: Final = ("--clean", "--steps", "200", "--batch", "96")
_READY_S: Final = 600.0
_SEED_S: Final = 900.0

Say = Callable[[str], None]


class LiveFailed(RuntimeError):
    """The trials could not be held; the text says why."""


def prepare(folder: Path, *, replicas: int, block_s: float, seed: int, say: Say) -> Settings:
    """A new home below ``folder`` with one policy, which has learned the task and serves.

    What is in the folder is removed, but for a policy that an earlier run has trained.
    """
    marks = {"home", "seed", "prompts.jsonl", "account.jsonl"}
    if folder.exists() and not {entry.name for entry in folder.iterdir()} <= marks | {"seed.log", "users.log"}:
        raise LiveFailed(
            f"{folder} holds something that is not of deploy.examples.live; name another folder (--folder)"
        )
    shutil.rmtree(folder / "home", ignore_errors=True)
    (folder / "account.jsonl").unlink(missing_ok=True)
    (folder / "home").mkdir(parents=True)
    prompts = [{"prompt": one.prompt, "answer": one.answer} for one in itertools.islice(items(seed), PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    if not (made := folder / "seed" / "made").exists():
        command = [sys.executable, "-P", "-m", "deploy.examples.demo.seed", str(folder / "seed")]
        command += [*_SEED_ARGUMENTS, "--skip", str(PROMPTS), "--seed", str(seed)]
        environment = {"OMP_WAIT_POLICY": "PASSIVE"}
        child = Child("seed", command, log=folder / "seed.log", environment=environment, grace=5.0, follow=say)
        if code := child.finish(_SEED_S):
            raise LiveFailed(f"the policy could not be trained: {child.ended(code)}")
        made.touch()
    settings = root.load(None, [(name, str(value)) for name, value in options(folder, replicas, block_s)], {})
    initialise.initialise(settings, str(folder / "seed"), revision=None, who="deploy.examples.live")
    return settings


def options(folder: Path, replicas: int, block_s: float) -> Iterator[tuple[str, object]]:
    """Settings that differ from the defaults: as the model is tiny and nobody wants to wait for weeks.

    Nothing but feedback stands between a candidate and its commit: no guardrail. Cycles could run, as the scheduler
    wants to know, and do not.
    """
    yield from {
        "home": (folder / "home").resolve(),
        "serve.port": free_port(),
        "serve.swap.poll_seconds": 0.1,
        "serve.fleet.replicas": replicas,
        "serve.fleet.num_cpus": 0.5,
        "serve.engine.max_model_len": 64,
        "serve.engine.kv_cache_bytes": 64 * 2**20,
        "serve.engine.dtype": "float32",
        "serve.engine.threads": 1,
        "feedback.journal.segment_seconds": 1.0,
        "feedback.lake.seal_seconds": 2.0,
        "cycle.recipe": "auto",
        "train.rollout.max_tokens": 12,
        "evaluation.max_tokens": 12,
        "evaluation.holdout": 0.3,
        "evaluation.scorer": "reward_model",
        "evaluation.experiment.block_seconds": block_s,
        "evaluation.experiment.feedback_window_seconds": 1.0 if replicas == 1 else 3.0,
        "evaluation.experiment.phases": '[{"share": 0.5}]',
        "evaluation.experiment.watch_seconds": 10,
        "evaluation.experiment.watch_share": 0.5,
        "evaluation.experiment.look_seconds": 3,
        "evaluation.experiment.outcomes.errors": "null",
        "schedule.interval_seconds": 86400,
        "schedule.first_after_seconds": 86400,
    }.items()


def copy_of(settings: Settings, number: int) -> Policy:
    """The first policy once more, as another version: the same weights, and a note by which it is another policy."""
    store = settings.policy_store()
    first = store.get(1)

    def write(folder: Path) -> None:
        _copy_model(first, folder)
        (folder / "README.md").write_text(f"copy {number}\n")

    return store.publish(write, parent=1, lineage={"copy": number}, metrics={}, probe=lambda _: first.probe or {})


def spoiled(settings: Settings, strength: float, seed: int) -> Policy:
    """The first policy with each weight moved towards noise of its tensor's size: (1 - strength) w + strength noise."""
    store = settings.policy_store()
    first = store.get(1)

    def write(folder: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        _copy_model(first, folder)
        chance = torch.Generator().manual_seed(seed)
        for file in first.weight_files:
            weights = {
                name: (1 - strength) * weight + strength * weight.std() * torch.randn(weight.shape, generator=chance)
                for name, weight in sorted(load_file(file).items())
            }
            save_file(weights, folder / file.name, metadata={"format": "pt"})

    lineage = {"blended with noise": strength}
    return store.publish(write, parent=1, lineage=lineage, metrics={}, probe=probe.measure)


def _copy_model(policy: Policy, folder: Path) -> None:
    for name in policy.files:
        shutil.copy(policy.path / name, folder / name)


@contextmanager
def served(settings: Settings) -> Iterator[Child]:
    """The server, or the fleet, for as long as the block lasts; ready at its begin."""
    with start(settings, "serve", ["serve"], log="live-serve.log", grace=60.0, follow=quiet) as child:
        wait_for("the server", lambda: _ready(settings), [child], within_s=_READY_S)
        yield child


def quiet(line: str) -> None:
    """Its log has it."""


def _ready(settings: Settings) -> bool:
    answer = server_policy(settings)
    if answer is None:
        return False
    replicas = [one["state"] for one in (answer.get("replicas") or {}).values()]
    return replicas.count("ready") == settings.serve.fleet.replicas if replicas else settings.serve.fleet.is_one


@contextmanager
def asked(settings: Settings, folder: Path, seed: int) -> Iterator[Child]:
    """The demo's users, who ask and judge for as long as the block lasts, and keep their account."""
    file = Path(deploy.__file__).resolve().parent.parent / "loadtests" / "locustfile.py"
    if not file.exists():
        raise LiveFailed(f"the users are not at {file}; run it from a checkout, not from a wheel")
    questions = 0 if settings.serve.fleet.is_one else QUESTIONS_OF_A_USER
    command = [*users_command(file, folder, settings, USERS, seed), "--questions", str(questions)]
    with Child("users", command, log=folder / "users.log", grace=90.0) as child:
        account = folder / "account.jsonl"
        wait_for("the first answer", lambda: account.exists() and account.stat().st_size > 0, [child])
        yield child


def wait_for(
    what: str, happened: Callable[[], bool], needed: list[Child], *, within_s: float = 180.0, every_s: float = 0.2
) -> None:
    """Raises LiveFailed if it takes longer, or one of the children has ended meanwhile."""
    deadline = time.monotonic() + within_s
    while not happened():
        for child in needed:
            if (code := child.poll()) is not None:
                raise LiveFailed(child.ended(code))
        if time.monotonic() > deadline:
            raise LiveFailed(f"{what} took longer than {within_s:.0f} s")
        time.sleep(every_s)


def account(folder: Path) -> list[dict[str, Any]]:
    """What the users noted of their requests, one entry a request."""
    return [json.loads(line) for line in (folder / "account.jsonl").read_text().splitlines()]
