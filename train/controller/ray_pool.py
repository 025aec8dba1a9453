"""A pool of ranks under Ray: a placement group, one actor process per rank."""

from __future__ import annotations

import os
import time
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

import torch

from feedback.process_signals import stop_signals_blocked
from train.config.placement import Strategy
from train.controller.dispatch import NOT_CALLED, Layout
from train.controller.rendezvous import find_store, follows_from_another, join_ranks, open_store
from train.controller.worker import Workers
from train.controller.worker_group import CAUSE_S, WorkerError, WorkerGroup
from train.import_object import import_object

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from torch.distributed import TCPStore


class Host(Workers):
    """The process of one rank: joins the process group, holds one worker of each role, runs their methods."""

    def __init__(self, rank: int, ranks: int, threads: int, gpus: int) -> None:
        super().__init__()
        # Ray shows a rank its own GPU alone, which is then number 0 to it.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0" if gpus else str(rank))
        torch.set_num_threads(threads)
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


class ResourcePool:
    """Processes, one a rank, that worker groups are placed on. A context manager: leaving it ends the processes.

    After a failure its ranks are out of step, so every later call to it fails too.

    Args:
        threads: CPU cores reserved for each rank, and the threads it computes with.
        gpus: whole GPUs of each rank; if None, one where the cluster has as many as ranks, else none.
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
        gpus: int | None = None,
        strategy: Strategy = "PACK",
        name: str = "pool",
        tensor_parallel_size: int = 1,
        sequence_parallel_size: int = 1,
        start_timeout_s: float = 600.0,
        call_timeout_s: float = 1800.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.layout = Layout(ranks, tensor_parallel_size, sequence_parallel_size)
        self.call_timeout_s, self.start_timeout_s = call_timeout_s, start_timeout_s
        self._failure: WorkerError | None = None
        if gpus is None:
            gpus = gpus_per_rank(ranks)
        self.hosts: list[Any] = []
        self._place = reserve(
            name, ranks, {"CPU": threads, **({"GPU": gpus} if gpus else {})}, strategy, start_timeout_s
        )
        try:
            environment = {"OMP_NUM_THREADS": str(threads), **(environment or {})}
            remote = ray.remote(num_cpus=threads, num_gpus=gpus, runtime_env={"env_vars": environment})(Host)
            for rank, bundle in enumerate(by_machine(self._place)):
                where = PlacementGroupSchedulingStrategy(self._place, placement_group_bundle_index=bundle)
                host = remote.options(scheduling_strategy=where).remote(rank, ranks, threads, gpus)
                self.hosts.append(host)
            first = RayCall(self, f"start of {name}", {0: self.hosts[0].open_store.remote(call_timeout_s)})
            address, port = first.wait(start_timeout_s)[0]
            self._on_all(f"join {name}", "join", address, port, call_timeout_s)
        except BaseException:
            self.close()
            raise

    def group(self, role: str, target: str, **options: Any) -> WorkerGroup:
        """Create the worker ``module:Class`` on every rank, with ``options`` to its constructor."""
        self._on_all(f"create {role}", "create", role, target, options)
        return WorkerGroup(self, role, import_object(f"worker {role}", target))

    def start(self, role: str, method: str, arguments: list[Any], options: dict[str, Any]) -> RayCall:
        """Call a method with one argument per rank, and don't wait."""
        calls = enumerate(zip(self.hosts, arguments, strict=True))
        refs = {r: h.call.remote(role, method, a, options) for r, (h, a) in calls if a is not NOT_CALLED}
        return RayCall(self, f"{role}.{method}", refs)

    def _on_all(self, what: str, method: str, *arguments: Any) -> None:
        refs = {rank: getattr(host, method).remote(*arguments) for rank, host in enumerate(self.hosts)}
        RayCall(self, what, refs).wait(self.start_timeout_s)

    def refuse_if_failed(self, what: str) -> None:
        if self._failure is not None:
            raise WorkerError(f"{what}: an earlier call failed, and its ranks are out of step: {self._failure}")

    def failed(self, failure: WorkerError) -> WorkerError:
        self._failure = self._failure or failure
        return failure

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


class RayCall:
    """A call under way on the ranks of a pool."""

    def __init__(self, pool: ResourcePool, what: str, refs: dict[int, Any]) -> None:
        pool.refuse_if_failed(what)
        self._pool, self._what = pool, what
        self._waiting = {ref: rank for rank, ref in refs.items()}
        self._answers: list[Any] = [NOT_CALLED] * pool.layout.ranks

    def advance(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for more answers; True if all are there. Raises WorkerError once a rank fails."""
        deadline = time.monotonic() + timeout_s
        while self._waiting:
            answered = self._next(deadline)
            if answered is None:
                return False
            rank, error = answered
            if error is not None:
                raise self._pool.failed(self._cause(rank, error))
        return True

    def wait(self, timeout_s: float) -> list[Any]:
        """The answers by rank. Raises WorkerError if a rank failed or time was up."""
        if not self.advance(timeout_s):
            raise WorkerError(f"{self._what}: ranks {self.missing()} did not answer within {timeout_s:g} s")
        return self.answers()

    def answers(self) -> list[Any]:
        return self._answers

    def missing(self) -> list[int]:
        return sorted(self._waiting.values())

    def _next(self, deadline: float) -> tuple[int, Exception | None] | None:
        """The next rank that answered, and its failure if it is one; None if time is up."""
        import ray

        done, _ = ray.wait(list(self._waiting), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            return None
        rank = self._waiting.pop(done[0])
        try:
            self._answers[rank] = ray.get(done[0])
        except ray.exceptions.RayError as error:
            return rank, error
        return rank, None

    def _cause(self, rank: int, error: Exception) -> WorkerError:
        """The failure to report: this one, or the one in another rank that it follows from, if that comes in time."""
        deadline = time.monotonic() + CAUSE_S
        while is_consequence(error) and self._waiting:
            answered = self._next(deadline)
            if answered is None:
                break
            if answered[1] is not None and not is_consequence(answered[1]):
                rank, error = answered[0], answered[1]
        return WorkerError(f"{self._what} failed on rank {rank}: {error}", consequence=is_consequence(error))


def is_consequence(error: Exception) -> bool:
    """Whether a rank failed only because another one has gone; one that died is always a cause."""
    import ray

    return isinstance(error, ray.exceptions.RayTaskError) and follows_from_another(str(error))


def gpus_per_rank(ranks: int) -> int:
    """One where the cluster has as many GPUs as ranks, else none."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0) >= ranks)


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
