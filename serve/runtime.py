"""The server's parts and their life: start, drain, stop. Nothing that was started outlives it."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from starlette.requests import Request

from feedback.config import FeedbackConfig
from feedback.ingest.idempotency import SeenFeedback
from feedback.ingest.sealer_process import Sealer
from feedback.journal.writer import Journal
from feedback.lake.tables import Lake
from feedback.redaction import Redactor
from serve.admission import Admission
from serve.config import ServeConfig
from serve.generation.variant import CanaryVariants
from serve.middleware.bodies import Bodies
from serve.middleware.keyring import Keyring, Principal
from serve.middleware.rate_limits import Limiter
from serve.middleware.refusals import Refusals
from serve.observability import log_format
from serve.observability.audit import AuditLog
from serve.observability.metrics import Metrics
from serve.observability.tracing import Tracing
from serve.policies.experiments import Assignment, Turn
from serve.policies.open_store import open_store
from serve.reading.sessions import Sessions
from serve.recorder import Recorder, Redaction, UnstoredResponses
from serve.swap.swapper import DesiredState, Swap, Swapper
from serve.vllm.engine import Engine

if TYPE_CHECKING:
    from serve.vllm.openai_handlers import Handlers

log = logging.getLogger(__name__)

CUT_OFF_S: Final = 10
"""For requests that were aborted at the end of the drain to record what they have."""
_WATCH_SECONDS: Final = 1.0


class ServerDied(RuntimeError):
    """The engine died under the server."""


class Fleet(Protocol):
    """What the routes report of the fleet that this replica is in (``serve.fleet.member``)."""

    def ready(self) -> list[str]:
        """The replicas that answer requests."""
        ...

    def policy(self) -> dict[str, Any]:
        """``GET /policy`` of the fleet."""
        ...

    def metrics(self) -> bytes:
        """All replicas' Prometheus texts as one."""
        ...

    def assigned(
        self,
        headers: Mapping[str, str],
        *,
        tenant: str,
        user: str | None,
        session: str | None,
        request: str,
        at: float,
    ) -> Assignment | None:
        """What an experiment of the fleet drew for a request, None if there is none; ``at``: Unix time in seconds."""
        ...


class Server:
    """The parts behind the routes. Paths in both configs are absolute, or relative to the working directory."""

    def __init__(
        self,
        config: ServeConfig,
        feedback_config: FeedbackConfig,
        desired_state: Callable[[], DesiredState] | None = None,
        engine: Engine | None = None,
        *,
        recording: bool = True,
    ) -> None:
        """``desired_state``: what to serve, if not what the store's pointer says. ``engine``: in place of vLLM's.

        ``recording``: False if nothing is stored, whoever asks.
        """
        self.config = config
        self.recording = recording
        self.metrics = Metrics()
        self.tracing = Tracing.of(config.traces, "millrace", config.replica_name)
        self.keyring = Keyring(config)
        self.refusals = Refusals(
            config.limits.refused_per_minute,
            AuditLog(config.audit),
            lambda reason: self.metrics.auth_failures.labels(reason=reason).inc(),
        )
        self.limiter = Limiter(config.limits.burst_seconds, self._observe_limit)
        self.bodies = Bodies(config.limits.body_bytes, config.limits.bodies)
        self.engine = engine or Engine(config.engine)
        self._with_vllm = engine is None
        self.swapper = Swapper(
            open_store(Path(config.policies), config.policy_store),
            self.engine,
            config.swap,
            Path(config.replicas) / f"{config.replica_name}.jsonl",
            observe=self._observe_swap,
            desired_state=desired_state,
            name=config.replica_name,
        )
        journal_folder = Path(feedback_config.journal.folder)
        self.journal = Journal(journal_folder, feedback_config.journal, config.replica_name)
        self.lake = Lake(feedback_config.lake.uri, feedback_config.lake)
        self.sealer = Sealer(self.lake, journal_folder)
        self.ledger = SeenFeedback(self.lake, journal_folder)
        capture = feedback_config.capture
        self._redaction = (
            Redaction(Redactor(capture), 2 * capture.redact_timeout_s, lambda ids: self.engine.text.decode(ids))
            if capture.redact
            else None
        )
        self.recorder = Recorder(
            self.journal, self.ledger, self.metrics, self._redaction, self.tracing, config.model_name
        )
        self.sessions = Sessions(self.lake, journal_folder, config.session_days)
        self._unstored = UnstoredResponses(self.recorder)
        self.admission = Admission(config, self.engine, self.journal, lambda: self.unready())
        self.kinds = feedback_config.kinds
        self.openai: Handlers | None = None
        self.variants = CanaryVariants(lambda: self.engine.version)
        """The canary policies of this replica, by which rows are labelled."""
        self.fleet: Fleet | None = None
        """The fleet that this replica is in, if there is one."""
        self.draining = False
        self.failure: Exception | None = None
        """Why the server could not start, or had to stop."""
        self.on_death: Callable[[], None] = lambda: None
        self._sealing = False
        self._following: list[asyncio.Task[None]] = []

    def prepare(self, stopped: Callable[[], bool]) -> None:
        """See ``Engine.prepare``; nothing for an engine that isn't vLLM's. Raises PolicyError too."""
        if self._with_vllm:
            if self.swapper.store.uri is None:  # an object store's client has threads, and the engine is to be forked
                self.swapper.require_policy()
            self.engine.prepare(stopped)

    async def start(self) -> None:
        """Open journal and lake, start the engine. Raises what keeps it from serving, everything closed again."""
        try:
            if self.tracing is not None:
                self.tracing.start()
            await asyncio.to_thread(self.keyring.load)
            self.keyring.check_host(self.config.host)
            if self._redaction is not None:
                await self._redaction.start()
            await asyncio.to_thread(self.lake.create)
            if recovered := await asyncio.to_thread(self.journal.open):
                log.info("recovered %d journal segments", len(recovered))
            await asyncio.to_thread(self.ledger.open)
            self.sealer.start()
            self._sealing = True
            await self.swapper.start()
            if self._with_vllm:
                # vLLM's entrypoints: a quarter of a second, after the engine's own imports.
                from serve.vllm.openai_handlers import Handlers

                self.openai = Handlers(self.engine, self.config.openai, self.config.model_name)
            if self.config.log_format == "json":
                log_format.adopt("vllm")
        except Exception as error:
            self.failure = error
            await self.close()
            raise
        if self.swapper.store.uri is not None:
            self.metrics.watch("policy_store", lambda: {"age_seconds": self.swapper.store.age})
        self.metrics.watch("journal", self.journal.stats)
        self.metrics.watch("keys", self.keyring.stats)
        self.metrics.watch("sealer", self.sealer.stats)
        self.metrics.watch("ledger", self.ledger.stats)
        self.metrics.watch("engine", lambda: self.engine.stats | {"in_flight": self.engine.in_flight})
        self.metrics.policy_version.set(self.engine.version)
        self._following = [
            asyncio.create_task(self._watch_engine(), name="engine watch"),
            asyncio.create_task(self.ledger.follow(), name="ledger"),
            asyncio.create_task(self.keyring.follow(), name="keys"),
            asyncio.create_task(self.refusals.record(), name="refusals"),
        ]
        # A full collection walks the hundreds of thousands of objects that imports left, and holds every stream for
        # half a second. They stay for good: the collector need not look at them again.
        gc.collect()
        gc.freeze()
        log.info("policy %d serves as %s", self.engine.version, self.config.replica_name)

    def give_up(self) -> None:
        """Have ``start`` fail soon: the server is to stop. Safe in a signal handler."""
        self.engine.give_up()

    async def close(self) -> None:
        """Stop the engine, write and seal what was recorded. May be called after a failed start."""
        self.draining = True
        gc.unfreeze()  # or what native modules hold is there when the interpreter ends, and they report it as leaks
        for task in self._following:
            task.cancel()
        await self.swapper.close()
        if self.recorder.tasks:
            await asyncio.wait(self.recorder.tasks, timeout=CUT_OFF_S)
        await self.engine.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        if self._redaction is not None:
            await self._redaction.close()
        await self.sessions.close()
        await asyncio.to_thread(self.journal.close)
        self.ledger.close()
        if self._sealing:
            self._sealing = False
            await asyncio.to_thread(self.sealer.close)

    def recorder_for(self, principal: Principal, *, store: bool) -> Recorder | UnstoredResponses:
        """What records a request's responses. ``store``: what the request says; its key may say no."""
        return self.recorder if self.records(principal, store=store) else self._unstored

    def records(self, principal: Principal, *, store: bool) -> bool:
        """Whether a request's responses are stored."""
        return self.recording and store and principal.capture

    def drawn_for(
        self, request: Request, *, user: str | None, session: str | None, at: datetime
    ) -> Turn | Assignment | None:
        """What an experiment drew for a request for responses, if one runs; ``at``: the time that its rows have."""
        if self.fleet is not None:
            found = self.fleet.assigned(
                request.headers,
                tenant=request.scope["principal"].tenant,
                user=user,
                session=session,
                request=request.scope["request_id"],
                at=at.timestamp(),
            )
            if found is not None:
                return found
        turn = self.swapper.turn
        return turn if turn is not None and turn.drawn else None

    def dead(self) -> str | None:
        """Why only a restart helps, or None."""
        if self.swapper.broken:
            return self.swapper.broken
        return None if self.engine.healthy else "the engine's process has died"

    def unready(self) -> str | None:
        """Why a request would not be served or recorded, or None."""
        if self.draining:
            return "the server is stopping"
        if reason := self.dead():
            return reason
        if not self.swapper.healthy:
            return "the server does not follow the policy store any more"
        return None if self.journal.healthy else "the journal can't record: see the server's log"

    async def _watch_engine(self) -> None:
        while (reason := self.dead()) is None:
            await asyncio.sleep(_WATCH_SECONDS)
        log.critical("%s", reason)
        self.failure = ServerDied(reason)
        self.on_death()

    async def drain(self) -> None:
        """Take nothing more; after ``drain_timeout_s`` abort what is still at work. Cancel it when all has ended."""
        self.draining = True
        await asyncio.sleep(self.config.drain_timeout_s)
        if not self.engine.requests:
            return
        log.warning("still %d requests after drain_timeout_s: aborting them", self.engine.in_flight)
        requests = list(self.engine.requests)
        results = await asyncio.gather(*map(self.engine.abort, requests), return_exceptions=True)
        for request_id, result in zip(requests, results, strict=True):
            if result is not None:
                log.warning("request %s could not be aborted: %s", request_id, result)

    def _observe_swap(self, swap: Swap) -> None:
        self.metrics.swaps.labels(ok=str(swap.ok).lower()).inc()
        if swap.hold_ms:
            self.metrics.hold_seconds.observe(swap.hold_ms / 1e3)
        self.metrics.policy_version.set(self.engine.version)

    def _observe_limit(self, limit: str, principal: Principal) -> None:
        self.metrics.rate_limited.labels(limit=limit, key=principal.key or "none").inc()
