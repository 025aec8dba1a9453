"""The ranks under torchrun, without Ray: one process per rank, of which rank 0 is the driver too.

The driver's dataflow runs in rank 0 alone; the other ranks wait for calls. A call goes out, and its answers come back,
over a gloo group that nothing else uses. That every rank ran the dataflow in lockstep would need no messages, but then
every file that it reads or writes, every clock and every random number would have to be the same for all of them.

As rank 0 computes its own share of a call, a call that is started is also finished: nothing overlaps. A rank that fails
ends, and torchrun then ends the others.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from feedback.processes.fork_server import PARENT
from feedback.processes.freed_memory import keep_freed_memory
from serve.local_ray.cluster import LOOPBACK, loopback_sockets
from train.config.training import TrainConfig
from train.controller.dispatch import Layout
from train.controller.failure_kinds import Kind, text_is_out_of_memory
from train.controller.rendezvous import find_store, follows_from_another, join_ranks, open_store
from train.controller.torchrun_guard import end_with_starter
from train.controller.worker import Workers, compile_by_environment
from train.controller.worker_group import CAUSE_S, Pending, Pool, WorkerError

_BETWEEN_CALLS: Final = timedelta(days=365)
"""Who waits for a call is not late, whatever rank 0 does meanwhile. That it has died shows by its sockets, and that it
hangs by its heartbeat."""

_pool: TorchrunPool | None = None


def pool() -> TorchrunPool:
    """The ranks that this process is rank 0 of. Raises RuntimeError if it was not started as such."""
    if _pool is None:
        raise RuntimeError("train.launcher=torchrun, start `python -m train.launch --launcher torchrun SPEC.json`")
    return _pool


def run_rank(config: TrainConfig, layout: Layout, environment: dict[str, str], driver: Callable[[], None]) -> None:
    """Run a rank until the driver, which runs in rank 0, is done. Failures are raised, and must end the process.

    Without torchrun around it, this process is the only rank.
    """
    global _pool
    os.environ.update(environment)
    if "RANK" not in os.environ:
        with socket.socket() as s:
            s.bind((LOOPBACK, 0))
            address = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(s.getsockname()[1])}
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", **address, **loopback_sockets())
        if PARENT in os.environ:
            end_with_starter()
    else:
        end_with_starter()  # the ranks of a torchrun that was killed would go on, and publish
    compile_by_environment()
    torch.set_num_threads(config.threads_of(config.placement.actor))
    if not torch.cuda.is_available():
        keep_freed_memory()
    _pool = TorchrunPool(config, layout)
    _pool.run(driver)


def rendezvous_store(rank: int, timeout_s: float) -> dist.Store:
    """The store of the rendezvous: in rank 0, at the address in the environment, or that of the user's own torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return open_store(address, timeout_s, port) if rank == 0 else find_store(address, port, timeout_s)


class TorchrunPool(Pool):
    """All ranks of a torchrun; each of them creates one. Rank 0 calls, the others answer."""

    def __init__(self, config: TrainConfig, layout: Layout) -> None:
        self.layout = layout
        self.start_timeout_s, self.call_timeout_s = config.start_timeout_s, config.step_timeout_s
        timeout = timedelta(seconds=config.step_timeout_s)
        self.rank = int(os.environ["RANK"])
        started = int(os.environ["WORLD_SIZE"])
        if started != layout.ranks:
            raise ValueError(
                f"torchrun started {started} ranks, and the config says {layout.ranks}; start as many "
                f"(torchrun --nproc-per-node {layout.ranks}) or set train.ranks={started}"
            )
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        store = rendezvous_store(self.rank, config.start_timeout_s)
        join_ranks(store, self.rank, started, config.step_timeout_s)
        self._failures = dist.PrefixStore("failures", store)
        self._calls = dist.new_group(backend="gloo", timeout=_BETWEEN_CALLS)
        self._answers = dist.new_group(backend="gloo", timeout=timeout)
        self._turn = threading.Lock()  # collectives are told apart by their order alone, and threads call
        self._workers = Workers()

    def run(self, driver: Callable[[], None]) -> None:
        """Be the driver, or answer rank 0's calls until it is done. Failures are raised, and end the rank."""
        received: list[Any] = [None]
        try:
            if self.rank == 0:
                driver()
                dist.scatter_object_list(received, [None] * self.layout.ranks, src=0, group=self._calls)
            while self.rank > 0:
                dist.scatter_object_list(received, None, src=0, group=self._calls)
                if received[0] is None:
                    break
                self._answer(*received[0])
        except BaseException:
            self._failures.set(str(self.rank), traceback.format_exc())
            raise
        self._workers.close()
        if dist.is_initialized():  # or its threads may still run when the interpreter ends, which then aborts
            dist.destroy_process_group()

    def call(
        self, what: str, name: str, arguments: list[tuple[Any, ...]], join: Callable[[list[Any]], Any] = list
    ) -> Pending:
        """Have every rank do it, and wait: this process computes its own share."""
        received: list[Any] = [None]
        try:
            with self._turn:
                dist.scatter_object_list(received, [(name, a) for a in arguments], src=0, group=self._calls)
                return Pending(what, self.call_timeout_s, self._answer(*received[0]), join)
        except Exception as error:
            text = traceback.format_exc()
            rank, why = (self._cause() if follows_from_another(text) else None) or (0, text)
            kind: Kind | None = "memory" if text_is_out_of_memory(why) else None
            message = f"{what} failed on rank {rank}: {why}"
            raise WorkerError(message, consequence=follows_from_another(why), kind=kind) from error

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> list[Any]:
        """Do this rank's share; the answers by rank, in rank 0."""
        answers: list[Any] | None = [None] * self.layout.ranks if self.rank == 0 else None
        dist.gather_object(getattr(self._workers, name)(*arguments), answers, dst=0, group=self._answers)
        return answers or []

    def _cause(self) -> tuple[int, str] | None:
        """Another rank that failed by itself, and its traceback, once there is one; None if none comes in time."""
        deadline, others = time.monotonic() + CAUSE_S, range(1, self.layout.ranks)
        while True:
            reported = {r: self._failures.get(str(r)).decode() for r in others if self._failures.check([str(r)])}
            for rank, text in reported.items():
                if not follows_from_another(text):
                    return rank, text
            if len(reported) == len(others) or time.monotonic() > deadline:
                return None
            time.sleep(0.05)
