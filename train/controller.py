"""The single controller: worker groups, the pool they sit on, and the rules by which a call is split and joined.

The driver holds the dataflow and calls a group as if it were one object. A group is SPMD: one worker a rank, in one Ray
actor a rank (a ``Host``); the groups of one pool share those processes, and so their devices. A rule on each worker
method says how its arguments are split over the ranks and its results joined::

    class ActorWorker(Worker):
        @dispatch(per_token)
        def log_probs(self, batch): ...

    pool = ResourcePool(ranks=2, threads=1)
    actor = pool.group("actor", "train.workers.actor:ActorWorker", policy=path)
    log_probs = actor.log_probs(batch)      # [T], in the order of the batch
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from train.batch import PackedBatch


class WorkerError(RuntimeError):
    """A worker failed, died or did not answer in time; the message names the rank and the call."""


# ---------------------------------------------------------------------------------------------- dispatch rules


@dataclass(frozen=True)
class Layout:
    """What a rule may know of a group: its ranks, and how many of them share one generation engine."""

    ranks: int
    tensor_parallel_size: int


@dataclass(frozen=True)
class Rule:
    """How one argument goes out to the ranks and how their answers come back as one.

    ``split(layout, argument)`` → (one argument a rank, whatever ``join`` needs to know);
    ``join(layout, answers, known)`` → the answer.
    """

    split: Callable[[Layout, Any], tuple[list[Any], Any]]
    join: Callable[[Layout, list[Any], Any], Any]


def _split_by_tokens(layout: Layout, batch: PackedBatch) -> tuple[list[PackedBatch], list[torch.Tensor]]:
    parts = batch.balanced(layout.ranks)
    starts, lengths = batch.cu_seqlens[:-1], batch.lengths
    tokens = [torch.cat([torch.arange(int(starts[s]), int(starts[s] + lengths[s])) for s in part]) for part in parts]
    return [batch.select(part) for part in parts], tokens


def _join_tokens(layout: Layout, answers: list[torch.Tensor], tokens: list[torch.Tensor]) -> torch.Tensor:
    joined = torch.empty(sum(len(t) for t in tokens), dtype=answers[0].dtype)
    for index, answer in zip(tokens, answers, strict=True):
        joined[index] = answer
    return joined


def _split_by_engine(layout: Layout, items: Sequence[Any]) -> tuple[list[list[Any]], int]:
    engines = layout.ranks // layout.tensor_parallel_size
    return [list(items[rank // layout.tensor_parallel_size :: engines]) for rank in range(layout.ranks)], len(items)


def _join_engines(layout: Layout, answers: list[list[Any]], count: int) -> list[Any]:
    engines = layout.ranks // layout.tensor_parallel_size
    joined: list[Any] = [None] * count
    for engine in range(engines):
        joined[engine::engines] = answers[engine * layout.tensor_parallel_size]
    return joined


to_all = Rule(lambda layout, argument: ([argument] * layout.ranks, None), lambda layout, answers, _: answers[0])
"""Every rank gets the same; rank 0's answer is the answer."""

by_tokens = Rule(_split_by_tokens, lambda layout, answers, _: answers[0])
"""A batch is split by sequences, balanced by tokens; the ranks agree on the answer among themselves."""

per_token = Rule(_split_by_tokens, _join_tokens)
"""A batch is split as in ``by_tokens``; the answers are per-token tensors, put back in the batch's order."""

by_engine = Rule(_split_by_engine, _join_engines)
"""A list is dealt out to the generation engines (all ranks of one get the same); answers come back in its order."""


def dispatch(rule: Rule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a worker method as callable from the driver, by ``rule``. The rule is applied to its first argument."""

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        method.__dispatch__ = rule  # type: ignore[attr-defined]
        return method

    return mark


# ------------------------------------------------------------------------------------------------- in the ranks


class Worker:
    """One rank of a group. ``peers`` are the workers of the other groups in the same process, by role."""

    def __init__(self, peers: dict[str, Worker]) -> None:
        self.peers = peers
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()


class Host:
    """The process of one rank: joins the process group, holds one worker of each role, runs their methods."""

    def __init__(self, rank: int, ranks: int, threads: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
        torch.set_num_threads(threads)
        self.workers: dict[str, Worker] = {}

    def free_address(self) -> tuple[str, int]:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        import ray

        return ray.util.get_node_ip_address(), port

    def join(self, address: str, port: int, timeout_s: float) -> None:
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))

    def create(self, role: str, target: str, options: dict[str, Any]) -> None:
        module, _, name = target.partition(":")
        self.workers[role] = getattr(importlib.import_module(module), name)(peers=self.workers, **options)

    def call(self, role: str, method: str, argument: Any, options: dict[str, Any]) -> Any:
        return getattr(self.workers[role], method)(argument, **options)


# ------------------------------------------------------------------------------------------------ in the driver


class ResourcePool:
    """Processes, one a rank, that worker groups are placed on. A context manager: leaving it ends the processes."""

    def __init__(
        self,
        *,
        ranks: int,
        threads: int,
        tensor_parallel_size: int = 1,
        start_timeout_s: float = 600.0,
        call_timeout_s: float = 1800.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        import ray

        self.layout = Layout(ranks, tensor_parallel_size)
        self.call_timeout_s = call_timeout_s
        self.start_timeout_s = start_timeout_s
        gpus = 1 if ray.cluster_resources().get("GPU", 0) >= ranks else 0
        environment = {"OMP_NUM_THREADS": str(threads), **(environment or {})}
        remote = ray.remote(num_cpus=threads, num_gpus=gpus, runtime_env={"env_vars": environment})(Host)
        self.hosts = [remote.remote(rank, ranks, threads) for rank in range(ranks)]
        address, port = self._gather("start", [self.hosts[0].free_address.remote()], start_timeout_s)[0]
        self._gather("join", [h.join.remote(address, port, call_timeout_s) for h in self.hosts], start_timeout_s)

    def group(self, role: str, target: str, **options: Any) -> WorkerGroup:
        """Create the worker ``module:Class`` on every rank, with ``options`` to its constructor."""
        self._gather(
            f"create {role}", [h.create.remote(role, target, options) for h in self.hosts], self.start_timeout_s
        )
        module, _, name = target.partition(":")
        return WorkerGroup(self, role, getattr(importlib.import_module(module), name))

    def run(self, role: str, method: str, arguments: list[Any], options: dict[str, Any]) -> list[Any]:
        """Call a method on every rank, one argument a rank; answers by rank."""
        refs = [h.call.remote(role, method, a, options) for h, a in zip(self.hosts, arguments, strict=True)]
        return self._gather(f"{role}.{method}", refs, self.call_timeout_s)

    def _gather(self, what: str, refs: list[Any], timeout_s: float) -> list[Any]:
        """Answers by rank; the first failure of any rank is raised at once, not after the others' time-outs."""
        import ray

        waiting = dict(zip(refs, range(len(refs)), strict=True))
        answers: list[Any] = [None] * len(refs)
        deadline = time.monotonic() + timeout_s
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise WorkerError(f"{what}: ranks {sorted(waiting.values())} did not answer within {timeout_s:.0f} s")
            rank = waiting.pop(done[0])
            try:
                answers[rank] = ray.get(done[0])
            except ray.exceptions.RayError as error:
                raise WorkerError(f"{what} failed on rank {rank}: {error}") from error
        return answers

    def __enter__(self) -> ResourcePool:
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        for host in self.hosts:
            ray.kill(host)


class WorkerGroup:
    """One role on every rank of a pool, called as one object."""

    def __init__(self, pool: ResourcePool, role: str, worker: type[Worker]) -> None:
        self._pool, self._role, self._worker = pool, role, worker

    def __getattr__(self, name: str) -> Callable[..., Any]:
        rule: Rule | None = getattr(getattr(self._worker, name, None), "__dispatch__", None)
        if rule is None:
            raise AttributeError(f"{self._worker.__name__} has no dispatched method {name!r}")

        def call(argument: Any = None, **options: Any) -> Any:
            arguments, known = rule.split(self._pool.layout, argument)
            return rule.join(self._pool.layout, self._pool.run(self._role, name, arguments, options), known)

        return call
