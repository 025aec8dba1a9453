"""``GET /metrics`` of the scheduler: a small HTTP server in a thread, with the server's own rules of who may ask."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from deploy.config.root import Settings
from deploy.loop import records
from deploy.monitoring.loop import LoopMetrics
from deploy.monitoring.traffic import TrafficReader
from serve.http import Problem
from serve.middleware.authentication import READ, Authenticator, client_of, headers_of
from serve.middleware.connections import BoundedHttp, bind
from serve.middleware.keyring import Keyring, scope_of

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PATH: Final = "/metrics"
_STOP_S: Final = 5.0


@contextmanager
def serving(settings: Settings, *, cycles: bool) -> Iterator[None]:
    """Serve the loop's metrics within, if ``schedule.metrics.port`` says where.

    Raises OSError if the port is taken, NeedsKeys where others reach it and no key is needed, KeyFileError.
    """
    config = settings.schedule.metrics
    if config.port is None:
        yield
        return
    listener = bind(config.host, config.port)
    try:
        serve_config = settings.resolved().serve.model_copy(update={"host": config.host})
        keyring = Keyring(serve_config)
        keyring.load()
        keyring.check_host(config.host, "schedule.metrics.host")
        traffic, registry = TrafficReader(settings), CollectorRegistry()
        registry.register(LoopMetrics(settings, traffic, records.now(), cycles=cycles))
        server = uvicorn.Server(
            uvicorn.Config(
                MetricsApp(registry, keyring, Authenticator(keyring, serve_config)),
                http=BoundedHttp,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                forwarded_allow_ips=serve_config.proxies,
                timeout_graceful_shutdown=1,
            )
        )
        thread = threading.Thread(target=server.run, args=([listener],), name="metrics", daemon=True)
        traffic.start()
        listener.listen()  # who asks before the thread is at it waits, and is not refused
        thread.start()
        try:
            yield
        finally:
            server.should_exit = True
            traffic.stop()
            thread.join(_STOP_S)
    finally:
        listener.close()


class MetricsApp:
    """The ASGI application: one route."""

    def __init__(self, registry: CollectorRegistry, keyring: Keyring, authenticator: Authenticator) -> None:
        self._registry = registry
        self._keyring = keyring
        self._authenticator = authenticator
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        path: str = scope["path"]
        try:
            await asyncio.to_thread(self._keyring.refresh)
            self._authenticator.authenticate(scope_of(path), headers_of(scope, READ), client_of(scope))
            if path != _PATH:
                raise Problem(404, f"there is only {_PATH} here")
            if scope["method"] not in ("GET", "HEAD"):
                raise Problem(405, f"{_PATH} is read by GET", headers={"Allow": "GET, HEAD"})
            async with self._turn:  # what it reads is kept between scrapes, for one at a time
                text = await asyncio.to_thread(generate_latest, self._registry)
        except Problem as problem:
            return await problem.response(path)(scope, receive, send)
        await PlainTextResponse(text, media_type=CONTENT_TYPE)(scope, receive, send)
