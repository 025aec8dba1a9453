"""State that a proxy's router shares with the proxy around it. Imports no torch and no vLLM.

A module of its own: Ray Serve pickles the router's module by value, so its globals are not those that others import.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from starlette.types import Receive, Scope

from serve.config import ServeConfig
from serve.fleet.assignment import Arms
from serve.http import Problem
from serve.middleware.authentication import READ, Authenticator, client_of, headers_of
from serve.middleware.bodies import FORM_BYTES, FORMS, Bodies
from serve.middleware.keyring import CONSOLE, Keyring
from serve.middleware.refusals import Refusals
from serve.observability.audit import AuditLog
from serve.policies.experiments import Experiment

_replicas: int | None = None
_experiment: Experiment | None = None
_body_reader: BodyReader | None = None


class BodyReader:
    """Which bodies a proxy reads, and how."""

    def __init__(self, config: ServeConfig) -> None:
        self._keyring = Keyring(config)
        self._keyring.refresh()  # the key file may be out of this node's reach for now: that is in the log
        self._refusals = Refusals(config.limits.refused_per_minute, AuditLog(config.audit))
        self._authenticator = Authenticator(self._keyring, config, self._refusals)
        self._bodies = Bodies(config.limits.body_bytes, config.limits.bodies)
        self._forms = Bodies(FORM_BYTES, FORMS)  # of strangers too, who log in
        self._following: tuple[asyncio.Task[None], ...] = ()

    async def read(self, scope: Scope, receive: Receive) -> tuple[bytes, str]:
        """A request's body and its tenant, if its sender may have it read: strangers must not take others' room.

        Raises Problem 401, 403, 421 or 429; 503 while the keys can't be read; as ``Bodies.read``.
        """
        if not self._following:
            self._following = (
                asyncio.create_task(self._keyring.follow(), name="keys"),
                asyncio.create_task(self._refusals.record(), name="refusals"),
            )
        tenant = ""
        if has_body(scope):
            if self._keyring.error is not None and not self._keyring.on:
                raise Problem(503, "the keys can't be read at the moment; ask again", retry_after=2)
            headers, client = headers_of(scope, READ), client_of(scope)
            tenant = self._authenticator.check_before_body(scope["path"], headers, client).tenant
        bodies = self._forms if scope["path"].startswith(f"{CONSOLE}/") else self._bodies
        return await bodies.read(receive), tenant


def has_body(scope: Scope) -> bool:
    """Whether a request announces a body."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


def set_replica_count(number: int) -> None:
    """How many replicas there are."""
    global _replicas
    _replicas = number


def set_arms(arms: Arms | None, ready: Iterable[Any]) -> None:
    """The replicas that take part in an experiment, and which are ready."""
    global _experiment
    _experiment = arms.experiment if arms is not None and arms.whole(ready) else None


def experiment() -> Experiment | None:
    """The experiment that requests are drawn for, if each of its two policies has a replica."""
    return _experiment


def configure(config: dict[str, Any]) -> None:
    """The server's settings of keys and limits, as JSON values."""
    global _body_reader
    if _body_reader is None:
        _body_reader = BodyReader(ServeConfig(**config))


def has_no_replica() -> bool:
    """Whether this process's router has no replica: a request would wait for one."""
    return _replicas == 0


def body_reader() -> BodyReader | None:
    """None until this process's router has called ``configure``."""
    return _body_reader
