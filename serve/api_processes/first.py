"""The further API processes as the first one has them: started, told what serves, asked, and ended.

One that ends by itself ends the server, as the engine's death does: the others finish what they have, and whatever
keeps the server running starts it anew. What the dead one had acknowledged is in its journal, which is recovered as any
dead writer's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from starlette.types import ASGIApp

from feedback.config import FeedbackConfig
from serve.admission import ActiveRequests
from serve.api_processes.forwarding import serve_forwarded
from serve.api_processes.further import COUNTS, SOCKET, Beginning, Serving
from serve.api_processes.link import CallFailed, Link, LinkBroken
from serve.api_processes.process import CUT_OFF_S
from serve.config import ServeConfig
from serve.engine import EngineError
from serve.middleware.rate_limits import Limiter
from serve.vllm import engine_process

if TYPE_CHECKING:
    from serve.vllm.engine import EngineClient
    from serve.vllm.engine_process import WaitingProcess

log = logging.getLogger(__name__)

_NEWS_S: Final = 0.2
_ANSWER_S: Final = 5.0  # a further process that doesn't take in what serves by then is ended
_POLL_S: Final = 0.1
_END_S: Final = 10.0  # to close a journal, beyond the drain


@dataclass
class _Further:
    process: SpawnProcess
    link: Link | None = None
    attached: bool = False


class FurtherProcesses:
    """All further processes of a server."""

    def __init__(
        self, config: ServeConfig, feedback_config: FeedbackConfig, port: int, main: Callable[[Beginning], None]
    ) -> None:
        """``main``: what such a process runs, a function of a module; ``port``: what all listen on."""
        self._config = config
        self._feedback_config = feedback_config
        self._port = port
        self._main = main
        self.count = config.api_processes - 1
        self.folder = Path(tempfile.mkdtemp(prefix="millrace-api-"))  # nobody else may enter it
        self.active = ActiveRequests.in_file(self.folder / COUNTS, config.api_processes, 0)
        self.waiting: list[WaitingProcess] = []
        """Forked processes that become the further ones; where there are none, interpreters are started."""
        self.app: ASGIApp | None = None
        """What answers the requests that they hand on; set before they serve."""
        self.on_loss: Callable[[int, str], None] = lambda index, why: None
        """Called when one has ended by itself: which, and how."""
        self._all: dict[int, _Further] = {}
        self._limiter: Limiter | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._may_serve = asyncio.Event()
        self._stopping = False

    async def open(self, limiter: Limiter) -> None:
        """Listen for them. ``limiter``: whose buckets count for all."""
        self._limiter = limiter
        self._server = await asyncio.start_unix_server(self._connected, str(self.folder / SOCKET))

    def begin(self, clients: Sequence[EngineClient]) -> None:
        """Start them; each waits until the engine is ready. In any thread, while an engine is launched."""
        for client in clients:
            beginning = Beginning(
                self._config, self._feedback_config, client, self.folder, self._port, parent=os.getpid()
            )
            waiting = self.waiting.pop() if self.waiting else None
            process = engine_process.start(self._main, (beginning,), f"api {client.index}", waiting)
            self._all[client.index] = _Further(process)

    async def prepare(
        self, serving: Callable[[], Serving], news: Callable[[], tuple[dict[str, float], str | None]]
    ) -> None:
        """Return when all of them could serve. ``serving``, ``news``: what they are told, then and later.

        Raises EngineError if one ends, or takes longer than ``start_timeout_s``.
        """
        deadline = time.monotonic() + self._config.engine.start_timeout_s
        while not all(one.attached for one in self._all.values()):
            await self._wait(deadline)
        await self.agree(serving())
        self._spawn(self._tell_news(news), "news for the further API processes")

    def begin_to_listen(self) -> None:
        """Have them accept connections: the first process does."""
        self._may_serve.set()

    async def agree(self, serving: Serving) -> None:
        """Return when each has taken in what serves. One that doesn't is ended, and the server with it."""

        async def agree(index: int, one: _Further) -> None:
            if one.link is None:
                return
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await one.link.call("serve", serving)
            except (LinkBroken, CallFailed, TimeoutError) as error:
                if not self._stopping:
                    log.error("API process %d does not answer, and is ended: %s", index, error or "it took too long")
                    one.process.kill()

        await asyncio.gather(*(agree(index, one) for index, one in self._all.items()))

    def tell(self, name: str, *arguments: Any) -> None:
        """Tell all of them something."""
        for one in self._all.values():
            if one.link is not None:
                with suppress(LinkBroken):
                    one.link.tell(name, *arguments)

    async def metrics(self) -> list[bytes]:
        """The Prometheus texts of those that answer."""

        async def text(link: Link) -> bytes | None:
            with suppress(LinkBroken, CallFailed, TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    found: bytes = await link.call("metrics")
                    return found
            return None

        links = [one.link for one in self._all.values() if one.link is not None]
        return [found for found in await asyncio.gather(*map(text, links)) if found is not None]

    def stop(self, *, engine_died: bool = False) -> None:
        """Have them finish what they have, and end."""
        if not self._stopping:
            self._stopping = True
            for one in self._all.values():
                if one.link is not None:
                    with suppress(LinkBroken):
                        one.link.tell("stop", engine_died)

    async def close(self) -> None:
        """Return when they have ended; those that don't serve yet, or take longer than a stop may, are killed."""
        self.stop()
        began = self._may_serve.is_set()
        deadline = time.monotonic() + (self._config.drain_timeout_s + 2 * CUT_OFF_S + _END_S if began else 0)
        while (alive := self._alive()) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        for index in alive:
            if began:
                log.error("API process %d did not end in time, and is killed", index)
            self._all[index].process.kill()
            await asyncio.to_thread(self._all[index].process.join, _END_S)
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        self.discard()

    def discard(self) -> None:
        """Let go of what was there before the start."""
        for waiting in self.waiting:
            waiting.close()
        self.waiting.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _alive(self) -> list[int]:
        return [index for index, one in self._all.items() if one.process.exitcode is None]

    async def _wait(self, deadline: float) -> None:
        """Wait a moment for those that start. Raises EngineError."""
        for index, one in self._all.items():
            if (code := one.process.exitcode) is not None:
                raise EngineError(f"API process {index} ended with code {code} while it started; the log says why")
        if time.monotonic() > deadline:
            raise EngineError("an API process did not start within serve.engine.start_timeout_s")
        await asyncio.sleep(_POLL_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own: list[int] = []
        assert self._limiter is not None
        buckets = self._limiter.buckets

        def hello(index: int) -> None:
            own.append(index)
            self._all[index].link = link

        async def attached(index: int) -> None:
            self._all[index].attached = True
            await self._may_serve.wait()

        async def request(number: int, scope: dict[str, Any]) -> None:
            assert self.app is not None
            await serve_forwarded(self.app, link, number, scope)

        link = Link(
            reader,
            writer,
            {
                "hello": hello,
                "attached": attached,
                "request": request,
                "take": buckets.take,
                "give_back": buckets.give_back,
            },
        )
        await link.run()
        if own and not self._stopping:
            index = own[0]
            process = self._all[index].process
            await asyncio.to_thread(process.join, _END_S)
            if process.exitcode is None:
                process.kill()
            self.on_loss(index, f"ended with code {process.exitcode}")

    async def _tell_news(self, news: Callable[[], tuple[dict[str, float], str | None]]) -> None:
        told = None
        while True:
            await asyncio.sleep(_NEWS_S)
            if (now := news()) != told:
                self.tell("news", *now)
                told = now

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
