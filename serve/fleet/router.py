"""Which replica answers a request. Runs in Ray Serve's proxies; imports no torch and no vLLM.

Requests go to the less loaded of two replicas that are drawn at random, by the number of requests at work. While a
canary is out, a share of the sessions goes to it and the others to the rest; while an experiment runs, a request goes
to a replica of the policy that is drawn for its user; with ``sticky``, the requests of a session go to one replica for
as long as that has room. The header X-Session-Id names the session, and the proxy says who the user is
(``serve.fleet.assignment``): no body is read here. All go by hashes, so that all proxies agree.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serve.fleet.assignment import Arms, Route, now, read
from serve.fleet.proxy_state import configure, set_arms, set_replica_count


class Router(RequestRouter):
    """A Ray Serve request router, one in each proxy."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve when replicas came or went."""
        set_replica_count(len(replicas))
        stats = _stats(replicas)
        set_arms(Arms.among(stats), _ready(stats))
        super().update_replicas(replicas)

    def initialize_state(self, sticky: bool, config: dict[str, Any]) -> None:
        """``sticky``: whether a session stays with a replica. ``config``: as ``configure``'s."""
        self.sticky = sticky
        configure(config)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, best first; of a group, the least loaded one that has room is taken."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        metadata = pending_request.metadata
        route = read(metadata.session_id)
        session = route.session
        allowed = _allowed(candidate_replicas, route, session or metadata.internal_request_id)
        if self.sticky and session:
            order = rank(session, [replica.replica_id.unique_id for replica in allowed])
            by_id = {replica.replica_id.unique_id: replica for replica in allowed}
            return [[by_id[unique_id]] for unique_id in order]
        # Two are enough to be fair, and many proxies that all see one idle replica don't all run there.
        return [random.sample(allowed, min(2, len(allowed))), allowed]


def _stats(replicas: Sequence[RunningReplica]) -> dict[Any, dict[str, Any]]:
    return {replica.replica_id: replica.routing_stats or {} for replica in replicas}


def _ready(stats: dict[Any, dict[str, Any]]) -> list[Any]:
    """The ids of the replicas that are ready."""
    return [replica for replica, known in stats.items() if known.get("ready", True)]


def _allowed(replicas: Sequence[RunningReplica], route: Route, key: str) -> list[RunningReplica]:
    """The replicas that may answer: those that are ready, on the right side of a canary; all, if that leaves none."""
    stats = _stats(replicas)
    ids = set(_ready(stats))
    ready = [replica for replica in replicas if replica.replica_id in ids] or list(replicas)
    if (arms := Arms.among(stats)) is not None:
        allowed = set(arms.allowed([replica.replica_id for replica in ready], route, now()))
        return [replica for replica in ready if replica.replica_id in allowed]
    canaries = [replica for replica in ready if stats[replica.replica_id].get("variant") is not None]
    if not canaries:
        return ready
    canary = stats[canaries[0].replica_id]
    if in_share(key, canary["salt"], canary["share"]):
        return canaries
    return [replica for replica in ready if replica not in canaries] or ready


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
