"""The one ASGI middleware: what happens to every request before a route sees it, and to every answer.

A request gets an id (its own ``X-Request-Id`` if that is well-formed), its trace context is read (W3C), it is
authenticated, and counted against its key's rate limit. An answer carries the id, and is counted by route and code; a
request for responses also by its outcome, which a stream, whose status goes out before that, leaves in the request's
scope as ``ended_with``: the status that it would have now. The routes find ``request_id``, ``principal``, and, if the
request came with a trace, ``traceparent``, ``tracestate``, ``trace_id`` and ``span_id`` in the request's scope.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from feedback.ids import uuid7
from serve.http import CLIENT_CLOSED_REQUEST, Problem, client_gone
from serve.middleware import authentication
from serve.middleware.authentication import Authenticator, client_of, headers_of
from serve.middleware.keyring import scope_of
from serve.middleware.rate_limits import Limiter
from serve.observability import log_format
from serve.observability.metrics import Metrics, Outcome
from serve.observability.tracing import Tracing, remote_parent, traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

log = logging.getLogger(__name__)
access = logging.getLogger("serve.access")

_READ: Final = authentication.READ | {b"x-request-id", b"traceparent", b"tracestate", b"content-encoding"}
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_OTHER: Final = "other"
_LIMITED: Final = frozenset({"generate", "feedback"})
RESPONSES: Final = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
_TRACED: Final = RESPONSES | {"/feedback", "/feedback/batch"}


def well_formed_id(own: bytes) -> bool:
    """Whether a request keeps the id that it came with."""
    return _REQUEST_ID.fullmatch(own) is not None


class RequestContext:
    """``routes``: the application's own list, so that what is added later is known too."""

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        limiter: Limiter,
        metrics: Metrics,
        routes: list[BaseRoute],
        access_log: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        self.app = app
        self.authenticator = authenticator
        self.limiter = limiter
        self.metrics = metrics
        self.access_log = access_log
        self.tracing = tracing
        self._routes = routes
        paths = (getattr(route, "path", "") for route in routes)
        self._plain: dict[str, str | None] = {path: scope_of(path) for path in paths if path and "{" not in path}
        """Of routes without a parameter, path -> the scope it needs."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        incoming = headers_of(scope, _READ)
        parent = _read_trace(scope, incoming) if b"traceparent" in incoming else None
        if self.tracing is None or scope["path"] not in _TRACED:
            return await self._respond(scope, receive, send, incoming)
        if parent is not None and not self.authenticator.knows(incoming):
            parent = None  # a stranger's word doesn't make a trace be exported, nor join one
        span = self.tracing.begin_request(scope["method"], scope["path"], parent)
        _, scope["trace_id"], scope["span_id"], scope["trace_flags"] = traceparent(span).split("-")
        with self.tracing.at_work(span):
            try:
                await self._respond(scope, receive, send, incoming)
            finally:
                self.tracing.end_request(span, scope["request_id"], scope["came_to"])

    async def _respond(self, scope: Scope, receive: Receive, send: Send, incoming: dict[bytes, bytes]) -> None:
        started = time.perf_counter()
        own_id = incoming.get(b"x-request-id")
        if own_id is not None and well_formed_id(own_id):
            request_id, id_bytes = own_id.decode(), own_id
        else:
            request_id = uuid7()
            id_bytes = request_id.encode()
        scope["request_id"] = request_id
        headers = [(b"x-request-id", id_bytes)]
        if "trace_id" in scope:
            flags = scope.get("trace_flags", "00")
            headers.append((b"traceresponse", f"00-{scope['trace_id']}-{scope['span_id']}-{flags}".encode()))
        path: str = scope["path"]
        at_work = log_format.request.set(scope)
        route, code, answered = _OTHER, 500, False
        broken: int | None = None  # the status that an answer which had begun would have now

        async def answer(message: Message) -> None:
            nonlocal code, answered
            if message["type"] == "http.response.start":
                code, answered = message["status"], True
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        try:
            try:
                wanted = self._plain[path]
                route = path
            except KeyError:
                route, wanted = self._find(scope)
            principal = scope["principal"] = self.authenticator.authenticate(wanted, incoming, client_of(scope))
            if (coding := incoming.get(b"content-encoding", b"identity").lower()) != b"identity":
                shown = coding.decode("latin-1")[:100]
                raise Problem(
                    415,
                    f"Content-Encoding is {shown!r}, and bodies are read as they are: send it without one",
                    headers={"Accept-Encoding": "identity"},  # RFC 9110, 12.5.3
                )
            if wanted in _LIMITED:
                await self.limiter.take_request(principal)
            await self.app(scope, receive, answer)
        except Problem as problem:
            if answered:
                broken = problem.status
                raise
            await problem.response(path)(scope, receive, answer)
        except ClientDisconnect:
            await client_gone()(scope, receive, answer)
        except asyncio.CancelledError:  # a proxy's way to say that its client has gone
            broken = CLIENT_CLOSED_REQUEST
            if not answered:
                code = broken
            raise
        except Exception as error:
            log.exception("%s %s failed", scope["method"], log_format.path(path))
            if answered:
                broken = 500
                raise  # the server breaks off the connection
            unexpected = Problem(500, f"{type(error).__name__}; the server's log has the details")
            await unexpected.response(path)(scope, receive, answer)
        finally:
            seconds = time.perf_counter() - started
            self.metrics.answered(route, code, seconds)
            scope["came_to"] = came_to = scope.get("ended_with") or broken or code
            if route in RESPONSES and "principal" in scope:
                self.metrics.ended(_outcome(came_to))
            if self.access_log:
                self._log(scope, route, code, seconds)
            log_format.request.reset(at_work)

    def _find(self, scope: Scope) -> tuple[str, str | None]:
        """(The template of the route that will answer, the scope that it needs); as the router itself would find it."""
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                template = str(getattr(route, "path", _OTHER))
                return template, scope_of(template)
        return _OTHER, None

    def _log(self, scope: Scope, route: str, code: int, seconds: float) -> None:
        principal = scope.get("principal")
        fields: dict[str, Any] = {
            "method": scope["method"],
            "path": log_format.path(scope["path"]),
            "route": route,
            "code": code,
            "ms": round(seconds * 1e3, 2),
            "client": client_of(scope),
            "key": principal.key if principal is not None else None,
            "tenant": principal.tenant if principal is not None else None,
        }
        access.info("%(method)s %(path)s %(code)d in %(ms).1f ms", fields, extra={log_format.FIELDS: fields})


def _outcome(status: int) -> Outcome:
    """What a request for responses came to, by the status that it ended with."""
    if status == CLIENT_CLOSED_REQUEST:
        return "left"
    return "complete" if status < 400 else "refused" if status < 500 else "failed"


def _read_trace(scope: Scope, incoming: dict[bytes, bytes]) -> SpanContext | None:
    """Keep the trace context if it is well-formed; one that is not is as if there were none (W3C)."""
    parent = remote_parent(incoming[b"traceparent"], incoming.get(b"tracestate"))
    if parent is None:
        return None
    scope["traceparent"] = incoming[b"traceparent"].decode("latin-1")
    scope["trace_id"] = f"{parent.trace_id:032x}"
    scope["span_id"] = os.urandom(8).hex()  # this request's own
    if parent.trace_state:
        scope["tracestate"] = incoming[b"tracestate"].decode("latin-1")
    return parent
