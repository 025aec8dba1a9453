"""A child process that answers one question after the other: what reads files or the lake never stalls a token.

Nor does what it allocates stay in the server: native threads' memory comes and goes by the hundred MiB in a process
that reads the lake. The child is started by the first request and ends after some idle minutes. It has a bound on
time: one that is over it is killed, and the next request starts another. It ends with its parent, whose end of the
pipe it reads from.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from feedback.processes.signals import stop_signals_blocked

log = logging.getLogger(__name__)

LINE_BYTES: Final = 32 << 20
"""Of an answer; a longer one is not taken."""

_START_S: Final = 120.0  # a busy machine's imports
_IDLE_S: Final = 600.0
_WAIT_S: Final = 30.0  # for the requests before it
_starting: Final = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()
"""One process starts at a time: what blocks signals meanwhile is undone in the order in which it was done."""


class ReadFailed(Exception):
    """There is no answer; the text says why."""


class Reader:
    """One child, one request at a time.

    The child runs a module: it reads ``task``, a line, if there is one, prints a line when it is ready, and then
    answers each line of JSON with another.
    """

    def __init__(
        self,
        module: Sequence[str],
        timeout_s: float,
        *,
        waiting: int,
        waiting_each: int | None = None,
        task: str = "",
        environment: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        """``module``: its name and arguments; ``timeout_s``: of one request, without the child's start.

        ``waiting``: how many requests may wait for the one before, and ``waiting_each``: of one principal.
        ``task``: what the child gets that no list of processes may show. ``environment``: its own, or ours.
        """
        self._module = tuple(module)
        self._timeout_s = timeout_s
        self._most, self._most_each = waiting, waiting if waiting_each is None else waiting_each
        self._task = task
        self._environment = environment
        self._turn = asyncio.Lock()
        self._waiting: Counter[str] = Counter()
        self._child: asyncio.subprocess.Process | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def read(self, request: dict[str, Any], who: str = "") -> dict[str, Any]:
        """The answer to a request of ``who``, a principal. Raises ReadFailed."""
        async with self._in_turn(who):
            if self._idle is not None:
                self._idle.cancel()
            try:
                child = await self._started()
                return await self._ask(child, request)
            except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
                over = isinstance(error, TimeoutError)
                reason = f"it took longer than {self._timeout_s:g} s" if over else "its process ended; the log says why"
                log.warning("%s gave no answer: %s (%s)", self._module[0], reason, type(error).__name__)
                self._end()
                raise ReadFailed(reason) from error
            except BaseException:  # cancelled: what comes now would be taken for the next answer
                self._end()
                raise
            finally:
                self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self._end)

    async def close(self) -> None:
        """End the child, and wait for that."""
        if self._idle is not None:
            self._idle.cancel()
        child = self._child
        self._end()
        if child is not None:
            await child.wait()

    @contextlib.asynccontextmanager
    async def _in_turn(self, who: str) -> AsyncIterator[None]:
        """Wait for the child, with no more than a bounded number of others. Raises ReadFailed."""
        if self._waiting[who] >= self._most_each:
            raise ReadFailed(f"{self._most_each} requests of yours wait for others already")
        if self._waiting.total() >= self._most:
            raise ReadFailed(f"{self._most} requests wait for others already")
        self._waiting[who] += 1
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise ReadFailed(f"the requests before it took more than {_WAIT_S:g} s") from None
        finally:
            self._waiting -= Counter((who,))  # and forget whom none is left of
        try:
            yield
        finally:
            self._turn.release()

    async def _ask(self, child: asyncio.subprocess.Process, request: dict[str, Any]) -> dict[str, Any]:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(request).encode() + b"\n")
        async with asyncio.timeout(self._timeout_s):
            await child.stdin.drain()
            line = await child.stdout.readuntil()
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _started(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        async with _starting.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            with stop_signals_blocked():  # it ends with the pipe, after the request that it is at
                child = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", *self._module),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=LINE_BYTES,
                    env=self._environment() if self._environment else None,
                    start_new_session=True,
                )
        self._child = child
        assert child.stdin is not None
        assert child.stdout is not None
        async with asyncio.timeout(_START_S):
            if self._task:
                child.stdin.write(self._task.encode() + b"\n")
                await child.stdin.drain()
            await child.stdout.readuntil()  # it says that it is ready
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
