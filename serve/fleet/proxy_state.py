"""What a proxy's router tells the proxy around it. Imports no torch and no vLLM.

A module of its own: Ray Serve pickles the router's by value, so that what is kept there is not what others import.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope

from serve.config import ServeConfig
from serve.http import Problem
from serve.middleware.authentication import READ, Authenticator, headers_of
from serve.middleware.bodies import Bodies
from serve.middleware.principals import Keyring

_replicas: int | None = None
_entrance: Entrance | None = None


class Entrance:
    """Which bodies a proxy reads, and how."""

    def __init__(self, config: ServeConfig) -> None:
        self._keyring = Keyring(config)
        self._keyring.refresh()  # the key file may be out of this node's reach for now: that is in the log
        self._authenticator = Authenticator(self._keyring, config)
        self._bodies = Bodies(config.limits.body_bytes, config.limits.bodies)
        self._following: asyncio.Task[None] | None = None

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """A request's body, if its sender may have it read: strangers must not take the room of others' bodies.

        Raises Problem 401, 403 or 421; 503 while nobody knows who may; as ``Bodies.read``.
        """
        if self._following is None:
            self._following = asyncio.create_task(self._keyring.follow(), name="keys")
        if has_body(scope):
            if self._keyring.error is not None and not self._keyring.on:
                raise Problem(503, "the keys can't be read at the moment; ask again", retry_after=2)
            self._authenticator.check_before_body(scope["path"], headers_of(scope, READ))
        return await self._bodies.read(receive)


def has_body(scope: Scope) -> bool:
    """Whether a request announces a body."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


def tell_replicas(number: int) -> None:
    """How many replicas there are."""
    global _replicas
    _replicas = number


def tell_config(config: dict[str, Any]) -> None:
    """The server's settings, as JSON values: as far as they say who may ask, and how much."""
    global _entrance
    if _entrance is None:
        _entrance = Entrance(ServeConfig(**config))


def nobody_is_there() -> bool:
    """Whether this process's router knows that there is no replica: a request would wait for one."""
    return _replicas == 0


def entrance() -> Entrance | None:
    """None while this process's router is not there, and the settings are not known."""
    return _entrance
