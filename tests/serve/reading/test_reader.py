"""The queue for a child that answers one question after the other. A slow one is tested with the console."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from serve.reading.reader import Reader, ReadFailed


async def test_who_asks_for_much_is_told_so_and_nobody_waits_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stopped(Reader):  # a request takes all the time it is given; queue and bounds are the product's
        async def _started(self) -> Any:
            return None

        async def _ask(self, child: Any, request: dict[str, Any]) -> dict[str, Any]:
            await free.wait()
            return {}

    free, reader = asyncio.Event(), Stopped(["unused"], 60, waiting=32, waiting_each=8)

    async def ask(who: str) -> asyncio.Task[dict[str, Any]]:
        task = asyncio.create_task(reader.read({}, who))
        await asyncio.sleep(0)
        return task

    queue = [await ask("ann") for _ in range(9)]  # one is read, eight wait
    with pytest.raises(ReadFailed, match="8 requests of yours wait"):
        await (await ask("ann"))
    queue += [await ask(f"user {number}") for number in range(24)]
    with pytest.raises(ReadFailed, match="32 requests wait"):
        await (await ask("bob"))
    queue.pop().cancel()
    await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        patch.setattr("serve.reading.reader._WAIT_S", 0)
        with pytest.raises(ReadFailed, match="requests before it took more than 0 s"):
            await (await ask("bob"))
    queue.append(await ask("bob"))
    free.set()
    assert await asyncio.gather(*queue) == [{}] * 33
    assert not reader._waiting


ECHO = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""


def test_processes_that_start_together_leave_signals_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo_lines.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, ())

    async def read() -> list[dict[str, Any]]:
        readers = [Reader(["echo_lines"], 60, waiting=1) for _ in range(3)]
        try:
            return await asyncio.gather(*(reader.read({"number": at}) for at, reader in enumerate(readers)))
        finally:
            for reader in readers:
                await reader.close()

    assert asyncio.run(read()) == [{"number": at} for at in range(3)]
    assert (signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, ())) == before
