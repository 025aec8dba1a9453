"""The FastAPI application over a server's parts, and uvicorn around it.

``create_app`` is the factory; ``run`` serves it until a signal.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.types import ASGIApp

from feedback.config import FeedbackConfig
from feedback.files import LockTimeoutError, locked, make_folder
from feedback.processes.exit import end_process, end_with_parent, skip_teardown
from feedback.processes.signals import handled_by, handled_signals
from feedback.trusted_code import consent_to
from serve import http
from serve.api import admin, completions, documentation, experiments, feedback, generate
from serve.api.fast_routes import Direct
from serve.api.openapi import openapi
from serve.api_processes.first import FurtherProcesses
from serve.api_processes.forwarding import Forward
from serve.api_processes.further import Beginning, FurtherProcess
from serve.api_processes.process import CUT_OFF_S, ApiProcess
from serve.config import ServeConfig
from serve.middleware.authentication import Authenticator
from serve.middleware.connections import KEEP_ALIVE_S, BoundedHttp, bind, connections_at_most
from serve.middleware.keyring import CONSOLE
from serve.middleware.request_context import RESPONSES, RequestContext
from serve.observability import log_format
from serve.policies.records import now
from serve.policies.store import Pointer
from serve.runtime import Server, ServerDied
from serve.swap.swapper import DesiredState

log = logging.getLogger(__name__)

Console = Callable[[Server, Authenticator], Starlette]
"""Makes the application of the pages below /console, which let in by ``Authenticator.session``."""


class NameTaken(RuntimeError):
    """Another server of this home has the name."""


def create_app(
    config: ServeConfig,
    feedback_config: FeedbackConfig,
    desired_state: Callable[[], DesiredState] | None = None,
    server: Server | None = None,
    console: Console | None = None,
) -> FastAPI:
    """The application. Its lifespan starts and stops everything; ``app.state.server`` has the parts."""
    server = server or Server(config, feedback_config, desired_state)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with AsyncExitStack() as stack:
                await server.start()
                stack.push_async_callback(server.close)
                if pages is not None:
                    await stack.enter_async_context(pages.router.lifespan_context(pages))
                stack.push_async_callback(server.end_further)
                yield
        except BaseException as error:  # whatever it is: uvicorn says no more than that there was something
            server.failure = server.failure or _failure(error)
            raise

    # No redirect of a path with a slash too many: it would lead to whatever host a request names.
    app = FastAPI(
        title="Millrace", version="1", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.server = server
    http.install(app)
    for module in (generate, completions, feedback, admin, experiments):
        app.include_router(module.router)
    documentation.install(app, console=console is not None)
    authenticator = Authenticator(server.keyring, config, server.refusals)
    pages = None if console is None else console(server, authenticator)
    if pages is not None:
        app.mount(CONSOLE, pages)
    app.add_middleware(Direct, handlers={"/generate": generate.generate, "/feedback": feedback.feedback})
    _add_context(app, server, authenticator)
    app.openapi = lambda: openapi(app)  # type: ignore[method-assign]
    if server.further is not None:
        server.further.app = app
    return app


def create_further_app(process: FurtherProcess) -> FastAPI:
    """The application of a further API process: it answers requests for responses, and hands on all others."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await process.start()
            try:
                yield
            finally:
                await process.close()
        except BaseException as error:
            process.failure = process.failure or _failure(error)
            raise

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.server = process
    http.install(app)
    for module in (generate, completions):
        app.include_router(module.router)
    app.add_middleware(Direct, handlers={"/generate": generate.generate})
    _add_context(app, process, Authenticator(process.keyring, process.config, process.refusals))
    app.add_middleware(Forward, own=RESPONSES, requests=process.forwarded)
    return app


def _add_context(app: FastAPI, process: ApiProcess, authenticator: Authenticator) -> None:
    app.add_middleware(
        RequestContext,
        authenticator=authenticator,
        limiter=process.limiter,
        metrics=process.metrics,
        routes=app.routes,
        access_log=process.config.access_log,
        tracing=process.tracing,
    )


def _failure(error: BaseException) -> Exception:
    """What ``run`` raises of it; what is no Exception would be taken for the end of a task or of Python."""
    if isinstance(error, Exception):
        return error
    log.error("the server was broken off", exc_info=error)
    return ServerDied(f"its start or its end was broken off by {error!r}; the lines before this one say where")


def run(
    config: ServeConfig,
    feedback_config: FeedbackConfig,
    server: Server | None = None,
    console: Console | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is at work and stop everything. ``server``: instead of a new one.

    Raises what kept the server from starting (PolicyError, EngineError, LakeError, KeyFileError …), OSError if the port
    is taken, NameTaken if a server of this name runs in this home, NeedsKeys where others reach it and no key is
    needed, ServerDied if the engine died, and whatever kept it from ending in order.
    """
    log_format.configure(config.log_format)
    with _held_name(config) if server is None or server.recording else nullcontext():
        _run(config, feedback_config, server, console)


@contextmanager
def _held_name(config: ServeConfig) -> Iterator[None]:
    """Hold the server's name in its home: rows, metrics and the record of swaps go by it. Raises NameTaken."""
    folder = Path(config.replicas)
    make_folder(folder)
    path = folder / f"{config.replica_name}.running"
    with ExitStack() as held:
        try:
            held.enter_context(locked(path, 0))
        except LockTimeoutError:
            raise NameTaken(
                f"{config.replica_name} of this home runs already, {path.read_text() or 'and is just starting'}: stop "
                "it, or give this server a name of its own, such as --serve.replica_name second"
            ) from None
        path.write_text(f"as process {os.getpid()} at {config.host}:{config.port}")
        yield


def _run(config: ServeConfig, feedback_config: FeedbackConfig, server: Server | None, console: Console | None) -> None:
    several = server is None and config.api_processes > 1
    listener = bind(config.host, config.port, "begin" if several else "no")  # before the engine takes its seconds
    if server is None:
        further = None
        if several:
            further = FurtherProcesses(config, feedback_config, listener.getsockname()[1], run_further)
        server = Server(config, feedback_config, further=further)
    app = create_app(config, feedback_config, server=server, console=console)
    stopping: list[int] = []
    try:
        server.keyring.load()
        server.keyring.check_host(config.host)
        log.info("%s", server.keyring.describe())
        log.info("importing vLLM, which takes some ten seconds")
        with handled_by(lambda number, _: stopping.append(number), handled_signals()):
            server.prepare(lambda: bool(stopping))
    except BaseException:
        _discard(server, listener)
        raise
    if stopping:
        _discard(server, listener)
        skip_teardown("vLLM's imports may still run")
        return
    uvicorn_server = _Uvicorn(server, app)
    _serve(uvicorn_server, server, listener)
    # All is written and sealed by now. Taking vLLM down takes seconds on a busy machine, and changes nothing.
    skip_teardown("the server has ended in order")
    if uvicorn_server.stopped_early:
        log.info("stopped by a signal before it was ready: nobody has been answered")
    elif server.failure is not None:
        raise server.failure


def _discard(server: Server, listener: socket.socket) -> None:
    listener.close()
    if server.further is not None:
        server.further.discard()


def _serve(uvicorn_server: _Uvicorn, process: ApiProcess, listener: socket.socket) -> None:
    """Serve until the end; what it failed by is the process's ``failure``."""
    # A failed start is raised by the caller; uvicorn would print its traceback before that.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not record.getMessage().startswith("Traceback"))
    try:
        uvicorn_server.run(sockets=[listener])
    except SystemExit:  # uvicorn's way to tell of a failed start
        if process.failure is None:
            raise
    finally:
        listener.close()


def run_further(beginning: Beginning) -> None:
    """A further API process, from its start to its end."""
    end_with_parent(beginning.parent)
    config = beginning.config
    log_format.configure(config.log_format)
    consent_to(beginning.trusted_code)
    process = FurtherProcess(beginning)
    _serve(_Uvicorn(process, create_further_app(process)), process, bind(config.host, beginning.port, "join"))
    if process.failure is not None:
        log.error("an API process ends: %s", process.failure)
    skip_teardown("all that was recorded is written")
    end_process(0 if process.failure is None else 1)


def run_policy(config: ServeConfig, feedback_config: FeedbackConfig, version: int) -> None:
    """Serve one policy, whatever the store's pointer says, as ``run`` does; nothing of it is recorded.

    For evaluation: no experiment reaches it, and that it serves is not put on record. Journal and lake, which stay
    empty, are in a temporary folder. Raises PolicyError too, if there is no such policy.
    """
    config = config.model_copy(update={"api_processes": 1})
    pointer = Pointer(version, None, now(), config.replica_name, "evaluation", None, generation=1)
    with tempfile.TemporaryDirectory(prefix="millrace-serve-") as folder:
        journal = feedback_config.journal.model_copy(update={"folder": f"{folder}/journal"})
        lake = feedback_config.lake.model_copy(update={"uri": f"{folder}/lake", "storage_options": {}})
        capture = feedback_config.capture.model_copy(update={"redact": []})
        unused = feedback_config.model_copy(update={"journal": journal, "lake": lake, "capture": capture})
        run(config, unused, Server(config, unused, lambda: DesiredState(pointer), recording=False))


def uvicorn_config(app: ASGIApp, config: ServeConfig, front: bytes | None = None, **options: Any) -> uvicorn.Config:
    """How uvicorn serves an application of ours. ``front``: as ``BoundedHttp.believe``'s. Sets this process's files."""
    http = BoundedHttp.believing(config.sso, front)
    http.most = connections_at_most()
    settings: dict[str, Any] = {
        "http": http,
        "ws": "none",  # there is no route for it, and its own protocol would have no bounds
        "access_log": False,  # serve.middleware.request_context has a better one
        "log_config": None,
        "server_header": False,
        "forwarded_allow_ips": config.proxies,
        "timeout_keep_alive": KEEP_ALIVE_S,
    }
    return uvicorn.Config(app, **settings | options)


class _Uvicorn(uvicorn.Server):
    """uvicorn that drains: at a signal it finishes the requests at work, within bounds, and returns normally."""

    def __init__(self, server: ApiProcess, app: FastAPI) -> None:
        config = server.config
        graceful = int(config.drain_timeout_s) + CUT_OFF_S
        super().__init__(uvicorn_config(app, config, loop="uvloop", timeout_graceful_shutdown=graceful))
        self._server = server
        self.stopped_early = False
        """A signal came before the server was ready; what then kept it from starting is no failure."""
        server.on_death = self._stop

    def _stop(self) -> None:
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn's, but further signals, which a service manager and a supervisor send too, cut nothing short.

        A server that is not ready yet has nothing to finish: its engine is not waited for.
        """
        self._stop()
        if not self.started:
            self.stopped_early = True
            self._server.give_up()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn's, but without raising the signal again at the end, which would kill what still cleans up."""
        with handled_by(self.handle_exit, handled_signals()):
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; the process then knows that requests come."""
        await super().startup(sockets)
        if self.started:
            self._server.on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, let requests end, cut off those that take too long (their rows say aborted)."""
        drain = asyncio.create_task(self._server.drain())
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()
