"""Calls between two processes of a server, in both directions, over one socket of this machine.

A message is its length and a pickle: both ends are one program of one user, and the socket lies in a folder that
nobody else may enter. What a call raises is raised at the caller as its text. A caller that is cancelled cancels the
call.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import pickle
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

log = logging.getLogger(__name__)

_LENGTH: Final = struct.Struct("<I")
_CALL, _RESULT, _ERROR, _CANCEL = range(4)

Handler = Callable[..., Any]
"""A function, which is called in the messages' order, or a coroutine function, which gets a task of its own."""


class LinkBroken(ConnectionError):
    """The process at the other end has gone."""


class CallFailed(RuntimeError):
    """A call failed at the other end; the text says how."""


class Link:
    """One end. ``run`` reads until the other end goes."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handlers: Mapping[str, Handler]
    ) -> None:
        """``handlers``: what the other end may call, by name."""
        self._reader = reader
        self._writer = writer
        self._handlers = handlers
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._broken = False

    async def call(self, name: str, *arguments: Any) -> Any:
        """What the handler of that name returns there. Raises LinkBroken, CallFailed."""
        number = next(self._numbers)
        result = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(_CALL, number, (name, arguments))
            return await result
        except asyncio.CancelledError:
            with suppress(LinkBroken):
                self._send(_CANCEL, number, None)
            raise
        finally:
            self._waiting.pop(number, None)

    def tell(self, name: str, *arguments: Any) -> None:
        """Call a handler there, and wait for nothing. Raises LinkBroken."""
        self._send(_CALL, None, (name, arguments))

    async def run(self) -> None:
        """Serve calls until the connection ends; what waits for an answer then raises LinkBroken."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                self._take(*pickle.loads(await self._reader.readexactly(length)))  # noqa: S301 - from a process of ours
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            log.debug("the link has ended: %s", error)
        except Exception:
            log.exception("the link to another API process is broken")
        finally:
            self._broken = True
            self._writer.close()
            for result in self._waiting.values():
                if not result.done():
                    result.set_exception(LinkBroken("the other API process has gone"))
            for task in self._serving.values():
                task.cancel()

    def _send(self, kind: int, number: int | None, content: Any) -> None:
        if self._broken:
            raise LinkBroken("the other API process has gone")
        message = pickle.dumps((kind, number, content), pickle.HIGHEST_PROTOCOL)
        self._writer.write(_LENGTH.pack(len(message)) + message)

    def _take(self, kind: int, number: int | None, content: Any) -> None:
        if kind == _CALL:
            self._serve(number, *content)
        elif kind == _CANCEL:
            if (task := self._serving.get(number or 0)) is not None:
                task.cancel()
        elif (result := self._waiting.get(number or 0)) is not None and not result.done():
            if kind == _RESULT:
                result.set_result(content)
            else:
                result.set_exception(CallFailed(content))

    def _serve(self, number: int | None, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = self._handlers[name](*arguments)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self._answer_error(number, name, error)
            return
        if not inspect.isawaitable(result):
            self._answer(number, result)
            return
        task = asyncio.ensure_future(self._await(number, name, result))
        if number is not None:
            self._serving[number] = task
            task.add_done_callback(lambda _: self._serving.pop(number, None))

    async def _await(self, number: int | None, name: str, work: Awaitable[Any]) -> None:
        try:
            result = await work
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self._answer_error(number, name, error)
        else:
            self._answer(number, result)

    def _answer(self, number: int | None, result: Any) -> None:
        if number is not None:
            with suppress(LinkBroken):  # nobody waits for it any more
                self._send(_RESULT, number, result)

    def _answer_error(self, number: int | None, name: str, error: Exception) -> None:
        log.error("%s, called by another API process, failed", name, exc_info=error)
        if number is not None:
            with suppress(LinkBroken):
                self._send(_ERROR, number, f"{type(error).__name__}: {error}")
