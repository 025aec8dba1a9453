"""A further API process: it answers requests for responses, with the engine and the limits of the first one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from feedback.config import FeedbackConfig
from serve.admission import ActiveRequests
from serve.api_processes.forwarding import ForwardedRequests
from serve.api_processes.link import CallFailed, Handler, Link, LinkBroken
from serve.api_processes.process import ApiProcess
from serve.config import ServeConfig
from serve.engine import EngineError
from serve.http import Problem
from serve.middleware.api_keys import ApiKey
from serve.middleware.token_buckets import BucketName
from serve.policies.experiments import Experiment, Turn
from serve.vllm.engine import Answering, Engine, EngineClient

log = logging.getLogger(__name__)

SOCKET: Final = "link"
COUNTS: Final = "active"
_TAKE_TIMEOUT_S: Final = 5.0
_RETRY_AFTER_S: Final = 2.0
_WATCH_S: Final = 0.5
_ALONE_S: Final = 5.0  # for the first process to find the same, or for a disk to recover


@dataclass(frozen=True)
class Beginning:
    """What a further process is started with.

    ``keys``: those that the first one knows; ``trusted_code``: code of models that may run; ``folder``: where the first
    one's socket and the shared counts are; ``port``: what all listen on; ``parent``: the first one's process id.
    """

    config: ServeConfig
    feedback_config: FeedbackConfig
    client: EngineClient
    folder: Path
    port: int
    parent: int
    keys: tuple[ApiKey, ...]
    trusted_code: dict[str, list[str]]


@dataclass(frozen=True)
class Serving:
    """What serves: the policy's version, all that is loaded in the engine by version, whether other weights are about
    to come, the experiment's part, or the experiment whose policies both answer."""

    version: int
    loaded: dict[int, Answering]
    making_way: bool
    turn: Turn | None
    beside: Experiment | None = None


class FurtherProcess(ApiProcess):
    """The parts of a further process. The journal's writer has its number behind the server's name."""

    def __init__(self, beginning: Beginning) -> None:
        config, client = beginning.config, beginning.client
        super().__init__(
            config,
            beginning.feedback_config,
            Engine(config.engine),
            writer_name(config.replica_name, client.index),
            active=ActiveRequests.in_file(beginning.folder / COUNTS, client.count, client.index),
        )
        self.keys_before = beginning.keys
        self._client = client
        self._socket = beginning.folder / SOCKET
        self._turn: Turn | None = None
        self._beside: Experiment | None = None
        self._unready: str | None = None
        self._link: Link | None = None
        self._stopping = False
        self.forwarded = ForwardedRequests(lambda: self.link)
        self.limiter.shared = _FirstBuckets(lambda: self.link)

    @property
    def link(self) -> Link:
        """The connection to the first process. Raises LinkBroken before there is one."""
        if self._link is None:
            raise LinkBroken("the first API process is not there yet")
        return self._link

    async def start(self) -> None:
        """Connect to the engine, open the journal; return when requests may be taken. Raises what prevents it."""
        handlers: dict[str, Handler] = {
            "serve": self._serve,
            "news": self._take_news,
            "stop": self._stop,
            "ping": lambda: None,
            "metrics": self.metrics.render,
            **self.forwarded.handlers,
        }
        self._link = link = Link(*await asyncio.open_unix_connection(str(self._socket)), handlers)
        self._reading = asyncio.create_task(self._read(link), name="link")
        try:
            await link.call("hello", self._client.index)
            await self._open()
            await asyncio.to_thread(self.journal.open)
            await self.engine.attach(self._client)
            self._load_handlers()
            await link.call("attached", self._client.index)
        except BaseException:
            await self.close()
            raise
        self._follow(watch=asyncio.create_task(self._watch(), name="watch"))

    async def close(self) -> None:
        """Write what was recorded, and leave the engine to the others."""
        self._stopping = True
        self._end_following()
        await self._close()
        await asyncio.to_thread(self.journal.close)
        self._reading.cancel()

    def dead(self) -> str | None:
        return None if self.engine.healthy else "the engine's process has died"

    def unready(self) -> str | None:
        return super().unready() or self._unready

    def turn(self) -> Turn | None:
        return self._turn

    def beside(self) -> Experiment | None:
        return self._beside

    async def _read(self, link: Link) -> None:
        await link.run()
        if not self._stopping:
            self.failure = LinkBroken("the first API process has gone")
            self.on_death()

    async def _watch(self) -> None:
        """End this process once it alone can't serve: its client of the engine has died, or its journal has."""
        since: float | None = None
        while True:
            await asyncio.sleep(_WATCH_S)
            reason = super().unready()
            if reason is None or self._unready is not None or self._stopping or self.draining:
                since = None
                continue
            since = since or time.monotonic()
            if time.monotonic() - since >= _ALONE_S:
                log.error("this API process ends, for another one to take its place: %s", reason)
                self.failure = EngineError(reason)
                self.on_death()
                return

    # What the first process calls

    def _serve(self, serving: Serving) -> None:
        self.engine.follow(serving.version, serving.loaded, making_way=serving.making_way)
        self._turn, self._beside = serving.turn, serving.beside

    def _take_news(self, stats: dict[str, float], unready: str | None) -> None:
        self.engine.stats |= stats
        self._unready = unready

    def _stop(self, engine_died: bool) -> None:
        self._stopping = True
        if engine_died:
            self.engine.give_up_requests()
        self.on_death()


class _FirstBuckets:
    """The first process's buckets (``serve.middleware.rate_limits.SharedBuckets``)."""

    def __init__(self, link: Callable[[], Link]) -> None:
        self._link = link

    async def take(self, name: BucketName, rate: float, capacity: float, amount: float) -> tuple[float, float]:
        try:
            async with asyncio.timeout(_TAKE_TIMEOUT_S):
                found: tuple[float, float] = await self._link().call("take", name, rate, capacity, amount)
        except (LinkBroken, CallFailed, TimeoutError) as error:
            log.error("limits can't be counted: %s: %s", type(error).__name__, error)
            reason = "the limits of keys can't be counted at the moment; ask again"
            raise Problem(503, reason, retry_after=_RETRY_AFTER_S) from error
        return found

    def give_back(self, name: BucketName, amount: float) -> None:
        try:
            self._link().tell("give_back", name, amount)
        except LinkBroken:
            log.debug("the first API process has gone, and its buckets with it")


def writer_name(replica: str, index: int) -> str:
    """The name of a further process's journal."""
    return f"{replica}-api-{index}"
