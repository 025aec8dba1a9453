"""The worker groups of the training job, placed as the config says."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from feedback.config import RuleConfig
from feedback.rewards.rules import load_reward
from train import algorithms, torchrun
from train.config import TrainConfig
from train.controller import Pool, ResourcePool, WorkerGroup, results


@dataclass(frozen=True)
class Groups:
    """What the dataflow calls.

    ``reference`` is None if nothing needs it. ``reward`` rewards rows of responses, here or on its pool. ``meeting`` is
    where weights change pools, None if training and generation share one.
    """

    actor: WorkerGroup
    reference: WorkerGroup | None
    rollout: WorkerGroup
    reward: Callable[[pa.Table], Any]
    meeting: Any

    def reshard(self) -> None:
        """Generate with the weights in training, as they are, from here on."""
        if self.meeting is None:
            self.rollout.load_actor_weights()
        else:
            results(self.actor.send_weights.start(self.meeting), self.rollout.receive_weights.start(self.meeting))


@contextmanager
def start_groups(
    config: TrainConfig, policy: Path, *, seed: int, reward: str | dict[str, RuleConfig]
) -> Generator[Groups]:
    """Start the pools of the config and the workers on them; leaving the context ends them.

    Args:
        policy: folder of the policy to start from.
        seed: of sampling.
        reward: what rewards responses, as ``feedback.rewards.rules.load_reward`` takes it.

    Raises:
        WorkerError: the cluster has no room for a pool, or a worker did not start.
    """
    on = config.placement
    apart = on.rollout != on.actor
    rewarding: Callable[[pa.Table], Any] = load_reward(reward)
    with start_pools(config) as pools:
        if on.reward is not None:
            group = pools[on.reward].group("reward", "train.workers.reward:RewardWorker", reward=reward)
            rewarding = partial(rewards_of, group, config.ranks_of(on.reward))
        actor = "train.workers.apart:SendingActor" if apart else "train.workers.actor:ActorWorker"
        rollout = "train.workers.apart:ReceivingRollout" if apart else "train.workers.rollout:RolloutWorker"
        common: dict[str, Any] = {"policy": policy, "config": config}
        trained = pools[on.actor].group("actor", actor, **common)
        groups = Groups(
            actor=trained,
            reference=pools[on.reference].group("reference", "train.workers.reference:ReferenceWorker", **common)
            if config.has_reference or algorithms.load(config.algorithm).needs_reference
            else None,
            rollout=pools[on.rollout].group("rollout", rollout, **common, seed=seed),
            reward=rewarding,
            meeting=trained.meet(config.ranks_of(on.rollout)) if apart else None,
        )
        yield groups


def rewards_of(group: WorkerGroup, ranks: int, rows: pa.Table) -> list[float | None]:
    """The reward of each row; each rank rewards some consecutive ones, so the function must not compare rows."""
    each = -(-len(rows) // ranks)
    parts = group.rewards([rows.slice(start, each) for start in range(0, len(rows), each)])
    return [reward for part in parts for reward in part]


@contextmanager
def start_pools(config: TrainConfig) -> Generator[dict[str, Pool]]:
    """The pools of the config, by name; leaving the context ends their processes."""
    if config.launcher == "torchrun":
        yield dict.fromkeys(config.placement.pools, torchrun.pool())
        return
    import ray

    ranks = sum(config.ranks_of(name) for name in config.placement.pools)
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= ranks else 0
    with ExitStack() as stack:
        pools: dict[str, Pool] = {}
        for name, pool in config.placement.pools.items():
            pools[name] = stack.enter_context(
                ResourcePool(
                    ranks=config.ranks_of(name),
                    threads=config.threads_of(name),
                    gpus=gpus if pool.gpus is None else pool.gpus,
                    strategy=pool.strategy,
                    name=name,
                    **sizes(config, name),
                    start_timeout_s=config.start_timeout_s,
                    call_timeout_s=config.step_timeout_s,
                    environment=environment(config),
                )
            )
        yield pools


def sizes(config: TrainConfig, pool: str) -> dict[str, int]:
    """How the ranks of a pool share engines and sequences: only where it generates, only where it trains."""
    on = config.placement
    return {
        "tensor_parallel_size": config.rollout.tensor_parallel_size if pool == on.rollout else 1,
        "sequence_parallel_size": config.fsdp.sequence_parallel if pool in (on.actor, on.reference) else 1,
    }


def environment(config: TrainConfig) -> dict[str, str]:
    """What the processes of the workers have in their environment."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        # Eager engines still compile a few helpers, which takes seconds and a C++ compiler.
        **({"TORCHDYNAMO_DISABLE": "1"} if config.rollout.enforce_eager else {}),
    }
