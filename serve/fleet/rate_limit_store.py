"""The rate-limit store of a fleet: one process has the token buckets of all keys, and every replica takes from them.

What it guarantees: a key gets what its limit says of the whole fleet, whichever replicas its requests go to, through
however many proxies on however many nodes, while replicas come and go. A store that dies is started again by Ray, with
full buckets; requests wait for it. One that could not be counted in time gets 503. A key without limits needs no store.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import ray
from ray.exceptions import RayError

from serve.http import Problem
from serve.middleware.token_buckets import BucketName, Buckets

log = logging.getLogger(__name__)

_NAME: Final = "millrace limits"
_NAMESPACE: Final = "millrace"
_TIMEOUT_S: Final = 5.0  # a store that is started anew takes two or three
_RETRY_AFTER_S: Final = 2.0


def start_store() -> None:
    """Have the fleet's store run. Like the replicas, it outlives the process that started it, until ``end_store``."""
    ray.remote(Buckets).options(
        name=_NAME,
        namespace=_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,  # the store then begins anew, so nothing is taken twice
    ).remote()


def end_store() -> None:
    """End it, if it is there."""
    try:
        ray.kill(ray.get_actor(_NAME, namespace=_NAMESPACE))
    except ValueError:
        log.debug("there is no rate-limit store to end")


class FleetBuckets:
    """The store's buckets, as a replica takes from them (``serve.middleware.rate_limits.SharedBuckets``)."""

    def __init__(self) -> None:
        """Raises ValueError if there is no store."""
        self._store = ray.get_actor(_NAME, namespace=_NAMESPACE)

    async def take(self, name: BucketName, rate: float, capacity: float, amount: float) -> tuple[float, float]:
        """As ``Buckets.take``. Raises Problem 503 if the store doesn't answer in time."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                wait, level = await self._store.take.remote(name, rate, capacity, amount)
        except (RayError, TimeoutError) as error:
            log.error("the fleet's limits can't be counted: %s: %s", type(error).__name__, error)
            reason = "the limits of keys can't be counted at the moment; ask again"
            raise Problem(503, reason, retry_after=_RETRY_AFTER_S) from error
        return wait, level

    def give_back(self, name: BucketName, amount: float) -> None:
        """As ``Buckets.give_back``. Nobody waits for it: a store that never hears of it begins with full buckets."""
        self._store.give_back.remote(name, amount)
