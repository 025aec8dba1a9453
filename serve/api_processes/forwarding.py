"""An HTTP request that one API process has accepted and another one answers: ASGI over a link.

The body comes when the application there reads it, and each part of the answer is waited for until it has gone out. So
bounds on both are as in one process, and so are streams, clients that leave, and the client's address.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api_processes.link import CallFailed, Handler, Link, LinkBroken
from serve.middleware.connections import USER

_SCOPE: Final = (
    *("type", "asgi", "http_version", "server", "client", "scheme", "method"),
    *("root_path", "path", "raw_path", "query_string", "headers", USER),
)


class Forward:
    """ASGI middleware of a process that accepts: all paths but its own are answered by the process behind the link."""

    def __init__(self, app: ASGIApp, own: Collection[str], requests: ForwardedRequests) -> None:
        self.app = app
        self._own = own
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._own:
            return await self.app(scope, receive, send)
        await self._requests.answer(scope, receive, send)


class ForwardedRequests:
    """The requests that wait for their answer from the other process."""

    def __init__(self, link: Callable[[], Link]) -> None:
        self._link = link
        self._numbers = itertools.count()
        self._open: dict[int, tuple[Receive, Send]] = {}

    @property
    def handlers(self) -> dict[str, Handler]:
        """What the other process calls."""
        return {"receive": self._receive, "send": self._send}

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a request answered. What fails once the answer has begun ends the connection: it raises then."""
        number, began = next(self._numbers), False

        async def answer(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        self._open[number] = receive, answer
        try:
            await self._link().call("request", number, {name: scope[name] for name in _SCOPE if name in scope})
        except (LinkBroken, CallFailed):
            if began:
                raise
            headers = [(b"content-type", b"application/problem+json"), (b"retry-after", b"5")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            body = b'{"type":"about:blank","title":"Not available","status":503,"detail":"the server is stopping"}'
            await send({"type": "http.response.body", "body": body})
        finally:
            del self._open[number]

    async def _receive(self, number: int) -> Message:
        return await self._open[number][0]()

    async def _send(self, number: int, message: Message) -> None:
        await self._open[number][1](message)


async def serve_forwarded(app: ASGIApp, link: Link, number: int, scope: dict[str, Any]) -> None:
    """Answer the request ``number`` of the process behind the link."""

    async def receive() -> Message:
        message: Message = await link.call("receive", number)
        return message

    async def send(message: Message) -> None:
        await link.call("send", number, message)

    await app(scope, receive, send)
