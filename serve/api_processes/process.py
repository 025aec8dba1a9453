"""What every API process has: all that a request for responses meets on its way from the middleware to its rows."""

from __future__ import annotations

import asyncio
import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from starlette.requests import Request

from feedback.config import FeedbackConfig
from feedback.ingest.idempotency import SeenFeedback
from feedback.journal.writer import Journal
from feedback.redaction import Redactor
from serve.admission import ActiveRequests, Admission
from serve.config import ServeConfig
from serve.generation.variant import CanaryVariants
from serve.http import Problem
from serve.middleware.api_keys import ApiKey
from serve.middleware.bodies import Bodies
from serve.middleware.keyring import Keyring, Principal
from serve.middleware.rate_limits import Limiter
from serve.middleware.refusals import Refusals
from serve.observability import log_format
from serve.observability.audit import AuditLog
from serve.observability.metrics import Metrics
from serve.observability.tracing import Tracing
from serve.policies.experiments import Assignment, Experiment, Turn, unit_of
from serve.recorder import Recorder, Redaction, UnstoredResponses
from serve.vllm.engine import Engine

if TYPE_CHECKING:
    from serve.vllm.openai.handlers import Handlers

log = logging.getLogger(__name__)

CUT_OFF_S: Final = 10
"""For requests that were aborted at the end of the drain to record what they have."""


class ApiProcess(ABC):
    """The parts behind the routes for responses, and their life: started, drained, closed."""

    def __init__(
        self,
        config: ServeConfig,
        feedback_config: FeedbackConfig,
        engine: Engine,
        writer: str,
        *,
        ledger: SeenFeedback | None = None,
        active: ActiveRequests | None = None,
        recording: bool = True,
    ) -> None:
        """``writer``: the journal's name; ``ledger``: where feedback is recorded; ``active``: of all processes.

        ``recording``: False if nothing is stored, whoever asks.
        """
        self.config = config
        self.recording = recording
        self.metrics = Metrics()
        self.tracing = Tracing.of(config.traces, "millrace", config.replica_name)
        self.keyring = Keyring(config)
        self.keys_before: tuple[ApiKey, ...] = ()
        """Keys that another process of this server had read."""
        self.refusals = Refusals(
            config.limits.refused_per_minute,
            AuditLog(config.audit),
            lambda reason: self.metrics.auth_failures.labels(reason=reason).inc(),
        )
        self.limiter = Limiter(config.limits.burst_seconds, self._observe_limit)
        self.bodies = Bodies(config.limits.body_bytes, config.limits.bodies)
        self.engine = engine
        self.journal = Journal(Path(feedback_config.journal.folder), feedback_config.journal, writer)
        capture = feedback_config.capture
        self._redaction = (
            Redaction(Redactor(capture), 2 * capture.redact_timeout_s, lambda ids: self.engine.text.decode(ids))
            if capture.redact
            else None
        )
        self.recorder = Recorder(self.journal, ledger, self.metrics, self._redaction, self.tracing, config.model_name)
        self._unstored = UnstoredResponses(self.recorder)
        self.admission = Admission(config, engine, self.journal, lambda: self.unready(), active)
        self.openai: Handlers | None = None
        self.variants = CanaryVariants(lambda: self.engine.version)
        """The canary policies of this replica, by which rows are labelled."""
        room = config.engine.adapters
        self._policy_of_tenant = {} if room is None else dict(room.tenants)
        self.draining = False
        self.failure: Exception | None = None
        """Why the process could not start, or had to stop."""
        self.on_death: Callable[[], None] = lambda: None
        """Called when it has to stop."""
        self.on_listening: Callable[[], None] = lambda: None
        """Called when requests come from now on."""
        self._following: list[asyncio.Task[None]] = []

    @abstractmethod
    def dead(self) -> str | None:
        """Why only a restart helps, or None."""

    @abstractmethod
    def turn(self) -> Turn | None:
        """What of an experiment is served at the moment."""

    @abstractmethod
    def beside(self) -> Experiment | None:
        """The experiment whose two policies both answer here, each its own users."""

    def unready(self) -> str | None:
        """Why a request would not be served or recorded, or None."""
        if self.draining:
            return "the server is stopping"
        if reason := self.dead():
            return reason
        return None if self.journal.healthy else "the journal can't record: see the server's log"

    def give_up(self) -> None:
        """Have the start fail soon: the server is to stop. Safe in a signal handler."""
        self.engine.give_up()

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
        if (experiment := self.beside()) is not None:
            tenant, number = request.scope["principal"].tenant, request.scope["request_id"]
            drawn = experiment.assign(unit_of(tenant, user=user, session=session, request=number), at.timestamp())
            own = tenant in self._policy_of_tenant  # it is none of those that the two share
            return drawn if self.engine.answers(drawn.version) and not own else replace(drawn, counts=False)
        turn = self.turn()
        return turn if turn is not None and turn.drawn else None

    def policy_for(self, tenant: str, drawn: Turn | Assignment | None) -> int | None:
        """The policy that a request is to be answered by, where the engine has several; None: the one that serves.

        Raises Problem 503 if a tenant's own is not there.
        """
        if (own := self._policy_of_tenant.get(tenant)) is not None:
            if not self.engine.answers(own):
                raise Problem(503, f"policy {own}, which answers tenant {tenant!r}, is not loaded", retry_after=5)
            return own
        return drawn.version if isinstance(drawn, Assignment) and drawn.counts else None

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

    async def _open(self) -> None:
        """Begin what stands before the engine. Raises KeyFileError, NeedsKeys, RedactionError."""
        if self.tracing is not None:
            self.tracing.start()
        await asyncio.to_thread(self.keyring.load, self.keys_before)
        self.keyring.check_host(self.config.host)
        if self._redaction is not None:
            await self._redaction.start()

    def _load_handlers(self) -> None:
        # vLLM's entrypoints: a quarter of a second, after the engine's own imports.
        from serve.vllm.openai.handlers import Handlers

        self.openai = Handlers(self.engine, self.config.openai, self.config.model_name)

    def _follow(self, **further: asyncio.Task[None]) -> None:
        """Begin what goes on beside the requests. ``further``: tasks that end with it."""
        if self.config.log_format == "json":
            log_format.adopt("vllm")
        self.metrics.watch("journal", self.journal.stats)
        self.metrics.watch("engine", lambda: self.engine.stats | {"in_flight": self.engine.in_flight})
        self._following = [
            *further.values(),
            asyncio.create_task(self.keyring.follow(), name="keys"),
            asyncio.create_task(self.refusals.record(), name="refusals"),
        ]
        # A full collection walks the hundreds of thousands of objects that imports left, and holds every stream for
        # half a second. They stay for good: the collector need not look at them again.
        gc.collect()
        gc.freeze()

    def _end_following(self) -> None:
        self.draining = True
        gc.unfreeze()  # or what native modules hold is there when the interpreter ends, and they report it as leaks
        for task in self._following:
            task.cancel()

    async def _close(self) -> None:
        """Record what is still at work, let go of the engine, write what was recorded."""
        if self.recorder.tasks:
            await asyncio.wait(self.recorder.tasks, timeout=CUT_OFF_S)
        await self.engine.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        if self._redaction is not None:
            await self._redaction.close()

    def _observe_limit(self, limit: str, principal: Principal) -> None:
        self.metrics.rate_limited.labels(limit=limit, key=principal.key or "none").inc()
