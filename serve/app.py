"""The server: its parts, their life, and the FastAPI application over them.

``create_app`` is the factory; ``run`` serves it with uvicorn until a signal. Nothing that was started outlives it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from feedback.config import FeedbackConfig
from feedback.ingest.idempotency import SeenFeedback, SeenFeedbackError, Verdict
from feedback.ingest.sealer_process import Sealer
from feedback.journal.streams import SoFar, Stream
from feedback.journal.writer import Journal, JournalBroken, JournalFull
from feedback.lake.tables import Lake
from feedback.signals import handled_signals
from serve import http
from serve.api import admin, completions, feedback, generate
from serve.api.fast_routes import Direct
from serve.api.openapi import openapi
from serve.config import ServeConfig
from serve.generation.variant import Trials
from serve.middleware.authentication import Authenticator
from serve.middleware.bodies import Bodies
from serve.middleware.connections import BoundedHttp
from serve.middleware.principals import Keyring, Principal
from serve.middleware.rate_limits import Limiter
from serve.middleware.request_context import Doors
from serve.observability import log_format
from serve.observability.metrics import Metrics
from serve.policies.store import PolicyStore
from serve.swap.swapper import DesiredState, Swap, Swapper
from serve.vllm.engine import Engine, EngineError

if TYPE_CHECKING:
    from serve.fleet.member import Member
    from serve.vllm.openai_handlers import Handlers

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 5.0
_WATCH_SECONDS = 1.0
_NEARLY_FULL = 0.8  # of the journal's queue: past it no work is begun whose rows may find no room
_CUT_OFF_S = 10  # for requests that were aborted at the end of the drain to record what they have


class ServerDied(RuntimeError):
    """The engine died under the server."""


class Server:
    """Everything behind the routes. Paths in both configs are absolute, or relative to the working directory."""

    def __init__(
        self,
        config: ServeConfig,
        feedback_config: FeedbackConfig,
        orders: Callable[[], DesiredState] | None = None,
        engine: Engine | None = None,
    ) -> None:
        """``orders``: what to serve, where that is not the store's pointer alone. ``engine``: in vLLM's place."""
        self.config = config
        self.metrics = Metrics()
        self.keyring = Keyring(config)
        self.limiter = Limiter(config.limits.burst_seconds, self._observe_limit)
        self.bodies = Bodies(config.limits.body_bytes, config.limits.bodies)
        self.engine = engine or Engine(config.engine)
        self._with_vllm = engine is None
        self.swapper = Swapper(
            PolicyStore(Path(config.policies)),
            self.engine,
            config.swap,
            Path(config.replicas) / f"{config.replica_name}.jsonl",
            observe=self._observe_swap,
            desired_state=orders,
            name=config.replica_name,
        )
        self._journal_folder = Path(feedback_config.journal.folder)
        self.journal = Journal(self._journal_folder, feedback_config.journal, config.replica_name)
        self.lake = Lake(feedback_config.lake.uri, feedback_config.lake)
        self.sealer = Sealer(self.lake, self._journal_folder)
        self.ledger = SeenFeedback(self.lake, self._journal_folder)
        self.kinds = feedback_config.kinds
        self.openai: Handlers | None = None
        self.trials = Trials(lambda: self.engine.version)
        """The policies that this replica tried out, by which rows are labelled."""
        self.fleet: Member | None = None
        """This replica's part in its fleet, if there is one."""
        self.draining = False
        self.failure: Exception | None = None
        """Why the server could not start, or had to stop."""
        self.on_death: Callable[[], None] = lambda: None
        self.work: set[asyncio.Task[None]] = set()
        """Tasks that may outlive the request that began them; the journal is closed after them."""
        self._at_work = 0
        self._sealing = False
        self._watch: asyncio.Task[None] | None = None
        self._follow: asyncio.Task[None] | None = None
        self._keys: asyncio.Task[None] | None = None

    # Life

    async def start(self) -> None:
        """Open journal and lake, start the engine. Raises what keeps it from serving, everything closed again."""
        try:
            await asyncio.to_thread(self.keyring.load)
            self.keyring.check_host(self.config.host)
            await asyncio.to_thread(self.lake.create)
            if recovered := await asyncio.to_thread(self.journal.open):
                log.info("recovered %d journal segments", len(recovered))
            await asyncio.to_thread(self.ledger.open)
            self.sealer.start()
            self._sealing = True
            await self.swapper.start()
            self.openai = _openai_handlers(self) if self._with_vllm else None
            if self.config.log_format == "json":
                log_format.adopt("vllm")
        except Exception as error:
            self.failure = error
            await self.close()
            raise
        self.metrics.watch("journal", self.journal.stats)
        self.metrics.watch("keys", self.keyring.stats)
        self.metrics.watch("sealer", self.sealer.stats)
        self.metrics.watch("ledger", self.ledger.stats)
        self.metrics.watch("engine", lambda: self.engine.stats | {"in_flight": self.engine.in_flight})
        self.metrics.policy_version.set(self.engine.version)
        self._watch = asyncio.create_task(self._watch_engine(), name="engine watch")
        self._follow = asyncio.create_task(self.ledger.follow(), name="ledger")
        self._keys = asyncio.create_task(self.keyring.follow(), name="keys")
        # A full collection walks the hundreds of thousands of objects that imports left, and holds every stream for
        # half a second. They stay for good: the collector need not look at them again.
        gc.collect()
        gc.freeze()
        log.info("policy %d serves as %s", self.engine.version, self.config.replica_name)

    async def close(self) -> None:
        """Stop the engine, write and seal what was recorded. May be called after a failed start."""
        self.draining = True
        gc.unfreeze()  # or what native modules hold is there when the interpreter ends, and they report it as leaks
        for task in (self._watch, self._follow, self._keys):
            if task is not None:
                task.cancel()
        await self.swapper.close()
        if self.work:
            await asyncio.wait(self.work, timeout=_CUT_OFF_S)
        await self.engine.close()
        await asyncio.to_thread(self.journal.close)
        self.ledger.close()
        if self._sealing:
            self._sealing = False
            await asyncio.to_thread(self.sealer.close)

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

    def _observe_swap(self, swap: Swap) -> None:
        self.metrics.swaps.labels(ok=str(swap.ok).lower()).inc()
        if swap.hold_ms:
            self.metrics.hold_seconds.observe(swap.hold_ms / 1e3)
        self.metrics.policy_version.set(self.engine.version)

    def _observe_limit(self, limit: str, principal: Principal) -> None:
        self.metrics.rate_limited.labels(limit=limit, key=principal.key or "none").inc()

    # What routes use

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request as at work. Raises Problem 503 when it would be neither served nor recorded."""
        if reason := self.unready():
            raise http.Problem(503, reason, retry_after=_RETRY_AFTER_S)
        if self._at_work >= self.config.limits.concurrent_requests:
            raise http.Problem(503, f"{self._at_work} requests are at work already", retry_after=1)
        # vLLM tells how many wait some times a second; those that came since are known here, if not how many each asks.
        waiting = max(self.engine.stats["waiting"], self._at_work - self.config.engine.max_num_seqs)
        if waiting >= self.config.limits.waiting_responses:
            raise http.Problem(503, f"{waiting:g} responses wait for the engine already", retry_after=1)
        if self.journal.backlog >= _NEARLY_FULL:
            raise http.Problem(503, "the disk doesn't keep up: the journal's queue is nearly full", retry_after=1)
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1

    def abort_later(self, key: str) -> None:
        """End a request in the engine, in a task of its own: whoever calls this may be cancelled at its next await."""
        self.later(self._abort(key))

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something in a task of its own, which the end of the server waits for."""
        task = asyncio.create_task(work)
        self.work.add(task)
        task.add_done_callback(self.work.discard)

    async def _abort(self, key: str) -> None:
        try:
            await self.engine.abort(key)
        except (EngineError, TimeoutError) as error:
            log.warning("request %s could not be aborted: %s", key, error)

    async def record(self, rows: list[dict[str, Any]]) -> None:
        """Return when the interaction rows are on disk. Raises Problem 503 if that can't be."""
        with _recording():
            if len(rows) == 1:
                await self.journal.append("interactions", rows[0])
            else:
                results = await asyncio.gather(
                    *(self.journal.append("interactions", row) for row in rows), return_exceptions=True
                )
                for result in results:
                    if isinstance(result, BaseException):
                        raise result
        self._count(rows)

    async def begin(self, row: dict[str, Any], so_far: SoFar) -> Stream:
        """Return when a response's start is on disk. Raises Problem 503 if that can't be."""
        with _recording():
            return await self.journal.begin(row, so_far)

    def abandon(self, stream: Stream) -> None:
        """Have a response recorded as aborted, if it has not ended; to be called whenever nobody ends it any more."""
        self.journal.abandon(stream)

    async def end(self, streams: list[Stream], rows: list[dict[str, Any]], *, again: bool = False) -> None:
        """Return when the responses' ends are on disk. Raises Problem 503 if that can't be; the journal ends them then.

        ``again``: others of the same prompt have ended before, and its tokens are counted.
        """
        with _recording():
            results = await asyncio.gather(
                *(self.journal.end(stream, row) for stream, row in zip(streams, rows, strict=True)),
                return_exceptions=True,
            )
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        self._count(rows, again=again)

    def _count(self, rows: list[dict[str, Any]], *, again: bool = False) -> None:
        metrics = self.metrics
        metrics.response_tokens.inc(sum(len(row["response_token_ids"]) for row in rows))
        if not again:
            metrics.prompt_tokens.inc(len(rows[0]["prompt_token_ids"]))
            if first_token_ms := rows[0]["timings"]["first_token_ms"]:
                metrics.first_token_seconds.observe(first_token_ms / 1e3)
        for row in rows:
            metrics.responses.labels(status=row["status"]).inc()
            timings, made = row["timings"], len(row["response_token_ids"])
            if made > 1 and timings["first_token_ms"] is not None:
                since_first = timings["total_ms"] - timings["first_token_ms"]
                metrics.inter_token_seconds.observe(max(0.0, since_first) / 1e3 / (made - 1))

    async def record_feedback(self, row: dict[str, Any], *, generated_id: bool) -> Verdict:
        """Return the verdict when it is durable. ``generated_id``: its id is new. Raises Problem 503 if it can't."""
        with _recording():
            return await self.ledger.record(row, self.journal, generated_id=generated_id)


@contextmanager
def _recording() -> Iterator[None]:
    try:
        yield
    except JournalFull as error:
        raise http.Problem(503, str(error), retry_after=error.retry_after) from error
    except (JournalBroken, SeenFeedbackError) as error:
        raise http.Problem(503, str(error), retry_after=_RETRY_AFTER_S) from error


def create_app(
    config: ServeConfig,
    feedback_config: FeedbackConfig,
    orders: Callable[[], DesiredState] | None = None,
    server: Server | None = None,
) -> FastAPI:
    """The application. Its lifespan starts and stops everything; ``app.state.server`` has the parts."""
    server = server or Server(config, feedback_config, orders)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.start()
        try:
            yield
        finally:
            await server.close()

    app = FastAPI(title="Millrace", version="1", lifespan=lifespan)
    app.state.server = server
    http.install(app)
    for module in (generate, completions, feedback, admin):
        app.include_router(module.router)
    app.add_middleware(Direct, handlers={"/generate": generate.generate, "/feedback": feedback.feedback})
    app.add_middleware(
        Doors,
        authenticator=Authenticator(
            server.keyring, config, lambda reason: server.metrics.auth_failures.labels(reason=reason).inc()
        ),
        limiter=server.limiter,
        metrics=server.metrics,
        routes=app.routes,
        access_log=config.access_log,
    )
    app.openapi = lambda: openapi(app)  # type: ignore[method-assign]
    return app


def run(config: ServeConfig, feedback_config: FeedbackConfig, server: Server | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is at work and stop everything. ``server``: instead of a new one.

    Raises what kept the server from starting (PolicyError, EngineError, LakeError, KeyFileError …), OSError if the port
    is taken, NotLoopback where others reach it and no key is needed, ServerDied if the engine died.
    """
    log_format.configure(config.log_format)
    listener = _listen(config.host, config.port)  # before the engine takes its seconds
    server = server or Server(config, feedback_config)
    app = create_app(config, feedback_config, server=server)
    try:
        server.keyring.load()
        server.keyring.check_host(config.host)
    except BaseException:
        listener.close()
        raise
    log.info("%s", server.keyring.describe())
    uvicorn_server = _Uvicorn(
        server,
        uvicorn.Config(
            app,
            loop="uvloop",
            http=BoundedHttp,
            ws="none",  # there is no route for it, and its own protocol would have no bounds
            access_log=False,  # serve.middleware.request_context has a better one
            log_config=None,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(config.drain_timeout_s) + _CUT_OFF_S,
        ),
    )
    # A failed start is raised below; uvicorn would print its traceback before that.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not record.getMessage().startswith("Traceback"))
    try:
        uvicorn_server.run(sockets=[listener])
    except SystemExit:  # uvicorn's way to tell of a failed start
        if server.failure is None:
            raise
    finally:
        listener.close()
    if server.failure is not None:
        raise server.failure


class _Uvicorn(uvicorn.Server):
    """uvicorn that drains: at a signal it finishes the requests at work, within bounds, and returns normally."""

    def __init__(self, server: Server, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._server = server
        server.on_death = self._stop

    def _stop(self) -> None:
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn's, but further signals, which a service manager and a supervisor send too, cut nothing short."""
        self._stop()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn's, but without raising the signal again at the end, which would kill what still cleans up."""
        before = {number: signal.signal(number, self.handle_exit) for number in handled_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, let requests end, cut off those that take too long (their rows say aborted)."""
        self._server.draining = True
        cut_off = asyncio.create_task(self._cut_off())
        try:
            await super().shutdown(sockets)
        finally:
            cut_off.cancel()

    async def _cut_off(self) -> None:
        await asyncio.sleep(self._server.config.drain_timeout_s)
        requests = list(self._server.engine.requests)
        log.warning("still %d requests after drain_timeout_s: aborting them", len(requests))
        for request_id in requests:
            self._server.abort_later(request_id)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        # Not listening yet: until the server can answer, a client is refused at once, and does not wait in a queue.
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"can't listen on {host}:{port}: {error.strerror}") from error
    return listener


def _openai_handlers(server: Server) -> Handlers:
    from serve.vllm.openai_handlers import (
        Handlers,  # vLLM's entrypoints: a quarter of a second, after the engine's imports
    )

    return Handlers(server)
