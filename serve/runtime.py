"""The server's parts and their life: start, drain, stop. Nothing that was started outlives it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

from starlette.requests import Request

from feedback.config import FeedbackConfig
from feedback.ingest.idempotency import SeenFeedback
from feedback.ingest.sealer_process import Sealer
from feedback.lake.tables import Lake
from serve.api_processes.first import FurtherProcesses
from serve.api_processes.further import Serving
from serve.api_processes.process import ApiProcess
from serve.api_processes.summed_metrics import summed
from serve.config import FleetConfig, ServeConfig
from serve.engine import EngineError
from serve.policies.experiments import Assignment, Experiment, Turn
from serve.policies.open_store import open_store
from serve.reading.sessions import Sessions
from serve.swap.sleep import Sleeper
from serve.swap.swapper import DesiredState, Swap, Swapper
from serve.vllm.engine import Engine, EngineClient

log = logging.getLogger(__name__)

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


def replicas_here(fleet: FleetConfig) -> int:
    """How many replicas share this machine's memory, at least."""
    return 1 if fleet.ray_address is not None else fleet.least_replicas


class Server(ApiProcess):
    """The parts behind the routes. Paths in both configs are absolute, or relative to the working directory."""

    def __init__(
        self,
        config: ServeConfig,
        feedback_config: FeedbackConfig,
        desired_state: Callable[[], DesiredState] | None = None,
        engine: Engine | None = None,
        further: FurtherProcesses | None = None,
        *,
        recording: bool = True,
    ) -> None:
        """``desired_state``: what to serve, if not what the store's pointer says. ``engine``: in place of vLLM's.

        ``further``: the API processes beside this one. ``recording``: False if nothing is stored, whoever asks.
        """
        journal_folder = Path(feedback_config.journal.folder)
        self.lake = Lake(feedback_config.lake.uri, feedback_config.lake)
        self.sealer = Sealer(self.lake, journal_folder)
        self.ledger = SeenFeedback(self.lake, journal_folder)
        super().__init__(
            config,
            feedback_config,
            engine
            or Engine(config.engine, config.swap, replicas_here(config.fleet), sleeps=bool(config.sleep.allowed)),
            config.replica_name,
            ledger=self.ledger,
            active=None if further is None else further.active,
            recording=recording,
        )
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
        self.sleeper = Sleeper(self.engine, self.swapper, self.admission, config.sleep)
        self.sessions = Sessions(self.lake, journal_folder, config.session_days)
        self.kinds = feedback_config.kinds
        self.fleet: Fleet | None = None
        """The fleet that this replica is in, if there is one."""
        self.further = further
        self._sealing = False
        if further is not None:
            self.engine.further = further
            self.engine.on_load = lambda: further.tell("serve", self._serving())
            self.swapper.agree = lambda: further.agree(self._serving())
            further.on_loss = self._lost
            further.keys = lambda: self.keyring.keys
            further.policy = lambda: self.swapper.policy.path
            self.on_listening = further.begin_to_listen

    def prepare(self, stopped: Callable[[], bool]) -> None:
        """See ``Engine.prepare``; nothing for an engine that isn't vLLM's. Raises PolicyError too."""
        if self._with_vllm:
            if self.swapper.store.uri is None:  # an object store's client has threads, and the engine is to be forked
                self.swapper.require_policy()
            self.engine.prepare(stopped)

    async def start(self) -> None:
        """Open journal and lake, start the engine. Raises what keeps it from serving, everything closed again."""
        try:
            await self._open()
            await asyncio.to_thread(self.lake.create)
            if recovered := await asyncio.to_thread(self.journal.open):
                log.info("recovered %d journal segments", len(recovered))
            await asyncio.to_thread(self.ledger.open)
            self.sealer.start()
            self._sealing = True
            if self.further is not None:
                await self.further.open(self.limiter, self._serving, self._news)
            await self.swapper.start()
            if self._with_vllm:
                self._load_handlers()
            if self.further is not None:
                await self.further.prepare()
        except Exception as error:
            self.failure = error
            await self.close()
            raise
        if self.swapper.store.uri is not None:
            self.metrics.watch("policy_store", lambda: {"age_seconds": self.swapper.store.age})
        self.metrics.watch("sleep", self._sleep_numbers)
        self.metrics.watch("swap", lambda: {"in_place": float(self.swapper.way["in_place"])})
        self.metrics.watch("keys", self.keyring.stats)
        self.metrics.watch("sealer", self.sealer.stats)
        self.metrics.watch("ledger", self.ledger.stats)
        self.metrics.policy_version.set(self.engine.version)
        self._follow(
            engine=asyncio.create_task(self._watch_engine(), name="engine watch"),
            ledger=asyncio.create_task(self.ledger.follow(), name="ledger"),
        )
        log.info("policy %d serves as %s", self.engine.version, self.config.replica_name)

    async def close(self) -> None:
        """Stop the engine, write and seal what was recorded. May be called after a failed start."""
        await self.end_further()
        self._end_following()
        await self.sleeper.close()
        await self.swapper.close()
        await self._close()
        await self.sessions.close()
        await asyncio.to_thread(self.journal.close)
        await asyncio.to_thread(self.ledger.close)
        if self._sealing:
            self._sealing = False
            await asyncio.to_thread(self.sealer.close)

    async def end_further(self) -> None:
        """Return when the further API processes have ended, whose requests this one answers too."""
        if self.further is not None:
            await self.further.close()

    async def drain(self) -> None:
        """As ``ApiProcess.drain``, in all API processes."""
        if self.further is not None:
            self.further.stop(engine_died=not self.engine.healthy)
        await super().drain()

    def drawn_for(
        self, request: Request, *, user: str | None, session: str | None, at: datetime
    ) -> Turn | Assignment | None:
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
        return super().drawn_for(request, user=user, session=session, at=at)

    def turn(self) -> Turn | None:
        return self.swapper.turn

    def beside(self) -> Experiment | None:
        return self.swapper.beside

    def dead(self) -> str | None:
        if broken := self.swapper.broken or self.sleeper.broken:
            return broken
        if self.journal.ended:
            return "the journal's thread has ended"
        return None if self.engine.healthy else "the engine's process has died"

    def unready(self) -> str | None:
        reason = super().unready()
        if reason is None and not self.swapper.healthy:
            return "the server does not follow the policy store any more"
        return reason

    async def render_metrics(self) -> bytes:
        """The Prometheus text; in a fleet of all replicas, else of all API processes."""
        render = self.metrics.render if self.fleet is None else self.fleet.metrics
        text = await asyncio.to_thread(render)  # some milliseconds, in which tokens would wait
        if self.further is None:
            return text
        living, ended = await self.further.metrics()
        return await asyncio.to_thread(summed, [text, *living], ended)

    async def _watch_engine(self) -> None:
        while (reason := self.dead()) is None:
            await asyncio.sleep(_WATCH_SECONDS)
        self._end(reason)

    def _end(self, reason: str) -> None:
        log.critical("%s", reason)
        if self.further is not None and not self.engine.healthy:
            self.further.stop(engine_died=True)  # they may be at their last requests already, and would wait for it
        self.failure = self.failure or ServerDied(reason)
        self.on_death()

    def _serving(self) -> Serving:
        engine, swapper = self.engine, self.swapper
        return Serving(engine.version, dict(engine.loaded), engine.making_way, swapper.turn, swapper.beside)

    def _news(self) -> tuple[dict[str, float], str | None]:
        """The engine's numbers, of all processes' requests, and why none would be served."""
        stats = {
            name: value for name, value in self.engine.stats.items() if name != "preemptions"
        }  # each counts its own
        return stats, self.unready()

    def _lost(self, client: EngineClient, how: str, replaced: bool) -> None:
        """A further API process has ended: its requests end in the engine, and then the server, unless ``replaced``."""
        self.recorder.spawn(self._abandon(client), f"abort what API process {client.index} had requested")
        if replaced:
            log.error("API process %d %s; another one is started in its place", client.index, how)
        else:
            self._end(f"API process {client.index} {how}; the others finish what they have, and the server ends")

    async def _abandon(self, client: EngineClient) -> None:
        try:
            ended = await self.engine.abandon(client)
        except (EngineError, TimeoutError) as error:
            log.error("requests of API process %d go on in the engine until that ends: %s", client.index, error)
        else:
            log.warning("%d requests of API process %d were ended in the engine", ended, client.index)

    def _sleep_numbers(self) -> dict[str, float]:
        return {"asleep": float(self.sleeper.state != "awake"), "waiting": self.admission.waiting}

    def _observe_swap(self, swap: Swap) -> None:
        self.metrics.swaps.labels(ok=str(swap.ok).lower()).inc()
        if swap.hold_ms:
            self.metrics.hold_seconds.observe(swap.hold_ms / 1e3)
        self.metrics.policy_version.set(self.engine.version)
