"""What a replica listens by for its fleet's front: a socket of its own, with the application that Ray Serve has too."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from feedback.files import open_lock, try_lock
from serve.app import uvicorn_config
from serve.config import ServeConfig
from serve.fleet.front.configuration import CHECK, CHECK_S, IDLE_S, socket_of
from serve.fleet.front.process import secret_of

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.02
_FREE_S: Final = 1.0  # between two looks for a place


class Listener:
    """Serves an application on the socket of a replica's place. It answers the front's checks itself.

    A place is taken by the lock on its file, so it is free when its holder dies, however that happens.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServeConfig,
        folder: Path,
        places: Iterable[int],
        unready: Callable[[], str | None],
    ) -> None:
        """``folder``: the front's; ``places``: from which to take the first free one; ``unready``: why the replica is
        not to get requests, or None."""
        self._app, self._config, self._folder = app, config, folder
        self._places = list(places)
        self._unready = unready
        self._leaving = False
        self._lock = -1
        self._path: Path | None = None
        self._server: _Uvicorn | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when it listens, or waits for a place, of which the log tells. Raises OSError if it can't."""
        if self._take_place():
            await self._listen()
            return
        log.warning(
            "%s gets no requests before one of the %d places at the front is free, which replicas have that end",
            self._config.replica_name,
            len(self._places),
        )
        self._waiting = asyncio.create_task(self._wait(), name="wait for a place at the front")

    def _take_place(self) -> bool:
        for place in self._places:
            path = socket_of(self._folder, place)
            lock = open_lock(path.with_suffix(".lock"))
            if try_lock(lock):
                self._lock, self._path = lock, path
                return True
            os.close(lock)
        return False

    async def _wait(self) -> None:
        while not self._take_place():
            await asyncio.sleep(_FREE_S)
        log.info("%s has a place at the front", self._config.replica_name)
        await self._listen()

    async def _listen(self) -> None:
        assert self._path is not None
        self._server = _Uvicorn(
            uvicorn_config(
                self._answer,
                self._config,
                front=secret_of(self._folder),
                uds=str(self._path),
                interface="asgi3",
                lifespan="off",
                log_level="warning",  # it would say how to stop it, which is not for people here
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=int(self._config.limits.timeout_s) + 1,
            )
        )
        self._task = asyncio.create_task(self._server.serve(), name="listener")
        while not self._server.started:
            await asyncio.wait([self._task], timeout=_LOOK_S)
            if self._task.done():
                self._task.result()
        self._path.chmod(0o600)

    def dead(self) -> str | None:
        """Why it does not serve any more, though nobody has closed it."""
        if self._leaving:
            return None
        if self._waiting is not None and self._waiting.done() and (error := self._waiting.exception()) is not None:
            return f"it can't listen: {error!r}"
        if self._task is None or not self._task.done():
            return None
        return f"its listener has ended: {self._task.exception()!r}"

    async def close(self, *, at_once: bool) -> None:
        """Get no more requests, and return when those at work are answered; none takes longer than its limit.

        at_once: the front has ended, or need not see it first.
        """
        self._leaving = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.cancel()
            await asyncio.wait([self._waiting])
        if self._task is not None:
            assert self._server is not None
            assert self._path is not None
            if not at_once:
                await asyncio.sleep(2 * CHECK_S)
            self._server.should_exit = True
            await asyncio.wait([self._task])
            self._path.unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != CHECK:
            return await self._app(scope, receive, send)
        status = 503 if self._leaving or self._unready() is not None else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


class _Uvicorn(uvicorn.Server):
    """uvicorn in a process whose signals are another's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
