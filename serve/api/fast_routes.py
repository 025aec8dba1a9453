"""The short way to the routes that clients ask all the time.

Between a request and its handler FastAPI has four layers of middleware, a match against every route and the resolution
of dependencies, which together take longer than the handler. The routes here need none of it: they read the body
themselves, and fail with a Problem. FastAPI knows them too, for its OpenAPI page and for requests with another method.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.http import CLIENT_CLOSED_REQUEST

Handler = Callable[[Request], Awaitable[Response]]


class Direct:
    """ASGI middleware, the innermost: POST requests to these paths go to their handlers, all others on to ``app``."""

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler]) -> None:
        self.app = app
        self.handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. A Problem is for ``serve.middleware.request_context`` to tell."""
        handler = self.handlers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if handler is None:
            return await self.app(scope, receive, send)
        try:
            response = await handler(Request(scope, receive, send))
        except ClientDisconnect:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)  # for the metrics; nobody reads it
        await response(scope, receive, send)
