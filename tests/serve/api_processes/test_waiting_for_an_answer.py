"""How long the first API process waits for another one's answer."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from serve.api_processes.first import within
from serve.api_processes.link import Link


async def test_an_answer_that_waited_while_this_process_was_stopped_is_in_time_and_none_is_not(tmp_path: Path) -> None:
    """As after SIGSTOP and SIGCONT of a whole server, when all that was asked before seems to be overdue."""
    answering = asyncio.Event()

    async def other_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Link(reader, writer, {"ping": lambda: "here", "hang": answering.wait}).run()

    server = await asyncio.start_unix_server(other_end, str(tmp_path / "link"))
    link = Link(*await asyncio.open_unix_connection(str(tmp_path / "link")), {})
    reading = asyncio.create_task(link.run())
    asyncio.get_running_loop().call_soon(time.sleep, 0.5)  # longer than it may take
    assert await within(0.2, link.call("ping")) == "here"
    with pytest.raises(TimeoutError):
        await within(0.2, link.call("hang"))
    reading.cancel()
    server.close()
