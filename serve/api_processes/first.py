"""The further API processes as the first one has them: started, told what serves, asked, ended and replaced.

One that ends by itself is replaced, and so is one that does not answer, once it has been killed. The new one is another
client of the engine, and a new session of the journal: what the dead one had acknowledged is recovered as any dead
writer's. After ``REPLACEMENTS`` of them, or while the server starts, the death of one is the server's: the others
finish what they have, and whatever keeps the server running starts it anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.types import ASGIApp

from feedback.config import FeedbackConfig
from feedback.trusted_code import consented
from serve.admission import ActiveRequests
from serve.api_processes.forwarding import serve_forwarded
from serve.api_processes.further import COUNTS, SOCKET, Beginning, Serving
from serve.api_processes.link import CallFailed, Link, LinkBroken
from serve.api_processes.process import CUT_OFF_S
from serve.config import ServeConfig
from serve.engine import EngineError
from serve.middleware.api_keys import ApiKey
from serve.middleware.rate_limits import Limiter
from serve.vllm import boot, engine_process

if TYPE_CHECKING:
    from serve.vllm.engine import EngineClient
    from serve.vllm.engine_process import WaitingProcess

log = logging.getLogger(__name__)

REPLACEMENTS: Final = 8
"""How many times a process is replaced before the server ends with it."""

_NEWS_S: Final = 0.2
_ANSWER_S: Final = 5.0  # a further process that doesn't take in what serves by then is ended
_BEAT_S: Final = 1.0  # between two questions whether one answers
_POLL_S: Final = 0.1
_AGAIN_S: Final = 5.0  # between two tries to start one for which there was no memory
_END_S: Final = 10.0  # to close a journal, beyond the drain


Result = TypeVar("Result")


@dataclass
class _Further:
    process: SpawnProcess
    link: Link | None = None
    attached: bool = False
    lost: bool = False
    metrics: bytes | None = None
    """The last text that it gave."""


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
        self.spare = REPLACEMENTS
        self.folder = Path(tempfile.mkdtemp(prefix="millrace-api-"))  # nobody else may enter it
        self.active = ActiveRequests.in_file(self.folder / COUNTS, config.api_processes + self.spare, 0)
        self.waiting: list[WaitingProcess] = []
        """Forked processes that become the further ones; where there are none, interpreters are started."""
        self.keys: Callable[[], tuple[ApiKey, ...]] = tuple
        """Those that the first process knows; set before they start."""
        self.policy: Callable[[], Path] | None = None
        """The folder of the policy that serves, for those that take others' places: retention may have removed that of
        the start."""
        self.app: ASGIApp | None = None
        """What answers the requests that they hand on; set before they serve."""
        self.on_loss: Callable[[EngineClient, str, bool], None] = lambda client, how, replaced: None
        """Called when one has ended by itself: which, how, and whether another one takes its place."""
        self._all: dict[int, _Further] = {}  # one that is replaced is put there in a thread
        self._clients: dict[int, EngineClient] = {}
        self._spare: list[EngineClient] = []
        self._ended_metrics: list[bytes] = []
        self._limiter: Limiter | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._may_serve = asyncio.Event()
        self._starting = asyncio.Lock()  # a start changes this process's environment for a moment
        self._stopping = False
        self._engine_died = False

    async def open(
        self, limiter: Limiter, serving: Callable[[], Serving], news: Callable[[], tuple[dict[str, float], str | None]]
    ) -> None:
        """Listen for them. ``limiter``: whose buckets count for all; ``serving``, ``news``: what they are told."""
        self._limiter, self._serving, self._news = limiter, serving, news
        self._server = await asyncio.start_unix_server(self._connected, str(self.folder / SOCKET))

    def begin(self, clients: Sequence[EngineClient]) -> None:
        """Start as many as there are to be; each waits until the engine is ready.

        In any thread, while an engine is launched.
        """
        self._clients = {client.index: client for client in clients}
        for client in clients[: self.count]:
            self._start(client)
        self._spare = list(clients[self.count :])

    def _start(self, client: EngineClient) -> None:
        beginning = Beginning(
            self._config,
            self._feedback_config,
            client,
            self.folder,
            self._port,
            os.getpid(),
            self.keys(),
            consented(),
        )
        waiting = self.waiting.pop() if self.waiting else None
        process = engine_process.start(self._main, (beginning,), f"api {client.index}", waiting)
        self._all[client.index] = _Further(process)

    async def prepare(self) -> None:
        """Return when all of them could serve.

        Raises EngineError if one ends, or takes longer than ``start_timeout_s``.
        """
        deadline = time.monotonic() + self._config.engine.start_timeout_s
        while not all(one.attached for one in list(self._all.values())):
            await self._wait(deadline)
        await self.agree(self._serving())
        self._spawn(self._tell_news(), "news for the further API processes")

    def begin_to_listen(self) -> None:
        """Have them accept connections: the first process does."""
        self._may_serve.set()

    async def agree(self, serving: Serving) -> None:
        """Return when each has taken in what serves, or is dead: one that doesn't answer is killed.

        One that still starts hears of it when it has attached itself.
        """

        async def agree(index: int, one: _Further) -> None:
            if not await self._answers(index, one, _ANSWER_S, "serve", serving):
                await asyncio.to_thread(one.process.join, _END_S)

        await asyncio.gather(*(agree(index, one) for index, one in list(self._all.items()) if one.attached))

    async def _answers(self, index: int, one: _Further, seconds: float, name: str, *arguments: Any) -> bool:
        """Whether it answers a call in time; else it is killed."""
        assert one.link is not None
        try:
            await within(seconds, one.link.call(name, *arguments))
        except (LinkBroken, CallFailed, TimeoutError) as error:
            if not self._stopping and not one.lost:
                log.error("API process %d does not answer, and is killed: %s", index, error or "it took too long")
                one.process.kill()
            return False
        return True

    async def _watch(self, index: int, one: _Further) -> None:
        """Kill it when it doesn't answer any more: of one that hangs nobody would hear."""
        while not self._stopping and await self._answers(index, one, self._config.api_process_timeout_s, "ping"):
            await asyncio.sleep(_BEAT_S)
        await self._ended(index)  # SIGKILL may not end it, and so not its link either

    def tell(self, name: str, *arguments: Any) -> None:
        """Tell all of them something."""
        for one in list(self._all.values()):
            if one.link is not None:
                with suppress(LinkBroken):
                    one.link.tell(name, *arguments)

    async def metrics(self) -> tuple[list[bytes], list[bytes]]:
        """The Prometheus texts of those that live, and the last ones of those that have ended.

        Of one that does not answer it is the last that it gave, so that no counter goes back.
        """

        async def read(one: _Further) -> None:
            assert one.link is not None
            with suppress(LinkBroken, CallFailed, TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    one.metrics = await one.link.call("metrics")

        living = list(self._all.values())
        await asyncio.gather(*(read(one) for one in living if one.link is not None))
        ended = list(self._ended_metrics)
        return [one.metrics for one in living if one.metrics is not None and one.metrics not in ended], ended

    def stop(self, *, engine_died: bool = False) -> None:
        """Have them finish what they have, and end; say so again if the engine dies then, of which they don't hear."""
        if not self._stopping or engine_died > self._engine_died:
            self._stopping, self._engine_died = True, engine_died
            self.tell("stop", engine_died)

    async def close(self) -> None:
        """Return when they have ended; those that don't serve yet, or take longer than a stop may, are killed."""
        self.stop()
        began = self._may_serve.is_set()
        for one in list(self._all.values()):
            if began and not one.attached:  # one that was to replace another
                one.process.kill()
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
        return [index for index, one in list(self._all.items()) if one.process.exitcode is None]

    async def _wait(self, deadline: float) -> None:
        """Wait a moment for those that start. Raises EngineError."""
        for index, one in list(self._all.items()):
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
            one = self._all[index]
            if self._stopping:  # it has not been told to end
                one.process.kill()
                return
            one.attached = True
            link.tell("serve", self._serving())
            link.tell("news", *self._news())
            self._spawn(self._watch(index, one), f"watch API process {index}")
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
        if own:
            await self._ended(own[0])

    async def _ended(self, index: int) -> None:
        """Make sure that one which has ended, or let go of its link, is dead; then have another one take its place."""
        one = self._all.get(index)
        if one is None or one.lost or self._stopping:
            return
        one.lost = True
        await asyncio.to_thread(one.process.join, _END_S)
        if one.process.exitcode is None:
            one.process.kill()
            await asyncio.to_thread(one.process.join, _END_S)
        code = one.process.exitcode
        if self._stopping:
            return
        if one.metrics is not None:
            self._ended_metrics.append(one.metrics)
        # One that even SIGKILL does not end is held by the machine: it could still write to what is the next one's.
        replaced = code is not None and bool(self._spare) and self._may_serve.is_set()
        if code is not None:
            del self._all[index]
            self.active.clear(index)
        self.on_loss(self._clients[index], f"ended with code {code}", replaced)
        if replaced:
            self._spawn(self._replace(self._spare.pop(0)), f"replace API process {index}")

    async def _replace(self, client: EngineClient) -> None:
        def start() -> None:
            with boot.server_children(self._config.engine):
                self._start(client)

        if self.policy is not None:
            client = replace(client, arguments=client.arguments | {"model": str(self.policy())})
        deadline = time.monotonic() + self._config.engine.start_timeout_s
        while client.index not in self._all:
            async with self._starting:
                if self._stopping:
                    return
                try:
                    await asyncio.to_thread(start)
                except OSError as error:  # no memory, or too many processes
                    log.error("API process %d can't be started: %s", client.index, error)
                    if time.monotonic() > deadline:
                        self.on_loss(client, f"can't be started: {error}", False)
                        return
            if client.index not in self._all:
                await asyncio.sleep(_AGAIN_S)
        one, deadline = self._all[client.index], time.monotonic() + self._config.engine.start_timeout_s
        while not one.attached and not self._stopping and one.process.exitcode is None:
            if time.monotonic() > deadline:
                log.error("API process %d did not start within serve.engine.start_timeout_s", client.index)
                one.process.kill()
            await asyncio.sleep(_POLL_S)
        if one.attached:
            log.warning("API process %d takes its place", client.index)
        else:
            await self._ended(client.index)

    async def _tell_news(self) -> None:
        told = None
        while True:
            await asyncio.sleep(_NEWS_S)
            if (now := self._news()) != told:
                self.tell("news", *now)
                told = now

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def within(seconds: float, call: Coroutine[Any, Any, Result]) -> Result:
    """As ``asyncio.timeout``, counting time in which this process ran: an answer may wait in one that was held up."""
    answer = asyncio.create_task(call)
    try:
        for _ in range(max(1, round(seconds / _POLL_S))):
            if (await asyncio.wait({answer}, timeout=_POLL_S))[0]:
                return answer.result()
        raise TimeoutError
    finally:
        answer.cancel()
