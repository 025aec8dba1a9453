"""The console's ASGI application: login, who may see and do what, and the way of a request to the reader and back.

A page is looked at with a session (``serve.middleware.browser_sessions``) whose key has the scope ``read`` or
``admin``; what is done by a form needs the page's token besides, and the scope that is named beside it below.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, Final
from urllib.parse import parse_qsl, quote

from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.config.root import child_environment
from deploy.console.pages.visit import Visit, page_of_error
from deploy.console.rendering import OF_ADMINS, STATIC, render
from serve.http import Problem, page_headers
from serve.middleware.authentication import LOGIN, READ, Authenticator, client_of, headers_of
from serve.middleware.bodies import FORM_BYTES, FORMS, Bodies
from serve.middleware.browser_sessions import cookie_of, set_cookie, token_of
from serve.middleware.keyring import CONSOLE, Principal
from serve.observability.audit import AuditLog, AuditLogError
from serve.reading.reader import Reader, ReadFailed
from serve.runtime import Server
from serve.static_files import StaticFolder

log = logging.getLogger(__name__)

_READ_S: Final = 30.0
_ACT_S: Final = 300.0  # a promotion reads all of a policy's files
_WAITING: Final = 32  # for one process
_WAITING_EACH: Final = 8  # of one principal
_LIVE_S: Final = 2.0
_STREAM_S: Final = 60.0  # then the browser asks again
_STREAMS: Final = 256
_STREAMS_EACH: Final = 16  # of one principal
_FIELDS: Final = 64
_READERS: Final = frozenset({"read", "admin"})


class _Version(IntegerConvertor):
    """A policy's number; what is longer than one can be is no address of a page."""

    regex = "[0-9]{1,9}"


register_url_convertor("version", _Version())

_PAGES: Final = {
    "/": "now",
    "/policies": "policies",
    "/policies/{version:version}": "policy",
    "/policies/{version:version}/traffic": "policy_traffic",
    "/playground": "playground",
    "/playground/judged": "judged",
    "/traffic": "traffic",
    "/traffic/{response_id}": "interaction",
    "/labels": "labels",
    "/labels/next": "labels_next",
    "/labels/agreement": "labels_agreement",
    "/compare": "compare",
    "/compare/next": "compare_next",
    "/compare/suites": "compare_suites",
    "/data": "data",
    "/keys": "keys",
}
_LAKE: Final = frozenset(
    {"policy_traffic", "judged", "traffic", "interaction", "compare", "compare_next", "compare_suites"}
    | {"labels", "labels_next", "labels_agreement"}
)
"""Pages that may take longer; they have a process of their own, so that the others don't wait for them."""

_ACTIONS: Final = {
    "/keys": ("create_key", "admin"),
    "/keys/{key_id}/scope": ("scope_key", "admin"),
    "/keys/{key_id}/revoke": ("revoke_key", "admin"),
    "/policies/{version:version}/promote": ("promote", "admin"),
    "/policies/{version:version}/rollback": ("rollback", "admin"),
    "/data": ("query", "admin"),
    "/data/export": ("export", "admin"),
    "/data/save": ("save_query", "admin"),
    "/data/delete": ("delete_query", "admin"),
}
_QUERIES: Final = frozenset({"query", "export"})
"""Actions that read as long as they may; they have a process of their own too."""

Handler = Callable[[Request], Awaitable[Response]]


def create(snapshot: Path, server: Server, authenticator: Authenticator) -> Starlette:
    """The application below /console; its lifespan ends what it started. ``snapshot``: a file with the settings."""
    return _Console(snapshot, server, authenticator).app


def _reader(snapshot: Path, timeout_s: float) -> Reader:
    """A process that makes pages, with the settings of a file."""
    module = ("deploy.console.worker", str(snapshot), str(timeout_s))
    return Reader(module, timeout_s, waiting=_WAITING, waiting_each=_WAITING_EACH, environment=child_environment)


class _Console:
    def __init__(self, snapshot: Path, server: Server, authenticator: Authenticator) -> None:
        self.server = server
        self.authenticator = authenticator
        self.files = _reader(snapshot, _READ_S)
        self.forms = Bodies(FORM_BYTES, FORMS)
        self.logins = Bodies(FORM_BYTES, FORMS)  # of strangers, who must not take the others' room
        self.lake = _reader(snapshot, _READ_S)
        self.queries = _reader(snapshot, _READ_S)
        self.actions = _reader(snapshot, _ACT_S)
        self._live: tuple[float, str] = (0.0, "")
        self._streams: Counter[str] = Counter()
        self._looking = asyncio.Lock()
        routes = [
            Route("/login", self._login_page, methods=["GET"]),
            Route("/login", self._login, methods=["POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            Route("/live", self._events, methods=["GET"]),
            *(Route(path, self._page(name), methods=["GET"]) for path, name in _PAGES.items()),
            *(Route(path, self._action(*of), methods=["POST"]) for path, of in _ACTIONS.items()),
            Mount("/static", StaticFolder(directory=STATIC)),
        ]
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(_PageHeaders)],
            exception_handlers={Problem: _problem, 404: _missing},
            lifespan=self._lifespan,
        )
        self.app.router.redirect_slashes = False  # it would lead to whatever host a request names

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for reader in (self.files, self.lake, self.queries, self.actions):
                await reader.close()

    # Sessions

    async def _login_page(self, request: Request) -> Response:
        if not self.authenticator.keyring.on:
            return _leads_to("/console/")
        user = self.authenticator.user(headers_of(request.scope, READ))
        return _html(render("login", next=_own_path(request.query_params.get("next")), user=user, wrong=None))

    async def _login(self, request: Request) -> Response:
        """Exchange a key, which is in the body, for a cookie; or, with ``sso``, what the proxy says of the user."""
        headers = headers_of(request.scope, READ)
        self.authenticator.check_origin(headers)
        form = await self._form(request, self.logins)
        user = self.authenticator.user(headers)
        try:
            if "sso" in form:
                cookie = self.authenticator.begin_session_of_user(headers, _address(request))
            else:
                cookie = self.authenticator.begin_session(form.get("key", "").strip(), _address(request))
            principal = self.authenticator.sessions.principal(cookie, user)
            _require(principal, _READERS)
        except Problem as problem:
            page = render("login", next=_own_path(form.get("next")), user=user, wrong=problem.detail)
            return _with_retry(_html(page, problem.status), problem)
        who = f"{principal.name} of {principal.tenant}"
        await asyncio.to_thread(self._record_login, who, _address(request), {"sso": user} if "sso" in form else {})
        return _with_cookie(_leads_to(_own_path(form.get("next"))), cookie, headers)

    def _record_login(self, who: str, address: str, by: dict[str, str | None]) -> None:
        try:
            with AuditLog(self.server.config.audit).entry("console.login", by, who=who, origin=address):
                pass
        except AuditLogError as error:
            raise Problem(503, f"nobody can log in at the moment: {error}", retry_after=5) from error

    async def _logout(self, request: Request) -> Response:
        headers = headers_of(request.scope, READ)
        try:
            self.authenticator.check_form(headers, _address(request))
        except Problem as problem:
            if problem.status != 401:  # a session that has ended already is left all the same
                raise
        else:
            form = await self._form(request, self.forms)
            self.authenticator.check_page(_proved(headers, form), cookie_of(headers))
        return _with_cookie(_leads_to(LOGIN), "", headers)

    def _visit(self, request: Request, *, form: dict[str, str] | None = None) -> tuple[dict[str, Any], str | None]:
        """Who looks, and a new cookie for them if they have none and need none. Raises Problem."""
        headers, made = headers_of(request.scope, READ), None
        if form is not None:
            headers = _proved(headers, form)
        else:
            _check_site(request)
        if cookie_of(headers) is None and form is None and not self.authenticator.keyring.on:
            made = self.authenticator.sessions.begin_without_key()
        principal = self.authenticator.session(headers, _address(request), proved=form is not None)
        _require(principal, _READERS)
        viewer = {
            "tenant": principal.tenant,
            "name": principal.name,
            "scopes": sorted(principal.scopes),
            "token": token_of(made or cookie_of(headers) or ""),
            "keys": self.authenticator.keyring.on,
            "address": _address(request),
        }
        return viewer, made

    # Pages

    def _page(self, name: str) -> Handler:
        async def handle(request: Request) -> Response:
            try:
                viewer, made = self._visit(request)
            except Problem as problem:
                if problem.status not in (401, 429):  # a good key is let in, however many others were not
                    raise
                return _to_login(request)
            if name in OF_ADMINS:
                try:
                    _require_scope(viewer, "admin", OF_ADMINS[name])
                except Problem as problem:  # with the menu: who looks is known
                    visit = Visit(request.path_params, {}, None, viewer)
                    return _html(page_of_error(problem.status, problem.detail, visit).body, problem.status)
            reader = self.lake if name in _LAKE else self.files
            answer = await self._read(reader, name, request, viewer, None)
            return answer if made is None else _with_cookie(answer, made, headers_of(request.scope, READ))

        return handle

    def _action(self, name: str, scope: str) -> Handler:
        async def handle(request: Request) -> Response:
            self.authenticator.check_form(headers_of(request.scope, READ), _address(request))
            form = await self._form(request, self.forms)
            viewer, _ = self._visit(request, form=form)
            _require_scope(viewer, scope)
            what = " ".join([name, *(f"{key}={value}" for key, value in request.path_params.items())])
            log.info("console: %s by %s", what, viewer["name"])
            reader = self.queries if name in _QUERIES else self.actions
            if name == "export":
                return await self._export(reader, request, viewer, form)
            return await self._read(reader, name, request, viewer, form)

        return handle

    async def _read(
        self,
        reader: Reader,
        name: str,
        request: Request,
        viewer: dict[str, Any],
        form: dict[str, str] | None,
        file: str = "",
    ) -> Response:
        query = dict(request.query_params)
        path = {key: str(value) for key, value in request.path_params.items()}
        sent = {"page": name, "path": path, "query": query, "form": form, "viewer": viewer, "file": file}
        try:
            answer = await reader.read(sent, _who(viewer))
        except ReadFailed as error:
            raise Problem(503, f"this page can't be shown at the moment: {error}", retry_after=5) from error
        if answer["location"] is not None:
            return _leads_to(answer["location"])
        return Response(answer["body"], answer["status"], media_type=answer["type"])

    async def _export(self, reader: Reader, request: Request, viewer: dict[str, Any], form: dict[str, str]) -> Response:
        """What a query gives, as a file that is gone when it has been sent, or when it can't be."""
        file = await asyncio.to_thread(lambda: NamedTemporaryFile(prefix="millrace-export-"))  # noqa: SIM115
        try:
            answer = await self._read(reader, "export", request, viewer, form, file.name)
        except BaseException:
            file.close()
            raise
        if answer.status_code != 200:
            file.close()
            return answer
        return _Download(file, f"query.{form['as']}", answer.media_type or "")

    async def _events(self, request: Request) -> Response:
        """The page Now, part by part as it changes, for a minute; the browser then asks again.

        It ends before that with the session, with the browser's leaving and with the server.
        """
        viewer, _ = self._visit(request)
        who = _who(viewer)
        if self._streams.total() >= _STREAMS or self._streams[who] >= _STREAMS_EACH:
            most = f"{_STREAMS_EACH} of one key and {_STREAMS} in all"
            raise Problem(503, f"too many pages are kept as things are: {most} may be", retry_after=15)

        async def events() -> AsyncIterator[bytes]:
            sent, began_at = "", time.monotonic()
            told_at = began_at
            while not self.server.draining:
                if time.monotonic() - began_at > _STREAM_S:
                    yield b"retry: 1000\n\n"
                    return
                try:
                    viewer, _ = self._visit(request)
                except Problem:  # the key was revoked: the page asks anew, and is led to the login
                    yield b"event: ended\ndata:\n\n"
                    return
                parts = await self._parts(request, viewer)
                if parts != sent or time.monotonic() - told_at > 15:
                    sent, told_at = parts, time.monotonic()
                    yield f"data: {parts}\n\n".encode()
                await asyncio.sleep(_LIVE_S)

        return _Stream(events(), self._streams, who)

    async def _parts(self, request: Request, viewer: dict[str, Any]) -> str:
        """The live parts of the page, as JSON on a line; read once for all browsers that look."""
        async with self._looking:
            if time.monotonic() - self._live[0] < _LIVE_S * 0.9:
                return self._live[1]
            sent = {"page": "now_live", "path": {}, "query": {}, "form": None, "viewer": viewer}
            try:
                parts = (await self.files.read(sent))["body"]
            except ReadFailed as error:
                parts = json.dumps({"failed": str(error)})
            self._live = (time.monotonic(), parts)
            return parts

    async def _form(self, request: Request, bodies: Bodies) -> dict[str, str]:
        """The fields of a form. Raises Problem 400, and as ``Bodies.read``."""
        body = await bodies.read(request.receive)
        try:
            return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_FIELDS))
        except ValueError as error:
            raise Problem(400, f"that is no form: {error}") from None


class _Download(StreamingResponse):
    """A temporary file, which is closed, and so removed, when it has been sent."""

    def __init__(self, file: IO[bytes], name: str, media_type: str) -> None:
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        super().__init__(_pieces(file), media_type=media_type, headers=headers)
        self.file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.file.close()


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(256 << 10):
        yield piece


class _Stream(StreamingResponse):
    """Server-sent events, counted in ``streams`` while they are sent."""

    def __init__(self, events: AsyncIterator[bytes], streams: Counter[str], who: str) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self.streams = streams
        self.who = who

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.streams[self.who] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.streams -= Counter((self.who,))  # and forget whom none is left of


def _address(request: Request) -> str:
    return client_of(request.scope)


def _who(viewer: dict[str, Any]) -> str:
    """A principal, among those whose requests are counted."""
    return f"{viewer['tenant']}/{viewer['name']}"


def _check_site(request: Request) -> None:
    """Raises Problem 403 for what another site's page embeds; a link of its may lead here."""
    sent = request.headers
    if sent.get("sec-fetch-site") in ("cross-site", "same-site") and sent.get("sec-fetch-dest") != "document":
        raise Problem(403, "a page of another site may lead to a page of the console, and not embed it")


def _require_scope(viewer: dict[str, Any], scope: str, what: str = "this") -> None:
    if scope not in viewer["scopes"]:
        own = f"yours ({viewer['name']}) has {', '.join(viewer['scopes'])}"
        raise Problem(403, f"{what} needs a key with the scope {scope}; {own}")


def _require(principal: Principal, scopes: frozenset[str]) -> None:
    if not principal.scopes & scopes:
        needed = " or ".join(sorted(scopes))
        raise Problem(
            403, f"the console needs a key with the scope {needed}; this one has {', '.join(principal.scopes)}"
        )


def _proved(headers: dict[bytes, bytes], form: dict[str, str]) -> dict[bytes, bytes]:
    """The headers, with the token of a form that was sent without a script."""
    token = form.pop("csrf", None)
    return headers if token is None or b"x-csrf-token" in headers else headers | {b"x-csrf-token": token.encode()}


def _own_path(wanted: str | None) -> str:
    """Where to go after the login: a path of the console, whatever was asked for."""
    return (
        wanted
        if wanted and wanted.startswith(f"{CONSOLE}/") and wanted.isprintable() and "\\" not in wanted
        else "/console/"
    )


def _to_login(request: Request) -> Response:
    wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    location = f"{LOGIN}?next={quote(wanted, safe='')}"
    if "hx-request" in request.headers:  # a part of a page would be put where the part was
        return Response(status_code=401, headers={"HX-Redirect": location})
    return _leads_to(location)


def _leads_to(location: str) -> Response:
    return RedirectResponse(location, 303)


def _html(text: str, status: int = 200) -> Response:
    return Response(text, status, media_type="text/html")


def _with_retry(response: Response, problem: Problem) -> Response:
    if problem.retry_after is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after)))
    return response


def _with_cookie(response: Response, cookie: str, headers: dict[bytes, bytes]) -> Response:
    response.headers.append("Set-Cookie", set_cookie(cookie, tls=headers.get(b"origin", b"").startswith(b"https:")))
    return response


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return _with_retry(_html(render("failed", status=error.status, reason=error.detail), error.status), error)


async def _missing(request: Request, error: Exception) -> Response:
    return _html(render("failed", status=404, reason="The console has no such page."), 404)


class _PageHeaders:
    """ASGI middleware: pages take nothing from elsewhere and are kept by no cache; files are asked after."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._headers = [(name.lower().encode(), value.encode()) for name, value in page_headers().items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        kept = b"no-cache" if "/static/" in scope["path"] else b"no-store"

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers, (b"cache-control", kept)]
            await send(message)

        await self.app(scope, receive, answer)
