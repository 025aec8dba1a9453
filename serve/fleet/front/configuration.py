"""HAProxy's configuration for a fleet's front, as text, and the files that it names.

A request passes two frontends. ``clients`` takes the connections of clients, and ``requests``, on a socket of
HAProxy's own, each request on a new one: when a server ends before it has answered, HAProxy answers the first request
of a connection with an error, and closes the connection of any later one without a word.

What HAProxy can't parse gets the one page that it has for that, with 400 or 422, whatever is configured: what is no
HTTP request, a head of more than ``_PARSED_BYTES`` or ``_HEADERS`` lines. A head that does not come in time gets
nothing. All other errors have the form of our own.

Each replica takes a place, with a socket that is there while it listens; what is not there, or says that it is not
ready, gets nothing. Where none is ready, any that listens can still say why (``unready``).
``routed`` has Ray Serve's proxy; while that is enabled, it gets all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from serve.config import FleetConfig
from serve.fleet.assignment import HEADER
from serve.http import OPENAI, Problem
from serve.middleware.connections import CLIENT, HEAD_BYTES, HEAD_TIMEOUT_S, KEEP_ALIVE_S

ADMIN: Final = "admin"
ROUTED: Final = "routed/proxy"
CHECK: Final = "/-/check"
"""Where a replica's own listener says whether the replica is ready. No client reaches any path below /-/."""
CHECK_S: Final = 0.5
"""Seconds between two such questions."""

IDLE_S: Final = 3600
"""A connection of HAProxy's may be idle for so long: longer than it keeps one, which it might use as it is closed."""

_AGAIN_S: Final = 2
_HEADERS: Final = 1000  # lines of a head; the bytes are what bounds it
_PARSED_BYTES: Final = 2 * HEAD_BYTES  # of a head that is refused in our form
_REWRITE_BYTES: Final = 1024  # what HAProxy adds to a head
_ENDED: Final = 502
"""HAProxy's status for a replica that ended with a request; ours is 503."""
_TOO_LARGE: Final = 431
"""Which HAProxy does not know, so that it is returned by a rule."""
_ERRORS: Final = {
    400: Problem(400, "this is no HTTP request that can be read"),
    404: Problem(404, "there is no such path"),
    _TOO_LARGE: Problem(_TOO_LARGE, f"a head may have {HEAD_BYTES} bytes"),
    500: Problem(500, "the request could not be handed on"),
    _ENDED: Problem(503, "the replica that had the request has ended; ask again", retry_after=_AGAIN_S),
    503: Problem(503, "no replica takes requests at the moment; ask again", retry_after=_AGAIN_S),
    504: Problem(504, "the replica that has the request did not answer in time"),
}
"""By HAProxy's own status."""


@dataclass(frozen=True)
class Configuration:
    """Of one front.

    folder: private, with all of its sockets and files. descriptor: the socket that clients connect to, inherited.
    proxy: the port of Ray Serve's proxy on loopback. connections: of clients, at a time. timeout_s: a request's.
    secret: by which a replica knows what the front says. threads: of HAProxy.
    """

    folder: Path
    descriptor: int
    places: int
    proxy: int
    connections: int
    timeout_s: float
    secret: str
    threads: int

    def text(self, *, by_content: bool) -> str:
        """HAProxy's configuration. ``by_content``: whether requests go through Ray Serve's proxy at first."""
        servers = "\n".join(f"  server {place} unix@{socket_of(self.folder, place)}" for place in range(self.places))
        disabled = "" if by_content else " disabled"
        return f"""
global
  nbthread {self.threads}
  maxconn {2 * self.connections}
  stats socket unix@{self.folder / ADMIN} mode 600 level admin
  tune.bufsize {_PARSED_BYTES + _REWRITE_BYTES}
  tune.maxrewrite {_REWRITE_BYTES}
  tune.http.maxhdr {_HEADERS}

defaults backends
  mode http
  maxconn {self.connections}
  timeout http-request {HEAD_TIMEOUT_S:.0f}s
  timeout http-keep-alive {KEEP_ALIVE_S}s
  timeout connect 5s
  timeout check 10s
  timeout client {self.timeout_s + 10:.0f}s
  timeout server {self.timeout_s:.0f}s
  option abortonclose
  option http-no-delay
  errorfile 408 /dev/null
{self._errors()}

defaults frontends from backends
  http-request set-var(txn.openai) bool(false)
  http-request set-var(txn.openai) bool(true) if {{ path_beg {OPENAI} }}
  http-request set-var(txn.id) req.hdr(x-request-id)
  http-after-response set-status 503 if {{ status {_ENDED} }}
  acl is_openai var(txn.openai) -m bool
  acl is_problem res.hdr(content-type) application/problem+json
  acl is_named res.hdr(x-request-id) -m found
  acl has_name var(txn.id) -m reg ^[A-Za-z0-9._-]{{1,128}}$
  http-after-response set-header content-type application/json if is_openai is_problem
  http-after-response set-header x-request-id %[var(txn.id)] if !is_named has_name

frontend clients from frontends
  bind fd@{self.descriptor} proto h1
  http-request set-var(txn.line) url,length
  acl is_too_large req.hdrs,length,add(txn.line) gt {HEAD_BYTES}
  http-request return status {_TOO_LARGE} {self._body(_TOO_LARGE)} if is_too_large
  http-request set-header {CLIENT} "{self.secret} %[src] %[src_port]"
  http-request del-header {HEADER}
  http-request deny deny_status 400 if {{ path -m found }} !{{ path,url_dec -m found }}
  http-request deny deny_status 404 if {{ path,url_dec -m beg /-/ }}
  default_backend passed_on

backend passed_on from backends
  option http-server-close
  timeout server {self.timeout_s + 10:.0f}s
  server requests unix@{self.folder}/requests

frontend requests from frontends
  bind unix@{self.folder}/requests mode 600
  use_backend routed if {{ nbsrv(routed) gt 0 }}
  use_backend unready if {{ nbsrv(replicas) eq 0 }}
  default_backend replicas

backend replicas from backends
  balance leastconn
  http-reuse always
  option redispatch 1
  retries {self.places}
  option httpchk
  http-check send meth GET uri {CHECK} ver HTTP/1.1 hdr host front
  default-server check inter {CHECK_S * 1000:.0f}ms downinter {CHECK_S * 500:.0f}ms fall 1 rise 1
  default-server observe layer4 error-limit 1 on-error mark-down
{servers}

backend unready from backends
  balance roundrobin
  option redispatch 1
  retries {self.places}
{servers}

backend routed from backends
  http-reuse always
  server proxy 127.0.0.1:{self.proxy}{disabled}
"""

    def _errors(self) -> str:
        """The lines that give HAProxy's own errors our forms."""
        lines = []
        for status, problem in _ERRORS.items():
            if status != _TOO_LARGE:
                again = "" if problem.retry_after is None else f" hdr Retry-After {problem.retry_after:g}"
                lines.append(f"  http-error status {status} {self._body(status)}{again}")
        return "\n".join(lines)

    def _body(self, status: int) -> str:
        return f"content-type application/problem+json lf-file {self._error(status)}"

    def _error(self, status: int) -> Path:
        return self.folder / f"{status}.json"

    def write(self, *, by_content: bool) -> Path:
        """The configuration's file, with those of the errors beside it. Raises OSError."""
        for status, problem in _ERRORS.items():
            self._error(status).write_text(_either(problem))
        path = self.folder / "haproxy.cfg"
        path.touch(0o600)
        path.write_text(self.text(by_content=by_content))
        return path


def places_of(fleet: FleetConfig) -> int:
    """How many replicas can listen at a time: those that end have their places beside those that replace them."""
    return 2 * fleet.replicas + 2


def socket_of(folder: Path, place: int) -> Path:
    """The socket of the replica that has a place."""
    return folder / str(place)


def _either(problem: Problem) -> str:
    """The text from which HAProxy makes a problem's body, in the form of the request's path."""
    forms = [orjson.dumps(form).decode().replace("%", "%%") for form in (problem.openai_body(), problem.body())]
    assert not any("'" in form or "\\" in form for form in forms)
    return "%[var(txn.openai,0),iif('{}','{}')]".format(*forms)  # what is refused before any rule has no path
