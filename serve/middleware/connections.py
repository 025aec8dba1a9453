"""uvicorn's connections, with bounds for all of a request but its body: its size, its time, and how many wait.

A server without an answer to give yet, and one that has answered before the request was whole, both go on reading. What
comes then is bounded here; a body that somebody reads is bounded where it is read (``serve.middleware.bodies``).

Here alone is the other end of the connection known for certain: behind it, a proxy's word counts. So what a proxy says
of a request's user (``serve.sso``) is believed or dropped here; and so is what a fleet's own front says of a request's
address (``serve.fleet.front``), which is then taken for the connection's other end.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import ipaddress
import resource
import socket
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, ClassVar, Final, Literal

import orjson
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from serve.config import SsoConfig
from serve.http import Problem

USER: Final = "millrace.user"
"""Where in a request's scope the user is, with ``word_of`` what says so. No header leads there, so that no other way to
the application does: Ray Serve's proxies may be older than this server, or others' on the same cluster.
"""

CLIENT: Final = "x-millrace-client"
"""The header in which a fleet's front hands on its secret, and the address and port that a request came from."""

KEEP_ALIVE_S: Final = 75
"""A client's connection may be idle for so long."""

HEAD_BYTES: Final = 64 << 10
HEAD_TIMEOUT_S: Final = 30.0
REST_BYTES: Final = 32 << 20
REST_TIMEOUT_S: Final = 30.0
PIPELINED: Final = 64
SEND_S: Final = 60.0
SENT_BYTES: Final = 16 << 10

_MOST_FILES: Final = 1 << 16
_OTHER_FILES: Final = 256  # of this process: the journal's and the lake's, the engine's sockets, files of the store
_FEWEST: Final = 64

_PIECE_BYTES: Final = 4096  # parsed between two looks at the bounds
_REFUSAL: Final = (
    b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: application/problem+json\r\ncontent-length: %d\r\n\r\n%b"
)
_CLIENT: Final = CLIENT.encode()
_TOO_LARGE: Final = Problem(431, f"a head may have {HEAD_BYTES} bytes")
_UNREADABLE: Final = Problem(400, "this is no HTTP request that can be read")


def bind(host: str, port: int, share: Literal["no", "begin", "join"] = "no") -> socket.socket:
    """A socket that does not listen yet: until the server can answer, a client is refused and does not wait in a queue.

    share: whether further processes of this user may listen on the port too, each with a socket of its own, between
    which the kernel distributes connections; ``join`` is for those. Raises OSError if the port is taken.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if share == "join":
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
        if share == "begin":  # not before: a port that another server shares is taken all the same
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"can't listen on {host}:{port}: {error.strerror}") from error
    return bound


def connections_at_most() -> int:
    """How many connections leave files for all else, once this process may have as many files as the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    with suppress(ValueError, OSError):  # the most of one process, by fs.nr_open, may be less
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_FEWEST, soft - _OTHER_FILES)


class BoundedHttp(HttpToolsProtocol):
    """Ends a connection whose client sends what no request needs.

    A head that is not whole after ``HEAD_BYTES`` gets 431, one that is not after ``HEAD_TIMEOUT_S`` no answer. Trailers
    and chunk extensions have as many bytes, and are dropped. Of a request that was answered before it was whole,
    ``REST_BYTES`` are read, for ``REST_TIMEOUT_S``. ``PIPELINED`` requests may wait for the one before them. Of an
    answer the client takes ``SENT_BYTES`` more every ``SEND_S``, or the rest. A connection beyond those that the
    process may have files for is closed at once: the journal needs files too.
    """

    most: ClassVar[int | None] = None
    """Connections at a time; None: any number."""

    _user_header: ClassVar[bytes | None] = None
    _proxies: ClassVar[tuple[str, ...]] = ()
    _word: ClassVar[bytes] = b""
    _front: ClassVar[bytes | None] = None

    @classmethod
    def believe(cls, sso: SsoConfig, front: bytes | None = None) -> None:
        """Have all connections of this class believe what these settings' proxies say of users.

        front: the secret by which a fleet's front is known, if there is one.
        """
        cls._user_header = None if sso.header is None else sso.header.lower().encode()
        cls._proxies, cls._word, cls._front = tuple(sso.proxies), word_of(sso), front

    @classmethod
    def believing(cls, sso: SsoConfig, front: bytes | None = None) -> type[BoundedHttp]:
        """This protocol, for a server with single sign-on; as ``believe``."""
        made: type[BoundedHttp] = type("BoundedHttp", (cls,), {})
        made.believe(sso, front)
        return made

    _users: list[bytes]  # what a head says of who makes the request
    _begun = False  # a head
    _in_message = False  # behind its head
    _heard = False  # whether the last piece had something of a request's own: a first or last byte, a body's bytes
    _framing = 0  # bytes since something was heard
    _rest = 0  # bytes since the answer
    _running: RequestResponseCycle | None = None
    _timer: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.most is not None and len(self.connections) > self.most:
            return transport.close()
        self._start_timer(HEAD_TIMEOUT_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's, which tells the newest of pipelined requests only."""
        self._stop_timer()
        self._stop_watching()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """As uvicorn's, with a bound for how long the client takes to read on."""
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        """As uvicorn's."""
        super().resume_writing()
        self._stop_watching()
        if not self._is_answering():  # a rest of an answer that is given: nobody else looks at it
            self._watch_sending()

    def data_received(self, data: bytes) -> None:
        """As uvicorn's, piece by piece."""
        if len(data) <= _PIECE_BYTES:
            return self._receive(data)
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            self._receive(bytes(view[start : start + _PIECE_BYTES]))
            if self.transport.is_closing():
                return None

    def _receive(self, piece: bytes) -> None:
        self._heard = False
        super().data_received(piece)
        if self.transport.is_closing():
            return
        self._framing = 0 if self._heard else self._framing + len(piece)
        if self._framing > HEAD_BYTES:
            return self._refuse(b"431 Request Header Fields Too Large", _TOO_LARGE)
        if len(self.pipeline) > PIPELINED:
            return self.transport.close()
        if self._in_message:
            if self.cycle.response_complete:
                self._rest += len(piece)
                if self._rest > REST_BYTES:
                    self.transport.close()
        elif self._timer is None and (self._begun or not self._heard):
            self._start_timer(HEAD_TIMEOUT_S, self._head_is_late)

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: the request is answered as it is, and the log is not for strangers to fill."""

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, in our form, where it is no other request's answer."""
        self._refuse(b"400 Bad Request", _UNREADABLE)

    def on_message_begin(self) -> None:
        self._begun = self._heard = True
        self._users = []
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """As uvicorn's, which takes trailers for headers; but who the user is, only the right proxy may say."""
        if self._in_message:
            return
        if self._user_header is not None and name.lower() == self._user_header:
            self._users.append(value)
        elif self._front is not None and name.lower() == _CLIENT:
            self._hear_front(self._front, value)
        else:
            super().on_header(name, value)

    def _hear_front(self, secret: bytes, value: bytes) -> None:
        """Take the address that the front says for the other end of this request's connection."""
        said, _, address = value.partition(b" ")
        if hmac.compare_digest(said, secret):
            host, _, port = address.decode("ascii").partition(" ")
            self.scope["client"] = (host, int(port))

    def on_headers_complete(self) -> None:
        """As uvicorn's, once it is known whose word the request comes with."""
        self._begun, self._in_message, self._heard = False, True, True
        self._stop_timer()
        if self._users:
            scope: dict[str, Any] = self.scope  # type: ignore[assignment]
            if scope["client"] is not None and _is_among(scope["client"][0], self._proxies):
                scope[USER] = (self._word, b",".join(self._users))
            self._users = []
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._heard = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message, self._heard, self._rest = False, True, 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """As uvicorn's. Of the request nothing is kept; what is missing of it, is not waited for for ever."""
        if self._running is not None:
            self._running.body = bytearray()
        self._watch_sending()
        super().on_response_complete()
        if self._in_message and self.cycle.response_complete and not self.transport.is_closing():
            self._start_timer(REST_TIMEOUT_S, self.transport.close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        flow: FlowControl = self.flow
        if not flow.write_paused:  # what it sends is no sign that nothing was read
            self._stop_watching()
        super()._start_asgi_task(cycle, app)

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _refuse(self, status: bytes, problem: Problem) -> None:
        if not self._is_answering():
            body = orjson.dumps(problem.body())
            self.transport.write(_REFUSAL % (status, len(body), body))
            self._watch_sending()
        self.transport.close()

    def _head_is_late(self) -> None:
        self._timer = None
        flow: FlowControl = self.flow
        if flow.read_paused:  # it may be there; nobody looks while the request before it is at work
            self._start_timer(HEAD_TIMEOUT_S, self._head_is_late)
        else:
            self.transport.close()

    def _watch_sending(self) -> None:
        """Look in a while whether what is not sent has become less; nothing is added to it meanwhile."""
        if self._sending is None and (unsent := self._unsent()):
            self._sending = self.loop.call_later(SEND_S, self._look_at_sending, unsent)

    def _look_at_sending(self, before: int) -> None:
        self._sending = None
        unsent = self._unsent()
        if before - unsent >= SENT_BYTES:
            self._watch_sending()
        elif unsent:
            self.transport.abort()

    def _unsent(self) -> int:
        """Bytes that the client has not taken, those with the kernel too; 0 if all of them are."""
        if not (waiting := self.transport.get_write_buffer_size()):
            return 0
        file = self.transport.get_extra_info("socket").fileno()
        [in_kernel] = struct.unpack("i", fcntl.ioctl(file, termios.TIOCOUTQ, bytes(4)))
        return waiting + int(in_kernel)

    def _stop_watching(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _start_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def word_of(sso: SsoConfig) -> bytes:
    """What names the word of these settings' proxies: that of others, which Ray Serve's may still have, is another."""
    return f"user by {sso.model_dump_json()}".encode()


@lru_cache(1024)
def _is_among(address: str, networks: tuple[str, ...]) -> bool:
    """Whether an address of a connection's other end is in one of these networks."""
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    return any(found in ipaddress.ip_network(network) for network in networks)
