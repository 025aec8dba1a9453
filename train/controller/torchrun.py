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
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from serve.local_ray.cluster import LOOPBACK, loopback_sockets
from train.config.training import TrainConfig
from train.controller.dispatch import NOT_CALLED, Layout
from train.controller.rendezvous import find_store, follows_from_another, join_ranks, open_store
from train.controller.torchrun_guard import end_with_parent
from train.controller.worker import Workers
from train.controller.worker_group import WorkerError, WorkerGroup
from train.import_object import import_object

_CAUSE_S = 5.0
"""How long rank 0 looks for the failure of another rank that its own seems to follow from."""

_pool: TorchrunPool | None = None


def pool() -> TorchrunPool:
    """The ranks that this process is rank 0 of. Raises RuntimeError if it was not started as such."""
    if _pool is None:
        raise RuntimeError("train.launcher=torchrun, start `python -m train.launch --launcher torchrun SPEC.json`")
    return _pool


def run_rank(config: TrainConfig, layout: Layout, environment: dict[str, str], driver: Callable[[], None]) -> None:
    """Run a rank until the driver, which runs in rank 0, is done. Failures are raised, and must end the process."""
    joined = join(config, layout, environment)
    try:
        if joined.rank == 0:
            driver()
            joined.finish()
        else:
            joined.serve()
    except BaseException:
        joined.failures.report(joined.rank)
        raise
    joined.close()
    if dist.is_initialized():  # or its threads may still run when the interpreter ends, which then aborts
        dist.destroy_process_group()


def rendezvous_store(rank: int, timeout_s: float) -> dist.Store:
    """The store of the rendezvous: in rank 0, at the address in the environment, or that of the user's own torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return open_store(address, timeout_s, port) if rank == 0 else find_store(address, port, timeout_s)


class Failures:
    """What ended a rank, for rank 0 to report."""

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore("failures", store)

    def report(self, rank: int) -> None:
        """The exception that is being handled."""
        self._store.set(str(rank), traceback.format_exc())

    def cause(self, ranks: int) -> tuple[int, str] | None:
        """A rank that failed by itself, and its traceback, once there is one; None if none comes in time."""
        deadline = time.monotonic() + _CAUSE_S
        while True:
            reported = {r: self._store.get(str(r)).decode() for r in range(1, ranks) if self._store.check([str(r)])}
            for rank, text in reported.items():
                if not follows_from_another(text):
                    return rank, text
            if len(reported) == ranks - 1 or time.monotonic() > deadline:
                return None
            time.sleep(0.05)


class TorchrunPool:
    """All ranks of a torchrun; each of them creates one. Rank 0 calls, the others ``serve``."""

    def __init__(self, config: TrainConfig, layout: Layout) -> None:
        self.layout = layout
        self.call_timeout_s = config.step_timeout_s
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
        self.failures = Failures(store)
        self._control = dist.new_group(backend="gloo", timeout=timeout)
        self._workers = Workers()

    def group(self, role: str, target: str, **options: Any) -> WorkerGroup:
        """Create the worker ``module:Class`` on every rank, with ``options`` to its constructor."""
        everywhere: list[tuple[Any, ...] | None] = [(role, target, options)] * self.layout.ranks
        self._run(f"create {role}", "create", everywhere)
        return WorkerGroup(self, role, import_object(f"worker {role}", target))

    def start(self, role: str, method: str, arguments: list[Any], options: dict[str, Any]) -> Finished:
        """Call a method with one argument per rank, and wait: this process computes its own share."""
        calls: list[tuple[Any, ...] | None] = [
            None if a is NOT_CALLED else (role, method, a, options) for a in arguments
        ]
        return Finished(self._run(f"{role}.{method}", "call", calls))

    def serve(self) -> None:
        """Answer rank 0's calls until it is done. Failures are raised, and end the rank."""
        while True:
            received: list[Any] = [None]
            dist.scatter_object_list(received, None, src=0, group=self._control)
            if received[0] is None:
                return
            name, arguments = received[0]
            self._answer(self._do(name, arguments))

    def finish(self) -> None:
        """Let the other ranks end."""
        dist.scatter_object_list([None], [None] * self.layout.ranks, src=0, group=self._control)

    def close(self) -> None:
        """End this rank's workers; nothing is called any more."""
        self._workers.close()

    def _run(self, what: str, name: str, arguments: list[tuple[Any, ...] | None]) -> list[Any]:
        """Have every rank do it, this one too; the answers by rank."""
        received: list[Any] = [None]
        try:
            dist.scatter_object_list(received, [(name, a) for a in arguments], src=0, group=self._control)
            return self._answer(self._do(*received[0]))
        except Exception as error:
            text, cause = traceback.format_exc(), None
            if self.layout.ranks > 1 and follows_from_another(text):
                cause = self.failures.cause(self.layout.ranks)
            rank, why = cause or (0, text)
            raise WorkerError(f"{what} failed on rank {rank}: {why}", consequence=follows_from_another(why)) from error

    def _do(self, name: str, arguments: tuple[Any, ...] | None) -> Any:
        return NOT_CALLED if arguments is None else getattr(self._workers, name)(*arguments)

    def _answer(self, answer: Any) -> list[Any]:
        answers: list[Any] | None = [None] * self.layout.ranks if self.rank == 0 else None
        dist.gather_object(answer, answers, dst=0, group=self._control)
        return answers or []


class Finished:
    """A call that has its answers."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers

    def advance(self, timeout_s: float) -> bool:
        return True

    def answers(self) -> list[Any]:
        return self._answers

    def missing(self) -> list[int]:
        return []


def join(config: TrainConfig, layout: Layout, environment: dict[str, str]) -> TorchrunPool:
    """Become a rank. Without torchrun around it, this process is the only one."""
    global _pool
    os.environ.update(environment)
    if "RANK" not in os.environ:
        with socket.socket() as s:
            s.bind((LOOPBACK, 0))
            address = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(s.getsockname()[1])}
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", **address, **loopback_sockets())
    else:
        end_with_parent()  # the ranks of a torchrun that was killed would go on, and publish
    if "torch._dynamo" in sys.modules and os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        torch._dynamo.config.disable = True  # it has read the environment before
    torch.set_num_threads(config.threads_of(config.placement.actor))
    _pool = TorchrunPool(config, layout)
    return _pool
