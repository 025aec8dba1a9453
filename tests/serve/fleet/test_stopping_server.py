"""Signals to all processes of a server at once: what is at work ends whole, and then everything ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loadtests.event_lines import lines_of
from serve.policies.store import PolicyStore
from tests.serve.conftest import LiveServer, start_server
from tests.trees import exposed, left_of, send_to_all, tree

PATIENCE_S = 600
FLEET = {"replicas": 2, "num_cpus": 0.5, "health_check_period_s": 2}


@pytest.fixture(params=["one", pytest.param("fleet", marks=pytest.mark.long)])
def live(request: pytest.FixtureRequest, tmp_path: Path, model_folders: list[Path]) -> Iterator[LiveServer]:
    store = PolicyStore(tmp_path / "policies")
    store.publish(model_folders[0], parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    is_fleet = request.param == "fleet"
    live = start_server(tmp_path, store, forked=False, drain_timeout_s=120, **({"fleet": FLEET} if is_fleet else {}))
    deadline = time.monotonic() + PATIENCE_S
    while is_fleet and len(httpx.get(f"{live.url}/ready", timeout=60).json()["replicas"]) < 2:
        assert time.monotonic() < deadline, live.log.read_text()[-3000:]
        time.sleep(0.2)
    yield live
    live.process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
async def test_a_signal_to_every_process_at_once_cuts_off_nothing(live: LiveServer, number: signal.Signals) -> None:
    at_work = asyncio.Semaphore(0)

    async def ask(client: httpx.AsyncClient, n: int) -> list[str]:
        body: dict[str, Any] = {"prompt": "hello", "max_tokens": 240, "n": n, "stream": True, "user": "last"}
        async with client.stream("POST", "/generate", json=body) as answer:
            lines = lines_of(answer)
            events = [await anext(lines)]
            at_work.release()
            return [line for line in events + [line async for line in lines] if line.startswith("event:")]

    async with httpx.AsyncClient(base_url=live.url, timeout=300) as client:
        asking = [asyncio.create_task(ask(client, 1 + i % 3)) for i in range(6)]
        async with asyncio.timeout(PATIENCE_S):
            for _ in asking:
                await at_work.acquire()
        processes = tree(live.process.pid)
        assert exposed(processes) == {}
        send_to_all(processes if number == signal.SIGTERM else foreground(processes), number)
        ends = [events[-1] for events in await asyncio.gather(*asking)]
    assert ends == ["event: done"] * len(asking)
    assert await asyncio.to_thread(live.process.wait, PATIENCE_S) == 0, live.log.read_text()[-3000:]
    assert left_of(processes) == []
    rows = live.rows("interactions", "\"user\" = 'last'")
    assert [row["status"] for row in rows] == ["complete"] * sum(1 + i % 3 for i in range(6))
    assert not list((live.home / "journal").glob("interactions*"))  # all of it is sealed
    output = live.log.read_text()
    assert "Traceback" not in output, output


def foreground(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that a terminal sends its signal to: HAProxy can't ignore that one, and is in a session of its own."""
    return [process for process in processes if os.getpgid(process.pid) == os.getpgid(processes[0].pid)]


def test_a_server_whose_engine_still_starts_ends_without_waiting_for_it(
    tmp_path: Path, model_folders: list[Path]
) -> None:
    store = PolicyStore(tmp_path / "policies")
    store.publish(model_folders[0], parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    started: list[str] = []

    def start() -> None:
        try:
            start_server(tmp_path, store, forked=False)
        except RuntimeError as error:  # it ended before it was ready
            started.append(str(error))

    before = {process.pid for process in psutil.Process().children()}
    starting = threading.Thread(target=start)
    starting.start()
    deadline = time.monotonic() + PATIENCE_S
    server, engines = None, []
    while not engines and time.monotonic() < deadline:
        time.sleep(0.02)
        servers = [process for process in psutil.Process().children() if process.pid not in before]
        server = servers[0] if servers else None
        engines = [child for child in (server.children() if server else []) if "EngineCore" in _name(child)]
    assert server is not None
    processes = tree(server.pid)
    server.send_signal(signal.SIGTERM)
    starting.join(PATIENCE_S)
    log = (tmp_path / "server.log").read_text()
    assert len(started) == 1, log[-3000:]
    assert left_of(processes) == []
    assert "policy 1 serves as" not in log
    assert "Traceback" not in log, log


def _name(process: psutil.Process) -> str:
    try:
        return " ".join([process.name(), *process.cmdline()])
    except psutil.NoSuchProcess:
        return ""
