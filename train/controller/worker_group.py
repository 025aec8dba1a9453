"""Calls from the driver: worker groups, the answers that it waits for, and failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

from train.controller.dispatch import Layout, Rule
from train.controller.worker import Worker

_TURN_S = 0.05
CAUSE_S = 10.0
"""How long to look for the cause elsewhere when what failed says only that another process has gone."""


class WorkerError(RuntimeError):
    """A worker failed, died or did not answer in time; the message names the call, the rank and the cause.

    ``consequence``: the failure says only that another process has gone.
    """

    def __init__(self, message: str, *, consequence: bool = False) -> None:
        super().__init__(message)
        self.consequence = consequence


class Running(Protocol):
    """A call under way on the ranks of one pool."""

    def advance(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for more answers; True if all are there. Raises WorkerError once a rank fails."""

    def answers(self) -> list[Any]:
        """By rank, ``NOT_CALLED`` for a rank that was not; only when all are there."""

    def missing(self) -> list[int]:
        """The ranks that have not answered."""


class Pool(Protocol):
    """Ranks that worker groups are placed on. A context manager: leaving it ends its ranks."""

    layout: Layout
    call_timeout_s: float

    def group(self, role: str, target: str, **options: Any) -> WorkerGroup:
        """Create the worker ``module:Class`` on every rank, with ``options`` to its constructor."""

    def start(self, role: str, method: str, arguments: list[Any], options: dict[str, Any]) -> Running:
        """Call a method with one argument per rank, and don't wait."""


class Pending:
    """The answer of a call that was started. Calls to one pool are worked off in the order they were started in."""

    def __init__(self, what: str, running: Running, timeout_s: float, join: Callable[[list[Any]], Any]) -> None:
        self.what, self.timeout_s = what, timeout_s
        self._running, self._join = running, join

    def done(self) -> bool:
        """Whether the answer is there. Raises WorkerError if a rank has failed."""
        return self.advance(0.0)

    def advance(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the answer; True if it is there. Raises WorkerError once a rank fails."""
        return self._running.advance(timeout_s)

    def missing(self) -> list[int]:
        """The ranks that have not answered."""
        return self._running.missing()

    def result(self, timeout_s: float | None = None) -> Any:
        """The answer; waits at most ``timeout_s`` seconds, the pool's ``call_timeout_s`` if None.

        Raises:
            WorkerError: a rank failed (raised at once, the others are not waited for), or time was up.
        """
        return results(self, timeout_s=timeout_s)[0]

    def joined(self) -> Any:
        return self._join(self._running.answers())


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
            with _cause_among([p for p in waiting if p is not pending]):
                if pending.advance(max(0.0, turn)):
                    waiting.remove(pending)
        if not waiting:
            return [p.joined() for p in pendings]
        if time.monotonic() >= deadline:
            late = "; ".join(f"{p.what}: ranks {p.missing()}" for p in waiting)
            raise WorkerError(f"{late} did not answer within {timeout_s:g} s")


@contextmanager
def _cause_among(others: list[Pending]) -> Generator[None]:
    """Raise what failed first in place of what failed because of it, if it is found in time."""
    try:
        yield
    except WorkerError as error:
        deadline = time.monotonic() + CAUSE_S
        while error.consequence and others and time.monotonic() < deadline:
            for other in list(others):
                try:
                    if other.advance(_TURN_S):
                        others.remove(other)
                except WorkerError as cause:
                    if not cause.consequence:
                        raise cause from error
                    others.remove(other)
        raise


class Method:
    """A method of a group: called, it waits for the answer; ``start`` does not."""

    def __init__(self, pool: Pool, role: str, name: str, rule: Rule) -> None:
        self._pool, self._role, self._name, self._rule = pool, role, name, rule

    def __call__(self, argument: Any = None, **options: Any) -> Any:
        return self.start(argument, **options).result()

    def start(self, argument: Any = None, **options: Any) -> Pending:
        layout, join = self._pool.layout, self._rule.join
        arguments, known = self._rule.split(layout, argument)
        running = self._pool.start(self._role, self._name, arguments, options)
        what = f"{self._role}.{self._name}"
        return Pending(what, running, self._pool.call_timeout_s, lambda answers: join(layout, answers, known))


class WorkerGroup:
    """One role on every rank of a pool, called as one object."""

    def __init__(self, pool: Pool, role: str, worker: type[Worker]) -> None:
        self._pool, self._role, self._worker = pool, role, worker

    def __getattr__(self, name: str) -> Method:
        rule: Rule | None = getattr(getattr(self._worker, name, None), "__dispatch__", None)
        if rule is None:
            raise AttributeError(f"{self._worker.__name__} has no dispatched method {name!r}")
        return Method(self._pool, self._role, name, rule)
