"""A pool of ranks under Ray: a placement group, one actor process per rank."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from feedback.processes import fork_server
from feedback.processes.freed_memory import keep_freed_memory
from feedback.processes.signals import stop_signals_blocked
from serve.local_ray.cluster import sockets_on
from train.config.placement import Strategy
from train.controller.dispatch import Layout
from train.controller.failure_kinds import Kind, is_out_of_memory
from train.controller.rendezvous import find_store, follows_from_another, join_ranks, open_store
from train.controller.worker import Workers, compile_by_environment
from train.controller.worker_group import Pending, Pool, WorkerError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from torch.distributed import TCPStore


class Host(Workers):
    """The process of one rank: joins the process group, holds one worker of each role, runs their methods."""

    def __init__(self, rank: int, ranks: int, threads: int, gpus: int) -> None:
        super().__init__()
        import ray

        # Left to itself gloo listens where the machine's name leads, which on many machines is loopback.
        for name, interface in sockets_on(ray.util.get_node_ip_address()).items():
            os.environ.setdefault(name, interface)
        # Ray shows a rank its own GPU alone, which is then number 0 to it.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0" if gpus else str(rank))
        torch.set_num_threads(threads)
        if not gpus:
            keep_freed_memory()
        compile_by_environment()
        with (
            stop_signals_blocked()
        ):  # starting the tracker, as vLLM would, unblocks signals that are blocked in Ray's processes
            resource_tracker.ensure_running()
        self.rank, self.ranks = rank, ranks
        self.store: TCPStore | None = None

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Open the store of the rendezvous in this rank, on its address in Ray."""
        import ray

        address = ray.util.get_node_ip_address()
        self.store = open_store(address, timeout_s)
        return address, self.store.port

    def join(self, address: str, port: int, timeout_s: float) -> None:
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        store = self.store or find_store(address, port, timeout_s)
        join_ranks(store, self.rank, self.ranks, timeout_s)


class ResourcePool(Pool):
    """Processes, one a rank, that worker groups are placed on. A context manager: leaving it ends the processes.

    After a failure its ranks are out of step, so every later call to it fails too.

    Args:
        threads: CPU cores reserved for each rank, and the threads it computes with.
        gpus: whole GPUs of each rank. A rank without one sees none.
        strategy: of Ray's placement group: PACK puts ranks on as few machines as it can, SPREAD on as many.
        start_timeout_s: until the cluster has room, and until workers are up.
        call_timeout_s: of each call and each collective.

    Raises:
        WorkerError: the cluster had no room in time (the message says what it has), or a rank did not start.
    """

    def __init__(
        self,
        *,
        ranks: int,
        threads: int,
        gpus: int = 0,
        strategy: Strategy = "PACK",
        name: str = "pool",
        tensor_parallel_size: int = 1,
        parts: tuple[int, ...] = (),
        start_timeout_s: float = 600.0,
        call_timeout_s: float = 1800.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.layout = Layout(ranks, tensor_parallel_size, parts)
        self.call_timeout_s, self.start_timeout_s = call_timeout_s, start_timeout_s
        self.failure: WorkerError | None = None
        self.hosts: list[Any] = []
        self._starting = Lock()  # calls of several threads reach all ranks in one order
        self._place = reserve(
            name, ranks, {"CPU": threads, **({"GPU": gpus} if gpus else {})}, strategy, start_timeout_s
        )
        try:
            environment = {"OMP_NUM_THREADS": str(threads), **(environment or {})}
            if not gpus:  # Ray would leave it all of the machine's
                environment["CUDA_VISIBLE_DEVICES"] = ""
            runtime: dict[str, Any] = {"env_vars": environment}
            if fork_server.ADDRESS in os.environ:
                runtime["py_executable"] = shlex.join([sys.executable, "-I", "-S", fork_server.__file__])
            remote = ray.remote(num_cpus=threads, num_gpus=gpus, runtime_env=runtime)(Host)
            for rank, bundle in enumerate(by_machine(self._place)):
                where = PlacementGroupSchedulingStrategy(self._place, placement_group_bundle_index=bundle)
                host = remote.options(scheduling_strategy=where).remote(rank, ranks, threads, gpus)
                self.hosts.append(host)
            first = self.call(f"start of {name}", "open_store", [(call_timeout_s,)])
            [(address, port)] = first.result(start_timeout_s)
            self.call(f"join {name}", "join", [(address, port, call_timeout_s)] * ranks).result(start_timeout_s)
        except BaseException:
            self.close()
            raise

    def call(
        self, what: str, name: str, arguments: list[tuple[Any, ...]], join: Callable[[list[Any]], Any] = list
    ) -> RayCall:
        """Call a method of the first hosts, as many as there are ``arguments``, and don't wait."""
        if self.failure is not None:
            raise WorkerError(
                f"{what}: an earlier call failed, and its ranks are out of step: {self.failure}", kind=self.failure.kind
            )
        calls = zip(self.hosts, arguments, strict=False)
        with self._starting:
            refs = {getattr(host, name).remote(*a): rank for rank, (host, a) in enumerate(calls)}
        return RayCall(self, what, refs, join)

    def close(self) -> None:
        """End the processes and give their place back."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for host in self.hosts:
            ray.kill(host)
        remove_placement_group(self._place)

    def __enter__(self) -> ResourcePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RayCall(Pending):
    """A call under way on the ranks of a pool."""

    def __init__(self, pool: ResourcePool, what: str, refs: dict[Any, int], join: Callable[[list[Any]], Any]) -> None:
        super().__init__(what, pool.call_timeout_s, [None] * len(refs), join)
        self._pool, self.waiting = pool, refs

    def advance(self, timeout_s: float) -> bool:
        import ray

        deadline = time.monotonic() + timeout_s
        while self.waiting:
            left = max(0.0, deadline - time.monotonic())
            done, _ = ray.wait(list(self.waiting), num_returns=1, timeout=left)
            if not done:
                return False
            rank = self.waiting.pop(done[0])
            try:
                self.answers[rank] = ray.get(done[0])
            except ray.exceptions.RayError as error:
                died = isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed
                message = f"{self.what} failed on rank {rank}: {explained(error)}"
                failure = WorkerError(message, consequence=is_consequence(error), died=died, kind=kind_of(error))
                if self._pool.failure is None or self._pool.failure.consequence:
                    self._pool.failure = failure
                raise failure from None
        return True


def explained(error: Exception) -> str:
    """An error of Ray's in its own words; of one about memory without the tables of what else used some."""
    import ray

    if not isinstance(error, ray.exceptions.OutOfMemoryError):
        return str(error)
    return (
        f"{str(error).splitlines()[0]}: out of memory. Train adapters (train.lora), lower train.micro_batch_tokens, or "
        f"end what else runs; `millrace doctor` says how much is needed"
    )


def kind_of(error: Exception) -> Kind | None:
    """What an error of Ray's is; None if a rank raised it."""
    import ray

    if is_out_of_memory(error):
        return "memory"
    if isinstance(error, ray.exceptions.RayTaskError) or getattr(error, "actor_init_failed", False):
        return None
    return "lost"  # a process, a node, or what Ray knew of them


def is_consequence(error: Exception) -> bool:
    """Whether a rank failed only because another one has gone; one that died is always a cause."""
    import ray

    return isinstance(error, ray.exceptions.RayTaskError) and follows_from_another(str(error))


def gpus_of_cluster() -> int:
    """How many GPUs the cluster's machines have together."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def reserve(name: str, ranks: int, each: dict[str, float], strategy: Strategy, timeout_s: float) -> PlacementGroup:
    """A placement group for the ranks, once the cluster has room. Raises WorkerError if it has none in time."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    place = placement_group([each] * ranks, strategy=strategy)
    if place.wait(timeout_s):
        return place
    remove_placement_group(place)
    counted = ("CPU", "GPU")
    nodes = [{k: n["Resources"].get(k, 0) for k in counted} for n in ray.nodes() if n["Alive"]]
    free = {k: ray.available_resources().get(k, 0) for k in counted}
    raise WorkerError(
        f"pool {name}: no room within {timeout_s:g} s for {ranks} ranks of {each} each, strategy {strategy}; the "
        f"cluster's machines have {nodes}, of which {free} is free. Lower the pool's ranks, threads or gpus under "
        "train.placement.pools, use strategy PACK, or give the cluster more"
    )


def by_machine(place: PlacementGroup) -> list[int]:
    """The bundles' numbers, those of a machine next to each other: consecutive ranks share an engine."""
    from ray.util.placement_group import placement_group_table

    nodes: dict[int, str] = placement_group_table(place)["bundles_to_node_id"]
    return sorted(nodes, key=lambda bundle: (nodes[bundle], bundle))
