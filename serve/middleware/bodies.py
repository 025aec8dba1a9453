"""Request bodies: read in time and in bounded memory, before a request takes a place among those at work.

A body that is sent in earnest is there in a moment. One that dribbles costs others nothing: it is ended when it comes
too slowly, and when more bodies are on their way than may be, the one that is so for longest makes room. Runs in Ray
Serve's proxies too; imports no torch and no vLLM.
"""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from serve.http import Problem

FORM_BYTES: Final = 256 << 10
"""What a form of the console may have."""
FORMS: Final = 64
"""How many of them may be on their way."""

_PATIENCE_S: Final = 10.0
_BYTES_A_SECOND: Final = 16 << 10  # what a body may have in addition takes that much longer
_MOST_S: Final = 60.0


class Bodies:
    """The bodies that are on their way to this process."""

    def __init__(self, limit: int, most: int) -> None:
        """``limit``: bytes that one may have; ``most``: how many may be on their way."""
        self.limit = limit
        self.most = most
        self._coming: dict[asyncio.Timeout, None] = {}  # in the order in which they began

    async def read(self, receive: Receive) -> bytes:
        """A request's body. Raises Problem 408, 413 or 503, ClientDisconnect."""
        clock = asyncio.get_running_loop().time
        started, size, chunks = clock(), 0, []
        end = asyncio.timeout(_PATIENCE_S)
        try:
            async with end:
                self._make_room(clock())
                self._coming[end] = None
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size > self.limit:
                        raise Problem(413, f"the body is larger than {self.limit} bytes")
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
                    if end in self._coming and not end.expired():
                        end.reschedule(started + min(_MOST_S, _PATIENCE_S + size / _BYTES_A_SECOND))
        except TimeoutError:
            if end not in self._coming:
                reason = f"{self.most} bodies are on their way already, and this one came slowest"
                raise Problem(503, reason, retry_after=1) from None
            reason = f"{size} bytes of the body came within {clock() - started:.0f} s; send it faster"
            raise Problem(408, reason) from None
        finally:
            self._coming.pop(end, None)

    def _make_room(self, now: float) -> None:
        """End the one that is under way for longest, if there are too many."""
        if len(self._coming) < self.most:
            return
        longest = next(iter(self._coming))
        del self._coming[longest]
        if not longest.expired():
            longest.reschedule(now)
