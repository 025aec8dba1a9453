"""Which sessions a canary gets, and which replica a session stays with: by hashes, so that all proxies agree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def in_share(key: str, salt: int, share: float) -> bool:
    """Whether a session is in a share (0 to 1) of all. ``salt``: other sessions each time it is another."""
    return _hash(f"{salt}:{key}") < share


def rank(session: str, replicas: Iterable[str]) -> list[str]:
    """The replicas in the order in which a session prefers them.

    Rendezvous hashing: of those that stay, each session keeps its order when others come or go.
    """
    return sorted(replicas, key=lambda replica: (_hash(f"{session}:{replica}"), replica), reverse=True)


def _hash(text: str) -> float:
    """Even in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
