"""The front of a fleet alone: a real HAProxy before small applications on the listeners that replicas have."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.types import Receive, Scope, Send

from serve.config import ServeConfig
from serve.fleet.assignment import HEADER
from serve.fleet.front import process
from serve.fleet.front.configuration import places_of
from serve.fleet.front.listener import Listener
from serve.fleet.front.process import Front, FrontError
from serve.local_ray.cluster import FOLDER, environment
from serve.middleware.authentication import client_of
from serve.middleware.connections import CLIENT, HEAD_BYTES, USER, bind
from serve.middleware.request_context import well_formed_id
from tests.paths import ROOT

PROXY, STRANGER = "127.0.0.2", "127.0.0.3"
PATIENCE_S = 60
SERVE = {
    "fleet": {"replicas": 2},
    "proxies": [PROXY],
    "sso": {"header": "X-Forwarded-User", "proxies": [PROXY]},
    "limits": {"timeout_s": 60},
}


class Application:
    """Says what it sees of a request. ``/wait`` answers once ``go`` is set, ``/stream`` after its first half."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.go = asyncio.Event()
        self.at_work = 0
        self.left = 0
        self.unready: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.at_work += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self.at_work -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        body = b""
        while (message := await receive()).get("more_body", False):
            body += message.get("body", b"")
        body += message.get("body", b"")
        seen = {
            "by": self.name,
            "client": client_of(scope),
            "user": USER in scope,
            "headers": headers,
            "bytes": len(body),
        }
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
        if scope["path"] == "/stream":
            await send(start)
            await send({"type": "http.response.body", "body": b"first,", "more_body": True})
        if scope["path"] in ("/wait", "/stream"):
            gone = asyncio.ensure_future(receive())
            going = asyncio.ensure_future(self.go.wait())
            await asyncio.wait([gone, going], return_when=asyncio.FIRST_COMPLETED)
            if not going.done():
                self.left += 1
        if scope["path"] != "/stream":
            await send(start)
        await send({"type": "http.response.body", "body": json.dumps(seen).encode()})


@pytest.fixture
def config() -> ServeConfig:
    return ServeConfig(**SERVE)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """As a local Ray's: short, since a socket's path has 107 bytes."""
    made = tmp_path_factory.mktemp("f")
    with environment({FOLDER: str(made)}):
        yield made


@contextmanager
def front_of(config: ServeConfig, *, by_content: bool = False) -> Iterator[tuple[Front, str]]:
    """A front, and its address."""
    with ExitStack() as stack:
        bound = bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        front = stack.enter_context(process.started(config, bound, by_content=by_content))
        assert front is not None
        yield front, url


@asynccontextmanager
async def listening(app: Application, config: ServeConfig, place: int) -> AsyncIterator[Listener]:
    found = process.folder_of_front()
    assert found is not None
    listener = Listener(app, config, found, [place], lambda: app.unready)
    await listener.start()
    try:
        yield listener
    finally:
        app.go.set()
        await listener.close(at_once=True)


async def until_answered(url: str, **wanted: Any) -> dict[str, Any]:
    """What an application says that answers as wanted."""
    deadline = time.monotonic() + PATIENCE_S
    answer = None
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        while time.monotonic() < deadline:
            answer = await client.get("/")
            if answer.status_code == 200 and wanted.items() <= answer.json().items():
                return dict(answer.json())
            await asyncio.sleep(0.05)
    raise TimeoutError(f"{wanted} never came: {answer and answer.text}")


async def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_request_shows_the_address_that_it_came_from_whatever_it_says_itself(
    config: ServeConfig, folder: Path
) -> None:
    forged = {
        "X-Forwarded-For": "10.9.9.9",
        "X-Forwarded-User": "ann",
        CLIENT: f"{'0' * 32} 10.9.9.9 1",
        HEADER: "1.0123456789abcdef0123456789abcdef;",
    }
    with front_of(config) as (_, url):
        async with listening(Application(), config, 0):
            await until_answered(url)
            for by, address, user in ((STRANGER, STRANGER, False), (PROXY, "10.9.9.9", True)):
                transport = httpx.AsyncHTTPTransport(local_address=by)
                async with httpx.AsyncClient(transport=transport, base_url=url, timeout=30) as client:
                    for _ in range(3):  # over connections to the replica that others had
                        seen = (await client.get("/", headers=forged)).json()
                        assert (seen["client"], seen["user"]) == (address, user)
                        assert not {HEADER, CLIENT, "x-forwarded-user"} & seen["headers"].keys()
            front_folder = process.folder_of_front()
            assert front_folder is not None
            transport = httpx.AsyncHTTPTransport(uds=str(front_folder / "0"))  # whoever gets there without the secret
            async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=30) as client:
                seen = (await client.get("/", headers=forged)).json()
                assert (seen["client"], seen["user"]) == ("unknown", False)


async def test_what_no_replica_can_answer_is_answered_in_the_form_of_its_path(
    config: ServeConfig, folder: Path
) -> None:
    with front_of(config) as (_, url):
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            for path, kind in (("/generate", "application/problem+json"), ("/v1/completions", "application/json")):
                answer = await client.post(path, json={}, headers={"X-Request-Id": "mine"})
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
                assert (answer.headers["content-type"], answer.headers["x-request-id"]) == (kind, "mine")
                assert "ask again" in (answer.json().get("detail") or answer.json()["error"]["message"])
            for inside in ("/-/check", "/-/routes", "/%2d/check"):
                answer = await client.get(inside, headers={"X-Request-Id": "not one"})
                assert (answer.status_code, answer.json()["status"]) == (404, 404)
                assert well_formed_id(answer.headers.get("x-request-id", "none").encode())
            for broken in (b"/-/x%zz", b"/%2d/x%"):
                url_of = httpx.URL(url).copy_with(raw_path=broken)
                assert (await client.get(url_of)).status_code == 400
            for path, kind in (("/generate", "application/problem+json"), ("/v1/models", "application/json")):
                for query, header in (("", HEAD_BYTES), ("", HEAD_BYTES * 3 // 2), ("a" * 60_000, HEAD_BYTES - 50_000)):
                    headers = {"X-Long": "a" * header, "X-Request-Id": "mine"}
                    answer = await client.get(f"{path}?{query}", headers=headers)
                    assert (answer.status_code, answer.headers["content-type"]) == (431, kind)
                    assert (answer.headers["x-request-id"], str(HEAD_BYTES) in answer.text) == ("mine", True)
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"PRI /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
        assert b"content-type: application/problem+json" in head
        assert json.loads(body)["status"] == 400
        for sent in (b"NOTHING\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * (HEAD_BYTES * 2 + 2000)):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(sent)
            answered = await asyncio.wait_for(reader.read(), 30)
            assert answered.startswith(b"HTTP/1.1 400 ")
            writer.close()


async def test_requests_go_where_few_are_at_work_and_not_to_who_is_not_ready(config: ServeConfig, folder: Path) -> None:
    first, second = Application("first"), Application("second")
    with front_of(config) as (_, url):
        async with listening(first, config, 0), listening(second, config, 5):  # the last place
            await until_answered(url, by="first")
            await until_answered(url, by="second")
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                waiting = [asyncio.create_task(client.get("/wait")) for _ in range(8)]
                await until(lambda: first.at_work + second.at_work == 8)
                assert (first.at_work, second.at_work) == (4, 4)
                first.unready = "it is not"
                await asyncio.sleep(1.5)
                assert {(await client.get("/")).json()["by"] for _ in range(8)} == {"second"}
                first.go.set()
                second.go.set()
                assert {(await each).status_code for each in waiting} == {200}
                second.unready = "nor is it"
                await asyncio.sleep(1.5)
                assert {(await client.get("/policy")).json()["by"] for _ in range(8)} == {"first", "second"}
                first.unready = None
                await until_answered(url, by="first")
                await asyncio.sleep(0.5)
                assert {(await client.get("/")).json()["by"] for _ in range(8)} == {"first"}


async def test_a_replica_that_leaves_answers_what_it_has_and_nobody_is_refused(
    config: ServeConfig, folder: Path
) -> None:
    first, second = Application("first"), Application("second")
    with front_of(config) as (_, url):
        async with listening(first, config, 0) as leaving, listening(second, config, 1):
            await until_answered(url, by="first")
            await until_answered(url, by="second")
            codes: list[int] = []
            stop = asyncio.Event()

            async def keep_asking() -> None:
                async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                    while not stop.is_set():
                        codes.append((await client.get("/")).status_code)

            askers = [asyncio.create_task(keep_asking()) for _ in range(4)]
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                waiting = [asyncio.create_task(client.get("/wait")) for _ in range(4)]
                await until(lambda: first.at_work >= 2 and second.at_work >= 2)
                closing = asyncio.create_task(leaving.close(at_once=False))
                await asyncio.sleep(2)
                assert not closing.done()
                first.go.set()
                second.go.set()
                await asyncio.wait_for(closing, 30)
                assert [(await each).status_code for each in waiting] == [200] * 4
            await asyncio.sleep(0.5)
            stop.set()
            await asyncio.gather(*askers)
    assert len(codes) > 10
    assert set(codes) == {200}


async def test_a_client_that_leaves_is_noticed_and_a_stream_comes_as_it_is_made(
    config: ServeConfig, folder: Path
) -> None:
    app = Application()
    with front_of(config) as (_, url):
        async with listening(app, config, 0):
            await until_answered(url)
            port = int(url.rpartition(":")[2])
            for path in (b"/wait", b"/stream"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
                await until(lambda: app.at_work == 1)
                if path == b"/stream":
                    assert b"first," in await asyncio.wait_for(reader.readuntil(b"first,"), 10)
                before = app.left
                writer.close()
                await until(lambda before=before: app.left == before + 1)  # type: ignore[misc]
                await until(lambda: app.at_work == 0)


async def test_who_had_a_request_at_a_replica_that_is_killed_is_told_to_ask_again(
    config: ServeConfig, folder: Path
) -> None:
    """Also on a connection that had answers before, on which HAProxy alone would say nothing."""
    with front_of(config) as (_, url), listening_process(1) as other:
        await until_answered(url, by="other")
        limits = httpx.Limits(max_connections=8, max_keepalive_connections=8)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            assert {(await client.get("/")).status_code for _ in range(16)} == {200}
            waiting = [asyncio.create_task(client.post("/wait", content=b"x" * 100_000)) for _ in range(8)]
            await asyncio.sleep(1)
            other.kill()
            answers = await asyncio.gather(*waiting)
            assert {(answer.status_code, answer.headers["retry-after"]) for answer in answers} == {(503, "2")}
            assert {answer.json()["detail"] for answer in answers} == {
                "the replica that had the request has ended; ask again"
            }
            async with listening(Application("after"), config, 1):  # in the same place
                await until_answered(url, by="after")


@contextmanager
def listening_process(place: int) -> Iterator[psutil.Process]:
    """A process of its own that listens on a place."""
    code = f"import tests.serve.fleet.test_front as t; t.listen({place})"
    started = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        yield psutil.Process(started.pid)
    finally:
        started.kill()
        started.wait()


def listen(place: int) -> None:
    """What that process does."""

    async def main() -> None:
        async with listening(Application("other"), ServeConfig(**SERVE), place):
            await asyncio.sleep(PATIENCE_S * 5)

    asyncio.run(main())


async def test_an_haproxy_that_dies_is_started_anew_as_it_was_and_no_connection_is_refused(
    config: ServeConfig, folder: Path
) -> None:
    app = Application("direct")
    with front_of(config) as (front, url):
        async with listening(app, config, 0):
            await until_answered(url, by="direct")
            kill(front)
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                waiting = [asyncio.create_task(client.get("/wait")) for _ in range(4)]
                await until(lambda: app.at_work == 4)
                # Those who have nothing at work come first, and HAProxy does not know yet that nobody is there.
                assert {(await client.get("/")).json()["by"] for _ in range(20)} == {"direct"}
                app.go.set()
                assert {(await each).status_code for each in waiting} == {200}
            front.route(True)
            kill(front)
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                assert (await client.get("/")).status_code == 503  # there is no proxy of Ray Serve's
            front.route(False)
            await until_answered(url, by="direct")


def kill(front: Front) -> None:
    """SIGKILL, and return when it is seen."""
    before = front._process
    before.kill()
    before.wait()


async def test_requests_go_through_the_proxy_from_the_moment_that_they_are_to(
    config: ServeConfig, folder: Path
) -> None:
    with front_of(config) as (front, url):
        proxy = await asyncio.start_server(_say_proxy, "127.0.0.1", front.proxy_port, reuse_port=True)
        async with proxy, listening(Application("direct"), config, 0):
            await until_answered(url, by="direct")
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                for by_content in (True, False) * 10:
                    front.route(by_content)
                    answer = await client.get("/")
                    assert answer.json()["by"] == ("proxy" if by_content else "direct")
            front._process.send_signal(signal.SIGSTOP)
            process._COMMAND_S, before = 0.5, process._COMMAND_S  # type: ignore[misc]
            try:
                with pytest.raises(OSError, match="timed out"):
                    front.route(True)
            finally:
                process._COMMAND_S = before  # type: ignore[misc]
                front._process.send_signal(signal.SIGCONT)
            front.route(False)
            await until_answered(url, by="direct")
            with pytest.raises(FrontError, match="does not take"):
                front._command("set server nothing/there state ready")


async def _say_proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    assert CLIENT.encode() in head
    writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 15\r\n\r\n{"by": "proxy"}')
    writer.close()


async def test_its_end_answers_what_is_at_work_takes_no_more_and_leaves_nothing(
    config: ServeConfig, folder: Path
) -> None:
    app = Application()
    with front_of(config) as (front, url):
        child = psutil.Process(front._process.pid)
        async with listening(app, config, 0):
            await until_answered(url)
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder / "front").iterdir()}
            assert {modes[name] for name in ("admin", "requests", "0", "secret", "haproxy.cfg")} == {0o600}
            assert stat.S_IMODE((folder / "front").stat().st_mode) == 0o700
            ports = [c.laddr for c in child.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            assert [f"http://{address.ip}:{address.port}" for address in ports] == [url]
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                waiting = asyncio.create_task(client.get("/wait"))
                await until(lambda: app.at_work == 1)
                child.send_signal(signal.SIGTERM)  # which a service manager sends to all
                draining = asyncio.create_task(asyncio.to_thread(front.drain, 60))
                await asyncio.sleep(0.5)
                with pytest.raises(httpx.ConnectError):
                    httpx.get(url)
                assert not draining.done()
                app.go.set()
                assert (await waiting).status_code == 200
                await asyncio.wait_for(draining, 30)
    assert not child.is_running()


async def test_an_haproxy_that_hangs_is_killed_and_started_anew(
    config: ServeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_BEAT_S", 0.1)
    monkeypatch.setattr(process, "_ANSWER_S", 0.3)
    with front_of(config) as (front, url):
        async with listening(Application("direct"), config, 0):
            await until_answered(url, by="direct")
            await asyncio.sleep(1)  # one that answers is left alone
            assert "does not answer" not in caplog.text
            hangs = front._process
            hangs.send_signal(signal.SIGSTOP)
            await until(lambda: front._process is not hangs)
            await until_answered(url, by="direct")
    assert "does not answer: it is killed" in caplog.text
    assert hangs.returncode == -signal.SIGKILL


async def test_a_replica_for_which_there_is_no_place_waits_for_one_and_says_so(
    config: ServeConfig, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with front_of(config) as (_, url):
        path = process.folder_of_front()
        assert path is not None
        late, never = (Application(name) for name in ("late", "never"))
        waiting = [Listener(app, config, path, range(places_of(config.fleet)), lambda: None) for app in (late, never)]
        async with AsyncExitStack() as others:
            for place in range(places_of(config.fleet)):
                await others.enter_async_context(listening(Application("other"), config, place))
            for listener in waiting:
                await listener.start()
            await until_answered(url, by="other")
            assert [listener.dead() for listener in waiting] == [None, None]
            await waiting.pop().close(at_once=False)
        assert caplog.text.count("gets no requests before one of the 6 places at the front is free") == 2
        await until_answered(url, by="late")
        await waiting.pop().close(at_once=True)


async def test_its_end_cuts_off_what_does_not_end(config: ServeConfig, folder: Path) -> None:
    app = Application()
    with front_of(config) as (front, url):
        async with listening(app, config, 0) as listener, httpx.AsyncClient(base_url=url, timeout=60) as client:
            await until_answered(url)
            waiting = asyncio.create_task(client.get("/wait"))
            await until(lambda: app.at_work == 1)
            await asyncio.to_thread(front.drain, 1)
            with pytest.raises(httpx.TransportError):
                await waiting
            await asyncio.wait_for(listener.close(at_once=True), 20)
    assert app.left == 1


def test_a_signal_while_it_starts_leaves_no_haproxy_behind(
    config: ServeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Front._command

    def signalled(front: Front, *what: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return command(front, *what)

    def stop(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(Front, "_command", signalled)
    before = signal.signal(signal.SIGTERM, stop)
    bound = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    try:
        with pytest.raises(SystemExit), process.started(config, bound, by_content=False):
            pytest.fail("the signal came before")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not [one for one in psutil.Process().children() if "haproxy" in one.name()]
    bind("127.0.0.1", port).close()


def test_the_port_of_the_proxy_is_nobody_elses(config: ServeConfig, folder: Path) -> None:
    with front_of(config) as (front, _):
        with pytest.raises(OSError, match="can't listen"):
            bind("127.0.0.1", front.proxy_port)
        bind("127.0.0.1", front.proxy_port, "join").close()


async def test_its_end_does_not_wait_for_connections_that_are_idle(config: ServeConfig, folder: Path) -> None:
    with front_of(config) as (front, url):
        async with listening(Application(), config, 0), httpx.AsyncClient(base_url=url, timeout=60) as client:
            await until_answered(url)
            assert (await client.get("/")).status_code == 200  # and its connection stays open
            await asyncio.wait_for(asyncio.to_thread(front.drain, 60), 20)


async def test_slow_clients_beyond_what_its_files_allow_wait_and_others_are_answered(
    config: ServeConfig, folder: Path
) -> None:
    with front_of(config) as (front, url):
        async with listening(Application(), config, 0):
            await until_answered(url)
            most = front._configuration.connections
            assert 4 * most + 64 < resource_limit(front._process.pid)
            with ExitStack() as slow:
                for _ in range(100):
                    connection = slow.enter_context(
                        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
                    )
                    connection.sendall(b"GET / HTTP/1.1\r\nHost: ")
                await until_answered(url)


def resource_limit(pid: int) -> int:
    return psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)[0]


def test_where_the_sockets_names_would_be_too_long_there_is_no_front_and_the_log_says_why(
    config: ServeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    with (
        environment({FOLDER: str(folder)}),
        bind("127.0.0.1", 0) as bound,
        process.started(config, bound, by_content=False) as front,
    ):
        assert front is None
    assert "too long" in caplog.text
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("binary", ["none", "broken"])
def test_without_an_haproxy_that_works_there_is_no_front_and_the_log_says_why(
    binary: str, config: ServeConfig, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "haproxy"
    if binary == "broken":
        path.write_text("#!/bin/sh\necho it is not made for this machine >&2\nexit 3\n")
        path.chmod(0o700)
    with environment({"RAY_SERVE_HAPROXY_BINARY_PATH": str(path)}), bind("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with process.started(config, bound, by_content=False) as front:
            assert front is None
            assert process.folder_of_front() is None
            bind("127.0.0.1", port).close()  # Ray Serve's proxy may listen there
    assert "pass Ray Serve's proxy" in caplog.text
    assert (
        "it is not made for this machine" if binary == "broken" else "does not point to an executable"
    ) in caplog.text


def test_it_is_of_use_where_any_replica_may_answer() -> None:
    for fleet, expected in (
        ({"replicas": 2}, True),
        ({"replicas": 2, "sticky": "session"}, False),
        ({"replicas": 2, "max_replicas": 4}, False),
        ({"replicas": 2, "ray_address": "auto"}, False),
    ):
        assert process.is_of_use(ServeConfig(fleet=fleet)) == expected
    assert os.environ.get(FOLDER) is None
    assert process.folder_of_front() is None
