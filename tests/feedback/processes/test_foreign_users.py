"""What another user of the machine can do to the sockets of fork servers and resident workers."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from feedback.processes import fork_server, resident_socket

NOBODY = 65534
CROWD = 200
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@contextmanager
def crowd(kind: socket.SocketKind, name: str) -> Iterator[None]:
    """Connections of another user that say nothing and wait to be taken."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:  # an interpreter of another user's may not be there
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            kept = [socket.socket(socket.AF_UNIX, kind) for _ in range(CROWD)]
            for each in kept:
                each.settimeout(5)
                each.connect(f"\0{name}")
            os.write(writing, b"there")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 5) == b"there", "there is no room for a crowd, and so for nobody"
        yield
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_resident_workers_hear_their_user_behind_a_crowd_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = resident_socket.listen()
    assert listener is not None
    monkeypatch.setenv(resident_socket.ADDRESS, listener.address)
    with listener.owners, crowd(socket.SOCK_STREAM, listener.address.partition(":")[0]):
        heard = []

        def accept() -> None:
            while not heard:
                if (connection := listener.accept(10.0)) is not None:
                    heard.append(connection)

        accepting = threading.Thread(target=accept)
        accepting.start()
        ours = resident_socket.connect(start=True)
        accepting.join(120)
        assert ours is not None
        assert len(heard) == 1
        ours.close()
        heard[0].close()


def test_a_fork_server_turns_a_crowd_of_another_user_away_at_once() -> None:
    listener = fork_server.listen()
    assert listener is not None
    server = fork_server.ForkServer(listener, {})
    try:
        name = listener.address.partition(":")[0]
        with (
            crowd(socket.SOCK_SEQPACKET, name),
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ours,
        ):
            ours.settimeout(5)
            ours.connect(f"\0{name}")
            assert server.turn(5) is None
            assert server.serves_somebody
    finally:
        server.close()
