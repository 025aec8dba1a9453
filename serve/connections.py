"""uvicorn's connections, with bounds for what comes before a request is there: its head's size, and its time."""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES: Final = 64 << 10
HEAD_TIMEOUT_S: Final = 30.0

_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
    b"content-type: application/problem+json\r\ncontent-length: %d\r\n\r\n%b"
)
_PROBLEM: Final = b'{"title":"Request Header Fields Too Large","status":431,"detail":"a head may have %d bytes"}'


class BoundedHttp(HttpToolsProtocol):
    """A head that is not whole after ``HEAD_BYTES`` gets 431; one that is not after ``HEAD_TIMEOUT_S``, no answer."""

    _in_head = True
    _head = 0  # bytes of a head that is not whole
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As uvicorn's."""
        super().connection_made(transport)
        self._limit = self.loop.call_later(HEAD_TIMEOUT_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        self._in_time()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As uvicorn's."""
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        self._head += len(data)
        if self._head > HEAD_BYTES:
            problem = _PROBLEM % HEAD_BYTES
            self.transport.write(_TOO_LARGE % (len(problem), problem))
            self.transport.close()
        elif self._limit is None:
            self._limit = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def on_message_begin(self) -> None:
        """As uvicorn's."""
        self._in_head, self._head = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """As uvicorn's."""
        self._in_head = False
        self._in_time()
        super().on_headers_complete()

    def _in_time(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
