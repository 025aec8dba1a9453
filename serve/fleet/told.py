"""What a proxy's router tells the proxy around it. Imports no torch and no vLLM.

A module of its own: Ray Serve pickles the router's by value, so that what is kept there is not what others import.
"""

from __future__ import annotations

from serve.api.bodies import Bodies

_replicas: int | None = None
_bodies: Bodies | None = None


def tell_replicas(number: int) -> None:
    """How many replicas there are."""
    global _replicas
    _replicas = number


def tell_limits(body_bytes: int, most_bodies: int) -> None:
    """As ``Bodies``'s."""
    global _bodies
    _bodies = Bodies(body_bytes, most_bodies)


def nobody_is_there() -> bool:
    """Whether this process's router knows that there is no replica: a request would wait for one."""
    return _replicas == 0


def bodies() -> Bodies | None:
    """What reads this process's request bodies; None while its router is not there, and its limits are not known."""
    return _bodies
