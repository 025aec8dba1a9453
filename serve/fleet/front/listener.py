"""What a replica listens by for its fleet's front: a socket of its own, with the application that Ray Serve has too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.app import uvicorn_config
from serve.config import ServeConfig
from serve.fleet.front.configuration import CHECK, CHECK_S, IDLE_S, socket_of
from serve.fleet.front.process import secret_of

_LOOK_S: Final = 0.02


class Listener:
    """Serves an application on the socket of a replica's place. It answers the front's checks itself."""

    def __init__(
        self, app: ASGIApp, config: ServeConfig, folder: Path, place: int, unready: Callable[[], str | None]
    ) -> None:
        """``folder``: the front's; ``unready``: why the replica is not to get requests, or None."""
        self._app = app
        self._unready = unready
        self._path = socket_of(folder, place)
        self._leaving = False
        self._server = _Uvicorn(
            uvicorn_config(
                self._answer,
                config,
                front=secret_of(folder),
                uds=str(self._path),
                interface="asgi3",
                lifespan="off",
                log_level="warning",  # it would say how to stop it, which is not for people here
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=int(config.limits.timeout_s) + 1,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when it listens. Raises OSError if it can't."""
        self._task = asyncio.create_task(self._server.serve(), name="listener")
        while not self._server.started:
            await asyncio.wait([self._task], timeout=_LOOK_S)
            if self._task.done():
                self._task.result()
        self._path.chmod(0o600)

    def dead(self) -> str | None:
        """Why it does not serve any more, though nobody has closed it."""
        if self._task is None or not self._task.done() or self._leaving:
            return None
        return f"its listener has ended: {self._task.exception()!r}"

    async def close(self, *, at_once: bool) -> None:
        """Get no more requests, and return when those at work are answered; none takes longer than its limit.

        at_once: the front has ended, or need not see it first.
        """
        self._leaving = True
        if self._task is None:
            return
        if not at_once:
            await asyncio.sleep(2 * CHECK_S)
        self._server.should_exit = True
        await asyncio.wait([self._task])
        self._path.unlink(missing_ok=True)

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
