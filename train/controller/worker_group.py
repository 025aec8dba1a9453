"""Calls from the driver: worker groups, the answers that it waits for, and failures."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from feedback.processes.exit import SIGNALLED
from train.controller.dispatch import Layout, Rule
from train.controller.failure_kinds import Kind
from train.controller.worker import Worker
from train.import_object import import_object

_TURN_S = 0.05
CAUSE_S = 10.0
"""How long to look for the cause elsewhere when what failed says only that another process has gone."""


class WorkerError(RuntimeError):
    """A worker failed, died or did not answer in time; the message names the call, the rank and the cause.

    ``consequence``: the failure says only that another process has gone. ``died``: the rank's process did, rather than
    failing by itself. ``kind``: by default as these two say.
    """

    def __init__(
        self, message: str, *, consequence: bool = False, died: bool = False, kind: Kind | None = None
    ) -> None:
        super().__init__(message)
        self.consequence = consequence
        self.kind: Kind = kind or ("lost" if died or consequence else "raised")
        self.exit_code = SIGNALLED + signal.SIGKILL if died else 1  # Ray does not tell which signal it was


class Pending:
    """The answer of a call that was started. Calls to one pool are worked off in the order they were started in.

    ``answers``: by rank, what there is of them. ``waiting``: the ranks that have not answered, by what they do with.
    """

    def __init__(self, what: str, timeout_s: float, answers: list[Any], join: Callable[[list[Any]], Any]) -> None:
        self.what, self.timeout_s, self.answers, self.join = what, timeout_s, answers, join
        self.waiting: dict[Any, int] = {}

    def advance(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for more answers; True if all are there. Raises WorkerError once a rank fails."""
        return not self.waiting

    def result(self, timeout_s: float | None = None) -> Any:
        """The answer; waits at most ``timeout_s`` seconds, the pool's ``call_timeout_s`` if None.

        Raises:
            WorkerError: a rank failed (raised at once, the others are not waited for), or time was up.
        """
        return results(self, timeout_s=timeout_s)[0]


def results(*pendings: Pending, timeout_s: float | None = None) -> list[Any]:
    """The answers of several calls, on any pools; the first failure in any of them is raised at once.

    For calls that wait for each other, as one that sends weights and one that receives them.

    Raises:
        WorkerError: a rank failed, or time was up (``timeout_s``, the longest of the calls' own if None).
    """
    timeout_s = max(p.timeout_s for p in pendings) if timeout_s is None else timeout_s
    deadline = time.monotonic() + timeout_s
    waiting = list(pendings)
    while True:
        for pending in list(waiting):
            turn = min(_TURN_S, deadline - time.monotonic()) if len(waiting) > 1 else deadline - time.monotonic()
            try:
                if pending.advance(max(0.0, turn)):
                    waiting.remove(pending)
            except WorkerError as error:
                if (cause := _cause_among(waiting) if error.consequence else None) is not None:
                    raise cause from error
                raise
        if not waiting:
            return [p.join(p.answers) for p in pendings]
        if time.monotonic() >= deadline:
            late = "; ".join(f"{p.what}: ranks {sorted(p.waiting.values())}" for p in waiting)
            raise WorkerError(f"{late} did not answer within {timeout_s:g} s", kind="hung")


def _cause_among(calls: list[Pending]) -> WorkerError | None:
    """What failed first, where something else failed because of it; None if it is not found in time."""
    deadline = time.monotonic() + CAUSE_S
    left = list(calls)
    while left and time.monotonic() < deadline:
        for call in list(left):
            try:
                if call.advance(_TURN_S):
                    left.remove(call)
            except WorkerError as error:
                if not error.consequence:
                    return error
    return None


class Pool:
    """Ranks that worker groups are placed on."""

    layout: Layout
    start_timeout_s: float
    call_timeout_s: float

    def group(self, role: str, target: str, **options: Any) -> WorkerGroup:
        """Create the worker ``module:Class`` on every rank, with ``options`` to its constructor."""
        everywhere = [(role, target, options)] * self.layout.ranks
        self.call(f"create {role}", "create", everywhere).result(self.start_timeout_s)
        return WorkerGroup(self, role, import_object(f"worker {role}", target))

    def call(
        self, what: str, name: str, arguments: list[tuple[Any, ...]], join: Callable[[list[Any]], Any] = list
    ) -> Pending:
        """Call a method of ``train.controller.worker.Workers``, with the arguments of each rank, and don't wait."""
        raise NotImplementedError


class Method:
    """A method of a group: called, it waits for the answer; ``start`` does not."""

    def __init__(self, pool: Pool, role: str, name: str, rule: Rule) -> None:
        self._pool, self._role, self._name, self._rule = pool, role, name, rule

    def __call__(self, argument: Any = None, **options: Any) -> Any:
        return self.start(argument, **options).result()

    def start(self, argument: Any = None, **options: Any) -> Pending:
        parts, join = self._rule(self._pool.layout, argument)
        arguments = [(self._role, self._name, part, options) for part in parts]
        return self._pool.call(f"{self._role}.{self._name}", "call", arguments, join)


class WorkerGroup:
    """One role on every rank of a pool, called as one object."""

    def __init__(self, pool: Pool, role: str, worker: type[Worker]) -> None:
        self._pool, self._role, self._worker = pool, role, worker

    def __getattr__(self, name: str) -> Method:
        rule: Rule | None = getattr(getattr(self._worker, name, None), "__dispatch__", None)
        if rule is None:
            raise AttributeError(f"{self._worker.__name__} has no dispatched method {name!r}")
        return Method(self._pool, self._role, name, rule)
