"""Whatever keeps a server from starting, or from ending in order, is what ``run`` raises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette

from feedback.config import FeedbackConfig
from serve import app
from serve.config import ServeConfig
from serve.runtime import Server, ServerDied


class Started(Server):
    """Starts nothing, and fails as it is told."""

    wrong: Callable[[], None] = staticmethod(lambda: None)

    def prepare(self, stopped: Callable[[], bool]) -> None:
        pass

    async def start(self) -> None:
        self.wrong()

    async def close(self) -> None:
        pass


@asynccontextmanager
async def broken(_: Starlette) -> AsyncIterator[None]:
    raise OSError("no such page")
    yield


@asynccontextmanager
async def broken_at_the_end(_: Starlette) -> AsyncIterator[None]:
    asyncio.get_running_loop().call_soon(stop.pop())
    yield
    raise OSError("it does not end")


stop: list[Callable[[], None]] = []


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    monkeypatch.setattr(app, "skip_teardown", lambda reason: None)  # of this process
    folders = {name: str(tmp_path / name) for name in ("policies", "replicas", "keys", "audit")}
    return Started(ServeConfig(port=0, **folders), FeedbackConfig())  # type: ignore[arg-type]


def run(server: Started, lifespan: Callable[[Starlette], object] | None = None) -> None:
    console = None if lifespan is None else lambda *_: Starlette(lifespan=lifespan)  # type: ignore[arg-type]
    app.run(server.config, FeedbackConfig(), server, console)


def test_a_start_that_is_cancelled_says_so_and_where(server: Started, caplog: pytest.LogCaptureFixture) -> None:
    def cancelled() -> None:
        raise asyncio.CancelledError("by nobody knows whom")

    server.wrong = cancelled
    with pytest.raises(ServerDied, match="by nobody knows whom"):
        run(server)
    assert any(record.exc_info for record in caplog.records if record.name == "serve.app")


def test_pages_that_can_not_start_or_end_are_the_servers_failure(server: Started) -> None:
    with pytest.raises(OSError, match="no such page"):
        run(server, broken)
    server.failure = None
    stop.append(lambda: server.on_death())
    with pytest.raises(OSError, match="it does not end"):
        run(server, broken_at_the_end)
