"""What Ray Serve's proxies do themselves: read bodies, and answer where no replica does. Imports no torch and no vLLM.

Behind a front of our own (``serve.fleet.front``) they get requests only while it matters which replica answers.

While an experiment runs, they also find out whom a request is drawn for (``serve.fleet.assignment``).

A body is read here, whole, before its request takes a place in a replica: Ray Serve would have it read from there. So
its sender is authenticated here first; a replica does it again, also for requests without a body. A proxy answers in
place of a replica when there is none, when all queues are full, and when a replica dies with the request. All of these
are 503: the request was not answered, and may be sent again.
"""

from __future__ import annotations

import logging
import os
from typing import Final

import uvicorn
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.config import SsoConfig
from serve.fleet.assignment import routed
from serve.fleet.front.process import folder_of_front, secret_of
from serve.fleet.proxy_state import body_reader, experiment, has_body, has_no_replica
from serve.http import Problem
from serve.middleware.connections import BoundedHttp
from serve.observability import log_format

log = logging.getLogger(__name__)

SSO: Final = "MILLRACE_SSO"
"""The environment's variable with ``serve.sso`` for the proxies, which connect before they have the settings."""
_OWN_PATHS: Final = ("/-/healthz", "/-/routes")  # Ray Serve's
_PLAIN = b"text/plain"
_ID = b"x-request-id"
_RETRY_AFTER_S = 2.0


def middlewares() -> list[Middleware]:
    """What Ray Serve puts around its proxies (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH), before they listen."""
    bound_connections()
    return [Middleware(Explained)]


def bound_connections() -> None:
    """Have the uvicorn that Ray Serve starts in this process use our protocol, and no websockets.

    Ray Serve makes its uvicorn.Config without saying which (``ray.serve._private.http_util.start_asgi_http_server``),
    and takes none from outside, so "auto" means ours here. Raises RuntimeError if uvicorn takes its protocols from
    elsewhere.
    """
    folder = folder_of_front()
    front = None if folder is None else secret_of(folder)
    BoundedHttp.believe(SsoConfig.model_validate_json(os.environ.get(SSO, "{}")), front)
    uvicorn.config.HTTP_PROTOCOLS["auto"] = "serve.middleware.connections:BoundedHttp"
    uvicorn.config.WS_PROTOCOLS["auto"] = None
    loaded = uvicorn.Config(lambda: None, factory=True, lifespan="off", log_config=None)  # as Ray Serve makes it
    loaded.load()
    if (loaded.http_protocol_class, loaded.ws_protocol_class) != (BoundedHttp, None):
        raise RuntimeError(f"uvicorn {uvicorn.__version__} takes its protocols from elsewhere: see bound_connections")


class Explained:
    """ASGI middleware. An answer of a replica passes as it is; its errors are JSON, a proxy's are plain text."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OWN_PATHS:
            return await self.app(scope, receive, send)
        if has_no_replica():  # Ray Serve would have the request wait until there is one
            return await _answer(_absent("no replica is there at the moment; ask again"), scope, receive, send)
        if (reader := body_reader()) is None:
            if has_body(scope):  # Ray Serve would read it without a bound
                return await _answer(_absent("the proxy is starting; ask again"), scope, receive, send)
        else:
            try:
                body, tenant = await reader.read(scope, receive)
                scope = await routed(scope, body, tenant, experiment())
                receive = _again(body, receive)
            except Problem as problem:
                return await _answer(problem, scope, receive, send)
            except ClientDisconnect:
                return None
        started = replaced = gone = False

        async def watched() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or message["type"] == "http.disconnect"
            return message

        async def explained(message: Message) -> None:
            nonlocal started, replaced
            if message["type"] == "http.response.start":
                started = True
                if message["status"] >= 400 and _is_plain(message):
                    replaced = True
                    busy = _absent("no replica takes requests at the moment; ask again")
                    return await _answer(busy, scope, receive, send)
                _drop_second_id(message)
            elif replaced:
                return None
            await send(message)

        await self.app(scope, watched, explained)
        if not started and not gone:
            log.warning("%s %s: its replica ended before it answered", scope["method"], log_format.path(scope["path"]))
            ended = _absent("the replica that had the request has ended; ask again")
            await _answer(ended, scope, receive, send)


def _again(body: bytes, receive: Receive) -> Receive:
    """``receive``, from before the body."""
    unread = True

    async def again() -> Message:
        nonlocal unread
        if unread:
            unread = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def _absent(reason: str) -> Problem:
    return Problem(503, reason, retry_after=_RETRY_AFTER_S)


async def _answer(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    response = problem.response(scope["path"])
    # Ray Serve gave the request an id if the client did not.
    response.raw_headers.extend((name, value) for name, value in scope["headers"] if name.lower() == _ID)
    await response(scope, receive, send)


def _drop_second_id(message: Message) -> None:
    """Ray Serve adds the request's id to answers that have it already."""
    headers = message["headers"]
    if sum(name.lower() == _ID for name, _ in headers) > 1:
        message["headers"] = headers[:-1] if headers[-1][0].lower() == _ID else headers


def _is_plain(message: Message) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(_PLAIN) for name, value in message["headers"])
