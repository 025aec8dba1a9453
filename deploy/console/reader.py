"""A child process that reads files and the lake and renders pages: the server's event loop never waits for them.

It is started by the first request, goes second to the server (nice), and has bounds on time and memory: one that is
over them is killed, and the next request starts another. It ends with its parent, whose end of the pipe it reads from.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from deploy.config.root import child_environment
from deploy.console.worker import LINE_BYTES
from feedback.process_signals import stop_signals_blocked

log = logging.getLogger(__name__)

_START_S: Final = 120.0  # a busy machine's imports
_IDLE_S: Final = 600.0
_WAIT_S: Final = 30.0  # for the requests before it
_WAITING: Final = 32
_WAITING_EACH: Final = 8  # of one principal


class ReadFailed(Exception):
    """The page can't be read; the text says why."""


class Reader:
    """One child, one request at a time."""

    def __init__(self, snapshot: Path, timeout_s: float) -> None:
        """``snapshot``: a file with the settings; ``timeout_s``: of one request, without the child's start."""
        self._snapshot = snapshot
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._waiting: Counter[str] = Counter()
        self._child: asyncio.subprocess.Process | None = None
        self._numbers = itertools.count(1)
        self._idle: asyncio.TimerHandle | None = None

    async def read(self, request: dict[str, Any], who: str = "") -> dict[str, Any]:
        """What ``deploy.console.worker`` answers to a request of ``who``, a principal. Raises ReadFailed."""
        async with self._in_turn(who):
            if self._idle is not None:
                self._idle.cancel()
            try:
                child = await self._started()
                return await self._ask(child, request)
            except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
                over = isinstance(error, TimeoutError)
                reason = f"it took longer than {self._timeout_s:g} s" if over else "its process ended; the log says why"
                log.warning("console: %s could not be read: %s (%s)", request["page"], reason, type(error).__name__)
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
        if self._waiting[who] >= _WAITING_EACH:
            raise ReadFailed(f"{_WAITING_EACH} pages of yours wait for others already")
        if self._waiting.total() >= _WAITING:
            raise ReadFailed(f"{_WAITING} pages wait for others already")
        self._waiting[who] += 1
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise ReadFailed(f"the pages asked for before took more than {_WAIT_S:g} s") from None
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
        with stop_signals_blocked():  # it ends with the pipe, after the page that it is at
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "deploy.console.worker", str(self._snapshot), str(self._timeout_s)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
                env=child_environment(),
                start_new_session=True,
            )
        self._child = child
        assert child.stdout is not None
        async with asyncio.timeout(_START_S):
            await child.stdout.readuntil()  # it says that it is ready
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
