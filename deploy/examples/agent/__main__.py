"""Prove that episodes are learned, of two turns with a tool, or of code: ``python -m deploy.examples.agent``.

A seed policy that is right in fewer than 30 % of its episodes is trained by GRPO, through the product's own job. Its
accuracy is that of sampled episodes in a step, and of greedy ones on prompts that no training saw. The last line is
JSON: {task, before, after, held_out_before, held_out_after, turns, steps, seconds}, with ``reason`` where it is no
proof. The exit code is 1 if there is such a reason.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

import click

from deploy.examples.agent.seed import TASKS
from deploy.supervise.children import Child, no_leftovers
from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from feedback.processes.signals import Stopped, stop_on_signals
from serve.policies.store import PolicyStore
from train.config.training import TrainConfig
from train.context import JobContext, JobResult, write_job

BEFORE, AFTER = 0.3, 0.8
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
_LONGEST_S: Final = 1500.0


@click.command(help=__doc__)
@click.option("--task", type=click.Choice(list(TASKS)), default="tool", show_default=True, help="What is learned.")
@click.option("--steps", type=click.IntRange(min=1), help="Steps of training; unset: as many as the task takes.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of training; the seed policy is always one.")
@click.option("--credit", type=click.Choice(["episode", "turn"]), default="episode", show_default=True)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/agent"),
    show_default=True,
    help="Below it, by the task's name, lies all of it; what was there before goes, but for the seed policy.",
)
def main(task: str, steps: int | None, seed: int, credit: str, folder: Path) -> None:
    started, folder = time.monotonic(), folder.resolve() / task
    try:
        with no_leftovers(), stop_on_signals():
            made = make_seed(folder, task)
            result = train(folder, made, settings(folder, task, steps=steps, seed=seed, credit=credit))
    except Stopped as stopped:
        click.echo(f"stopped by {stopped}", err=True)
        sys.exit(stopped.code)
    found = figures(folder, result) | {"seconds": round(time.monotonic() - started, 1)}
    print(json.dumps({"task": task, **found}), flush=True)
    sys.exit("reason" in found)


def make_seed(folder: Path, task: str) -> Path:
    """The seed policy's folder; one that is there is used."""
    seed = folder / "seed"
    if not (seed / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "deploy.examples.agent.seed", str(seed), "--task", task]
        call("seed", command, folder / "seed.log")
    return seed


def settings(folder: Path, task: str, *, steps: int | None, seed: int, credit: str) -> dict[str, Any]:
    """The section ``train``. One rank in one process, so that Ray's start is saved."""
    of = TASKS[task]
    prompts, steps = of.prompts(), steps or of.STEPS
    suite, file = folder / "heldout.jsonl", folder / "prompts.jsonl"
    held_out = [{"id": p["prompt"], "prompt": p.pop("prompt"), "metadata": p} for p in prompts[: of.HELD_OUT]]
    suite.write_text("".join(json.dumps(item) + "\n" for item in held_out))
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts[of.HELD_OUT :]))
    metadata = {key: key for key in prompts[-1] if key != "prompt"}
    return {
        "launcher": "torchrun",
        "dtype": "float32",
        "seed": seed,
        "steps": steps,
        "minibatches": 2,
        "micro_batch_tokens": 8192,
        "checkpoint": {"every_steps": None},
        "algorithm": {"name": "grpo", "group_size": 8, "credit": credit},
        "optimizer": {"learning_rate": 5e-4},
        "evaluate_suite": str(suite),
        "evaluate_every": steps,
        "data": {
            "min_prompts": 1,
            "traffic_weight": 0,
            "prompts": [{"path": str(file), "metadata": metadata}],
            "prompts_per_step": of.PROMPTS_PER_STEP,
        },
        "rollout": {"max_tokens": of.LONGEST_TURN, "max_model_len": 64, "kv_cache_bytes": 2**26},
        "environment": of.ENVIRONMENT,
    }


def train(folder: Path, seed: Path, section: dict[str, Any]) -> JobResult:
    """Run the job to its end."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    store, lake = PolicyStore(work / "policies"), Lake(str(work / "lake"), LakeConfig())
    policy = store.publish(seed, parent=None, lineage={}, metrics={})
    store.promote(policy.version, expected=None, who="deploy.examples.agent", why="the seed")
    lake.create()
    job = JobContext(
        run="agent",
        runs=work / "runs",
        policies=store.root,
        reward_models=work / "reward_models",
        lake_uri=str(work / "lake"),
    )
    job.folder.mkdir(parents=True)
    spec = write_job(TrainConfig.model_validate(section), job)
    call("agent", [sys.executable, "-P", "-m", "train.launch", str(spec), "--launcher", "torchrun"], job.folder / "log")
    return JobResult.model_validate_json((job.folder / "result.json").read_text())


def call(name: str, command: list[str], log: Path) -> None:
    """Run a command to its end, its lines shown. Raises click.ClickException if it fails."""
    child = Child(name, command, log=log, environment=_ONE_THREAD, grace=5.0, follow=print)
    if code := child.finish(_LONGEST_S):
        raise click.ClickException(child.ended(code))


def figures(folder: Path, result: JobResult) -> dict[str, Any]:
    """What a run came to; ``reason`` if it is no proof."""
    lines = (folder / "work" / "runs" / "agent" / "metrics.jsonl").read_text().splitlines()
    first, *_, last = [json.loads(line) for line in lines]
    found = {
        "before": first["reward"],
        "after": last["reward"],
        "held_out_before": first["held_out_at_start/reward"],
        "held_out_after": last["held_out/reward"],
        "turns": last["turns"],
        "steps": result.steps,
    }
    worse = [name for name in ("before", "held_out_before") if found[name] >= BEFORE]
    worse += [name for name in ("after", "held_out_after") if found[name] <= AFTER]
    why = {"reason": result.reason or f"{', '.join(worse)} not as it is to be"} if result.reason or worse else {}
    return {name: round(value, 4) for name, value in found.items()} | why


if __name__ == "__main__":
    main()
