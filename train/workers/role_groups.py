"""The worker groups of the training job, placed as the config says."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from serve.vllm.boot import engine_variables
from train import algorithms
from train.config.placement import PlacementConfig
from train.config.training import TrainConfig
from train.controller import torchrun
from train.controller.heartbeat import forget_ranks, interval
from train.controller.ray_pool import ResourcePool, gpus_of_cluster
from train.controller.worker_group import Pool, WorkerError, WorkerGroup, results
from train.data.rewards import Reward, RewardFunction, rewards_of
from train.model.mesh import batch_parts, mesh_sizes

PREPARE: Final = "train.own_model.model_class:prepare"


@dataclass(frozen=True)
class Groups:
    """What the dataflow calls.

    ``reference`` is None if nothing needs it, ``rollout`` if nothing is sampled, ``critic`` if the algorithm has none.
    ``reward`` rewards rows of responses, here or on its pool; None if nothing is sampled. ``rendezvous`` is how the
    pools of training and generation exchange weights, None if they share one.
    """

    actor: WorkerGroup
    critic: WorkerGroup | None
    reference: WorkerGroup | None
    rollout: WorkerGroup | None
    reward: RewardFunction | None
    rendezvous: Any

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        """What has state that a checkpoint keeps, by the name of its part."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    def by_pool(self, on: PlacementConfig) -> dict[str, WorkerGroup]:
        """A group on each pool that trains or generates, the actor on its own, by the pool's name."""
        roles = {"actor": self.actor, "critic": self.critic, "reference": self.reference, "rollout": self.rollout}
        found: dict[str, WorkerGroup] = {}
        for role, pool in on.roles.items():
            if (group := roles.get(role)) is not None:
                found.setdefault(pool, group)
        return found

    def sleep(self) -> None:
        """Leave the devices to training until ``reshard``: nothing is sampled before it."""
        if self.rollout is not None and self.rendezvous is None:
            self.rollout.sleep()

    def reshard(self, version: int = 0) -> None:
        """Generate with the weights in training, as they are, from here on.

        ``version``: what their tokens are labelled with: the steps that they have behind them.
        """
        if self.rollout is None:
            return
        if self.rendezvous is None:
            self.rollout.load_actor_weights(version)
        else:
            receiving = self.rollout.receive_weights
            results(self.actor.send_weights.start(self.rendezvous), receiving.start(self.rendezvous, version=version))


@contextmanager
def start_groups(
    config: TrainConfig,
    policy: Path,
    *,
    seed: int,
    reward: Reward | None,
    trial: Callable[[RewardFunction], object] = lambda _: None,
    pools: AbstractContextManager[dict[str, Pool]] | None = None,
    folder: Path | None = None,
) -> Generator[Groups]:
    """Start the pools of the config and the workers on them; leaving the context ends them.

    Args:
        folder: of the run, in which ranks give signs of life; None if nobody watches.
        pools: those of resident workers; by default new ones.
        seed: of sampling.
        reward: of what is sampled; None if nothing is.
        trial: called with the reward where it is on a pool, before any other worker is started.

    Raises:
        WorkerError: the cluster has no room for a pool, or a worker did not start.
    """
    on, algorithm = config.placement, algorithms.load(config.algorithm)
    disaggregated = config.samples and on.rollout != on.actor
    rewards: RewardFunction | None = reward
    with pools or start_pools(config) as placed, heartbeats(config, placed, folder, config.start_timeout_s):
        for name, pool in placed.items():
            arguments = [(PREPARE, config.model)] * pool.layout.ranks
            pool.call(f"model of {name}", "prepare", arguments).result(config.start_timeout_s)
        if on.reward is not None and reward is not None:
            group = placed[on.reward].group(
                "reward", "train.workers.reward:RewardWorker", reward=reward.settings, timeout_s=reward.timeout_s
            )
            rewards = partial(rewards_of, group, config.ranks_of(on.reward))
            trial(rewards)
        actor, rollout = "train.workers.actor:ActorWorker", "train.workers.rollout:RolloutWorker"
        if disaggregated:
            actor = "train.workers.disaggregated:SendingActor"
            rollout = "train.workers.disaggregated:ReceivingRollout"
        elif config.rollout.backend == "hf":
            rollout = "train.workers.hf_rollout:HfRolloutWorker"
        if not config.algorithm.trains_policy:
            actor = "train.workers.scorer:ScorerWorker"
        common: dict[str, Any] = {"policy": policy, "config": config}
        trained = placed[on.actor].group("actor", actor, **common)
        groups = Groups(
            actor=trained,
            critic=placed[on.critic or on.actor].group("critic", "train.workers.critic:CriticWorker", **common)
            if algorithm.needs_critic
            else None,
            reference=placed[on.reference].group("reference", "train.workers.reference:ReferenceWorker", **common)
            if config.has_reference or algorithm.needs_reference
            else None,
            rollout=placed[on.rollout].group("rollout", rollout, **common, seed=seed) if config.samples else None,
            reward=rewards,
            rendezvous=trained.open_rendezvous(config.ranks_of(on.rollout)) if disaggregated else None,
        )
        for name, pool in placed.items():
            pool.call(f"seed {name}", "seed", seeds(pool, seed)).result()
        yield groups


@contextmanager
def heartbeats(
    config: TrainConfig, pools: Mapping[str, Pool], folder: Path | None, timeout_s: float
) -> Generator[None]:
    """Have all ranks give signs of life in the block. Raises WorkerError if one has not begun within ``timeout_s``."""
    if folder is None:
        yield
        return
    every_s = interval(config.restarts.silence_s)
    for name, pool in pools.items():
        arguments = [(folder, f"{name}-{rank}", every_s) for rank in range(pool.layout.ranks)]
        pool.call(f"heartbeat of {name}", "begin_heartbeat", arguments).result(timeout_s)
    try:
        yield
    finally:
        forget_ranks(folder)


def seeds(pool: Pool, seed: int) -> list[tuple[int]]:
    """The seed of each rank, the same for all that share an engine: whatever the process has done before."""
    return [(seed + rank // pool.layout.tensor_parallel_size,) for rank in range(pool.layout.ranks)]


@contextmanager
def start_pools(config: TrainConfig) -> Generator[dict[str, Pool]]:
    """The pools of the config, by name; leaving the context ends their processes."""
    if config.launcher == "torchrun":
        yield dict.fromkeys(config.placement.pools, torchrun.pool())
        return
    gpus = gpus_by_pool(config, gpus_of_cluster())
    with ExitStack() as stack:
        pools: dict[str, Pool] = {}
        for name, pool in config.placement.pools.items():
            pools[name] = stack.enter_context(
                ResourcePool(
                    ranks=config.ranks_of(name),
                    threads=config.threads_of(name),
                    gpus=gpus[name],
                    strategy=pool.strategy,
                    name=name,
                    **sizes(config, name),
                    start_timeout_s=config.start_timeout_s,
                    call_timeout_s=config.step_timeout_s,
                    environment=environment(config),
                )
            )
        yield pools


def gpus_by_pool(config: TrainConfig, available: int) -> dict[str, int]:
    """GPUs of each rank of each pool, in a cluster that has so many.

    Policies are trained and generate on GPUs where there are any; rewards get what is left.

    Raises:
        WorkerError: there are some, and too few for what is trained and generates.
    """
    on = config.placement
    found = {name: pool.gpus for name, pool in on.pools.items() if pool.gpus is not None}
    left = available - sum(gpus * config.ranks_of(name) for name, gpus in found.items())
    rewards = {on.reward} - {on.actor, on.critic, on.reference, on.rollout}
    for name in sorted(on.pools.keys() - found.keys(), key=lambda name: name in rewards):
        ranks = config.ranks_of(name)
        if available and ranks > left and name not in rewards:
            raise WorkerError(
                f"the cluster has {available} GPUs, of which {max(left, 0)} are left for the {ranks} ranks of pool "
                f"{name}: lower train.ranks or train.placement.pools.{name}.ranks, or have it compute on CPUs by "
                f"train.placement.pools.{name}.gpus=0"
            )
        found[name] = int(0 < ranks <= left)
        left -= found[name] * ranks
    return found


def sizes(config: TrainConfig, pool: str) -> dict[str, Any]:
    """How the ranks of a pool share engines and parts of a batch: only where it generates, only where it trains."""
    on, ranks = config.placement, config.ranks_of(pool)
    trains = pool in (on.actor, on.reference, on.critic)
    return {
        "tensor_parallel_size": config.rollout.tensor_parallel_size if pool == on.rollout else 1,
        "parts": batch_parts(ranks, **mesh_sizes(config, ranks)) if trains else (),
    }


def environment(config: TrainConfig) -> dict[str, str]:
    """What the processes of the workers have in their environment."""
    eager, gpu = config.rollout.enforce_eager, torch.cuda.is_available()
    if eager is None:  # before a run has settled it, as torchrun's ranks are
        eager = not gpu
    compiles = config.fsdp.compile_layers is not None or (gpu and config.optimizer.name == "adamw_8bit")
    return {
        **engine_variables("WARNING", one_process=True, one_machine=False),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
        # Eager engines still compile a few helpers, which takes seconds and a C++ compiler.
        **({"TORCHDYNAMO_DISABLE": "1"} if eager and not compiles else {}),
    }
