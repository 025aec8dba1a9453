"""The training job: sample, score, learn, reshard; then publish the candidate.

``run`` is the driver: the dataflow, step by step. ``run_job`` starts it where the config says: in this process over a
local Ray, or as a job on a cluster. ``python -m train.job SPEC.json`` is what a cluster runs.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, Field

from feedback.config import LakeConfig, RuleConfig
from feedback.datasets import Prompt, prompts, rollouts
from feedback.lake import Lake
from feedback.rewards.rules import load_reward
from serve import probe
from serve.policies import Policy, PolicyStore
from train import algorithms
from train.advantages import uninformative
from train.batch import PackedBatch, Rollout
from train.config import TrainConfig
from train.controller import ResourcePool, WorkerGroup
from train.data import TrafficGroups, cycled
from train.kl import k1, k3
from train.progress import Clock, progress_bar, say, say_step
from train.trackers import Tracker


class TrainingStopped(RuntimeError):
    """Training ended early for its health; nothing was published."""


class JobContext(BaseModel):
    """Where a job finds and leaves things. Paths are absolute, and on a cluster shared by its machines."""

    run: str = Field(description="Name of the run: its folder under runs.")
    runs: Path
    policies: Path
    lake_uri: str
    lake: LakeConfig = Field(default_factory=LakeConfig)
    reward: str | dict[str, RuleConfig] = Field(
        description="What rewards rollouts: module:function, or rules by name, of which it is the weighted mean."
    )
    parent: int | None = Field(None, description="Policy to start from; the serving one if unset.")
    python_path: list[str] = Field(default_factory=list, description="Folders that the reward's module is found in.")
    lineage: dict[str, Any] = Field(default_factory=dict, description="More to keep in the policy's manifest.")

    @property
    def folder(self) -> Path:
        return self.runs / self.run


class JobResult(BaseModel):
    """What came of a job; ``candidate`` is None when nothing was published, and ``reason`` says why."""

    run: str
    candidate: int | None
    parent: int
    steps: int
    reason: str | None
    metrics: dict[str, float]
    seconds: float


def run(config: TrainConfig, context: JobContext) -> JobResult:
    """Train a candidate from the serving policy on what traffic brought. Needs a Ray that is initialised.

    Raises:
        TrainingStopped: KL passed its bound, or a number was not finite; nothing is published.
        train.controller.WorkerError: a worker failed; nothing is published.
    """
    started = time.monotonic()
    store, lake = PolicyStore(context.policies), Lake(context.lake_uri, context.lake)
    parent = parent_of(store, context)
    versions = lake.versions()
    asked = prompts(lake, versions=versions, limit=config.data.max_prompts)
    longest = longest_prompt(config, parent.path)
    usable = [p for p in asked if len(p.prompt_token_ids) <= longest]
    if len(usable) < config.data.min_prompts:
        reason = (
            f"{len(usable)} usable prompts in the lake, fewer than train.data.min_prompts={config.data.min_prompts}"
        )
        return JobResult(
            run=context.run, candidate=None, parent=parent.version, steps=0, reason=reason, metrics={}, seconds=0.0
        )
    wants_traffic = config.data.traffic_groups_per_step > 0
    traffic = TrafficGroups.of(rollouts(lake, versions=versions)) if wants_traffic else TrafficGroups([], 0)
    say(
        f"{context.run}: from policy {parent.version}, {len(usable)} prompts ({len(asked) - len(usable)} too long), "
        f"{len(traffic.groups)} groups of traffic ({traffic.refused} responses sampled below full support left out), "
        f"{config.ranks} ranks"
    )

    seed = config.seed * 1_000_003 + parent.version
    rng = random.Random(seed)
    reward = load_reward(context.reward)
    algorithm = algorithms.load(config.algorithm)
    next_prompts = cycled(usable, config.data.prompts_per_step, rng)
    traffic_count = min(config.data.traffic_groups_per_step, len(traffic.groups))
    next_traffic = cycled(traffic.groups, traffic_count, rng) if traffic_count else iter(lambda: [], None)

    with start_pool(config) as pool, Tracker(context.folder) as tracker, progress_bar() as bar:
        say(f"{context.run}: starting actor, reference and rollout workers")
        actor = pool.group("actor", "train.workers.actor:ActorWorker", policy=parent.path, config=config)
        reference = pool.group(
            "reference", "train.workers.reference:ReferenceWorker", policy=parent.path, config=config
        )
        rollout = pool.group(
            "rollout", "train.workers.rollout:RolloutWorker", policy=parent.path, config=config, seed=seed
        )
        say(f"{context.run}: workers up after {time.monotonic() - started:.0f} s")
        task = bar.add_task(f"{context.run}", total=config.steps)
        history: list[dict[str, float]] = []
        for step in range(config.steps):
            clock = Clock()
            asked_now = next(next_prompts)
            sampled = rollout.generate([p.prompt_token_ids for p in asked_now], n=config.algorithm.group_size)
            clock.lap("generate")
            scored = score(asked_now, sampled, reward, temperature=config.rollout.temperature)
            logged = regroup(next(next_traffic), first_group=len(asked_now))
            fresh = PackedBatch.pack(scored)
            batch = PackedBatch.pack(scored + logged)
            clock.lap("score")
            batch = batch.with_(ref_log_probs=reference.log_probs(batch), old_log_probs=actor.log_probs(batch))
            clock.lap("log_probs")
            batch = batch.with_(advantages=algorithm.advantages(batch))
            updates = [actor.update(m) for m in batch.minibatches(config.minibatches)]
            clock.lap("update")
            rollout.load_actor_weights()
            clock.lap("reshard")
            metrics = {**health(fresh, batch, updates), **clock.laps(len(batch.tokens))}
            tracker.log(step, metrics)
            history.append(metrics)
            bar.advance(task)
            say_step(context.run, step, config.steps, metrics)
            check_health(config, step, metrics)
        candidate = publish(store, parent, actor, config, context, versions, history, len(usable))
    say(f"{context.run}: published policy {candidate.version} in {time.monotonic() - started:.0f} s")
    return JobResult(
        run=context.run,
        candidate=candidate.version,
        parent=parent.version,
        steps=config.steps,
        reason=None,
        metrics=history[-1],
        seconds=time.monotonic() - started,
    )


# ---------------------------------------------------------------------------------------- the steps, in their order


def parent_of(store: PolicyStore, context: JobContext) -> Policy:
    if context.parent is not None:
        return store.get(context.parent)
    pointer = store.serving()
    if pointer is None:
        raise ValueError(f"no policy is serving in {context.policies}; make one with: millrace init --model FOLDER")
    return store.get(pointer.version)


def longest_prompt(config: TrainConfig, policy: Path) -> int:
    """Tokens that a prompt may have beside a response of ``max_tokens``."""
    length = config.rollout.max_model_len
    if length is None:
        length = json.loads((policy / "config.json").read_text())["max_position_embeddings"]
    room = length - config.rollout.max_tokens
    if room < 1:
        raise ValueError(
            f"train.rollout.max_tokens={config.rollout.max_tokens} leaves no room for a prompt in {length} tokens "
            "of context"
        )
    return room


def start_pool(config: TrainConfig) -> ResourcePool:
    return ResourcePool(
        ranks=config.ranks,
        threads=config.threads_per_rank,
        tensor_parallel_size=config.rollout.tensor_parallel_size,
        start_timeout_s=config.start_timeout_s,
        call_timeout_s=config.step_timeout_s,
        environment={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "TOKENIZERS_PARALLELISM": "false",
            # Eager engines still compile a few helpers, which takes seconds and a C++ compiler.
            **({"TORCHDYNAMO_DISABLE": "1"} if config.rollout.enforce_eager else {}),
        },
    )


def score(
    asked: list[Prompt], sampled: list[list[Any]], reward: Callable[[pa.Table], Any], *, temperature: float
) -> list[Rollout]:
    """Reward the samples; one group a prompt. A sample that the rule has no reward for is left out."""
    flat = [(group, prompt, s) for group, prompt in enumerate(asked) for s in sampled[group]]
    rewards = reward(
        pa.table(
            {
                "prompt": pa.array([p.prompt for _, p, _ in flat], pa.string()),
                "messages": pa.array([p.messages for _, p, _ in flat], pa.string()),
                "response": pa.array([s.text for _, _, s in flat], pa.string()),
                "response_token_ids": pa.array([s.token_ids for _, _, s in flat], pa.list_(pa.int32())),
                "metadata": pa.array([list(p.metadata.items()) for _, p, _ in flat], pa.map_(pa.string(), pa.string())),
            }
        )
    )
    scored = [
        Rollout(p.prompt_token_ids, s.token_ids, s.log_probs, float(r), group, temperature)
        for (group, p, s), r in zip(flat, rewards, strict=True)
        if r is not None and s.token_ids
    ]
    if not scored:
        raise TrainingStopped("the reward function gave no reward to any of the sampled responses")
    return scored


def regroup(groups: list[list[Rollout]], *, first_group: int) -> list[Rollout]:
    """Logged groups as rollouts, numbered on from the fresh ones."""
    return [
        Rollout(r.prompt, r.response, r.log_probs, r.reward, first_group + i, r.temperature)
        for i, group in enumerate(groups)
        for r in group
    ]


def health(fresh: PackedBatch, batch: PackedBatch, updates: list[dict[str, float]]) -> dict[str, float]:
    """What to watch: rewards of the fresh rollouts; KL and logprob differences by token, nats; means of the updates."""
    assert batch.old_log_probs is not None
    assert batch.ref_log_probs is not None
    end = len(fresh.tokens)  # the fresh rollouts come first
    mask = batch.response_mask.clone()
    mask[end:] = False
    old, behaviour, ref = (t[mask] for t in (batch.old_log_probs, batch.behaviour_log_probs, batch.ref_log_probs))
    lengths = fresh.lengths - fresh.prompt_lengths
    return {
        "reward": float(fresh.rewards.mean()),
        "reward_std": float(fresh.rewards.std()) if len(fresh) > 1 else 0.0,
        "kl_ref": float(k3(old, ref).mean()),
        "kl_behaviour": float(k1(behaviour, old).mean()),
        "logprob_difference_mean": float((old - behaviour).abs().mean()),
        "logprob_difference_max": float((old - behaviour).abs().max()),
        "response_length": float(lengths.float().mean()),
        "uninformative_fraction": float(uninformative(fresh.rewards, fresh.groups).float().mean()),
        "responses": float(len(fresh)),
        "traffic_responses": float(len(batch) - len(fresh)),
        **{name: sum(u[name] for u in updates) / len(updates) for name in updates[0]},
    }


def check_health(config: TrainConfig, step: int, metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise TrainingStopped(f"step {step}: {name} is {value}; nothing is published")
    if config.max_kl is not None and metrics["kl_ref"] > config.max_kl:
        raise TrainingStopped(
            f"step {step}: KL to the parent policy {metrics['kl_ref']:.4f} passed "
            f"train.max_kl={config.max_kl}; nothing is published"
        )


def publish(
    store: PolicyStore,
    parent: Policy,
    actor: WorkerGroup,
    config: TrainConfig,
    context: JobContext,
    versions: dict[str, int],
    history: list[dict[str, float]],
    prompt_count: int,
) -> Policy:
    """Write weights, config and tokenizer aside, and have the store make a version of them."""
    folder = context.folder / "candidate"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    actor.export(folder)
    weights = {p.name for p in parent.path.glob("*.safetensors*")}
    for name in parent.files:
        if name not in weights and not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(parent.path / name, folder / name)
    policy = store.publish(
        folder,
        parent=parent.version,
        lineage={
            **context.lineage,
            "run": context.run,
            "lake_versions": versions,
            "prompts": prompt_count,
            "reward": context.model_dump(mode="json", exclude_none=True)["reward"],
            "train": config.model_dump(mode="json"),
        },
        metrics={"first": history[0], "last": history[-1], "steps": len(history)},
        probe=probe.measure,
    )
    shutil.rmtree(folder)
    return policy


# ------------------------------------------------------------------------------------------------- where it runs


def run_job(config: TrainConfig, context: JobContext) -> JobResult:
    """Run the job on the cluster of ``config.ray_address``, or over a Ray of its own in this process."""
    context.folder.mkdir(parents=True, exist_ok=True)
    spec = context.folder / "job.json"
    spec.write_text(json.dumps({"config": config.model_dump(mode="json"), "context": context.model_dump(mode="json")}))
    if config.ray_address:
        submit(config, context, spec)
    else:
        run_locally(spec)
    return JobResult.model_validate_json((context.folder / "result.json").read_text())


def run_locally(spec: Path) -> None:
    import ray

    job = json.loads(spec.read_text())
    ranks, threads = job["config"]["ranks"], job["config"]["threads_per_rank"]
    sys.path[:0] = job["context"]["python_path"]
    ray.init(
        num_cpus=ranks * threads,
        include_dashboard=False,
        object_store_memory=256 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": ":".join(sys.path)}},
    )
    try:
        run_spec(spec)
    finally:
        ray.shutdown()


def run_spec(spec: Path) -> None:
    """Run a job in a Ray that is initialised, and leave its result beside its metrics."""
    job = json.loads(spec.read_text())
    config, context = TrainConfig.model_validate(job["config"]), JobContext.model_validate(job["context"])
    result = run(config, context)
    aside = context.folder / "result.json.new"
    aside.write_text(result.model_dump_json(indent=2))
    aside.rename(context.folder / "result.json")


def submit(config: TrainConfig, context: JobContext, spec: Path) -> None:
    """Run the job by Ray's job API; its output is printed as it comes.

    Raises:
        RuntimeError: the job failed; the message ends with its last lines.
    """
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(config.ray_address)
    environment = {"env_vars": {"PYTHONPATH": ":".join(context.python_path)}} if context.python_path else {}
    job_id = client.submit_job(
        entrypoint=f"{sys.executable} -m train.job {spec}", runtime_env=environment, metadata={"run": context.run}
    )
    say(f"{context.run}: submitted as {job_id} to {config.ray_address}")
    try:
        follow(client, job_id)
    except BaseException:
        client.stop_job(job_id)  # whoever stops waiting for the job wants no candidate of it
        raise


def follow(client: Any, job_id: str) -> None:
    """Print a job's output until it ends. Raises RuntimeError if it doesn't succeed."""
    printed = 0
    while True:
        status = client.get_job_status(job_id)
        logs = client.get_job_logs(job_id)
        print(logs[printed:], end="", flush=True)
        printed = len(logs)
        if status == "SUCCEEDED":
            return
        if status.is_terminal():
            message = client.get_job_info(job_id).message
            raise RuntimeError(f"Ray job {job_id} ended as {status}: {message}\n{logs[-2000:]}")
        time.sleep(1.0)


def main() -> None:
    """Entry point of a job on a cluster: ``python -m train.job SPEC.json``."""
    import ray

    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m train.job SPEC.json")
    spec = Path(sys.argv[1])
    sys.path[:0] = json.loads(spec.read_text())["context"]["python_path"]
    ray.init(address="auto", log_to_driver=False)
    run_spec(spec)


if __name__ == "__main__":
    main()
