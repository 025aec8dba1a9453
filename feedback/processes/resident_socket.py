"""How a stage of a cycle reaches the resident workers: a local socket, for this user, with a secret.

The socket has no name in the file system, but one that every process of the machine can list. So both sides must be of
the same user and prove that they know the secret (multiprocessing's HMAC challenge, in both directions) before anything
else is read. Name and secret stand in ``ADDRESS``, for all processes below the owner; a schedule's also in a private
file of its home. Linux alone.

Messages are pickled tuples, their first element a word:

    train, TrainConfig, JobContext, cwd → go, process | restart, why
      the files stdout and stderr       → done | failed, exit code, text
    lend, EngineConfig, Policy          → lent, None | refused, why | error, text
      load, Policy | call, Call         → value, … | error, text      until the connection is closed
    end                                   → the connection closes when nothing is left of the workers

A request that comes while another is worked on is answered with ``busy``. As long as workers are at work for an
evaluation, they send it ``working`` every few seconds: who hears nothing knows that they hang.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Final

from feedback.processes.fork_server import is_ours

log = logging.getLogger(__name__)

ADDRESS: Final = "MILLRACE_RESIDENT"
"""The environment variable with the name of the socket and its secret, for all processes below the owner."""

PATIENCE_S: Final = 90.0
"""Until workers that have to import first take a request."""
_GREETING_S: Final = 10.0
_OWN: Final = "-own"
GONE_S: Final = 60.0
"""Until workers that were told to end have ended."""
WORKING: Final = "working"
SIGN_S: Final = 5.0
"""From one sign to the next that workers are at work."""


@dataclass(frozen=True)
class Listener:
    """Takes connections: ``owners`` whether workers run or not, the workers' ``own`` while they do."""

    owners: socket.socket
    secret: str
    own: socket.socket | None = None

    @classmethod
    def inherited(cls, descriptor: int) -> Listener:
        """That of the workers, which were started with the owner's, and in whose environment ``ADDRESS`` is of it."""
        owners, secret = socket.socket(fileno=descriptor), os.environ[ADDRESS].partition(":")[2]
        return cls(owners, secret, _listening(str(owners.getsockname()[1:], "ascii") + _OWN))

    @property
    def sockets(self) -> list[socket.socket]:
        return [self.owners] if self.own is None else [self.owners, self.own]

    @property
    def address(self) -> str:
        """What ``ADDRESS`` is to say."""
        return f"{str(self.owners.getsockname()[1:], 'ascii')}:{self.secret}"

    def accept(self, timeout_s: float) -> Connection | None:
        """A connection of somebody who may ask; None if none comes in time."""
        ready = select.select(self.sockets, [], [], timeout_s)[0]
        if not ready:
            return None
        try:
            accepted, _ = random.choice(ready).accept()  # or a crowd at the one would keep all from the other
        except (BlockingIOError, ConnectionAbortedError):  # it has gone again
            return None
        if not is_ours(accepted):
            accepted.close()
            return None
        connection: Connection = Connection(accepted.detach())
        try:
            with _limited(connection):
                deliver_challenge(connection, self.secret.encode())
                answer_challenge(connection, self.secret.encode())
        except (OSError, EOFError, AuthenticationError):
            connection.close()
            return None
        return connection

    def turn_away(self) -> None:
        """Close what waits to be taken: nobody will."""
        while select.select([self.owners], [], [], 0)[0]:
            with suppress(OSError):
                self.owners.accept()[0].close()


def listen() -> Listener | None:
    """None where there can be no such socket."""
    if sys.platform != "linux":
        return None
    return Listener(_listening(f"millrace-resident-{secrets.token_hex(16)}"), secrets.token_hex(32))


def _listening(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(socket.SOMAXCONN)  # others may connect, and are turned away as they are accepted: room for ours
    return listener


def connect(*, start: bool = False) -> Connection | None:
    """A connection to the workers that the environment names; None if it names none, or they don't answer.

    start: have their owner start some, if there are none.
    """
    name, _, secret = os.environ.get(ADDRESS, "").partition(":")
    if not name:
        return None
    name += "" if start else _OWN
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connecting:
        _limit(connecting, PATIENCE_S)  # where so many wait already that there is no room
        try:
            connecting.connect(f"\0{name}")
        except OSError:  # its owner has gone, or there are no workers
            return None
        if not is_ours(connecting):
            return None
        connection: Connection = Connection(connecting.detach())
    try:
        if not connection.poll(PATIENCE_S):
            _end_stopped()
            raise EOFError
        with _limited(connection):
            answer_challenge(connection, secret.encode())
            deliver_challenge(connection, secret.encode())
    except (OSError, EOFError, AuthenticationError):
        connection.close()
        return None
    return connection


def _end_stopped() -> None:
    """Kill workers that did not answer because they are stopped: they would keep all who ask later waiting as long."""
    name = os.environ.get(ADDRESS, "").partition(":")[0] + _OWN
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
        _limit(own, _GREETING_S)
        try:
            own.connect(f"\0{name}")
        except OSError:  # they have ended, or are about to begin
            return
        process, _, _ = struct.unpack("3i", own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        with suppress(OSError, IndexError):
            if is_ours(own) and Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                log.warning("the resident workers (process %d) are stopped, and killed for it", process)
                os.kill(process, signal.SIGKILL)  # its subreaper ends all that is below it


@contextmanager
def _limited(connection: Connection, seconds: float | None = None) -> Iterator[None]:
    """Within, what waits for the other side longer than a greeting takes raises OSError: who is silent keeps nobody."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        _limit(same, _GREETING_S if seconds is None else seconds)
        yield
        _limit(same, 0.0)


def _limit(connection: socket.socket, seconds: float) -> None:
    """Each wait for the other side, of all that have this socket; 0: none."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)


def ask(connection: Connection, *message: Any, timeout_s: float | None = None) -> tuple[Any, ...]:
    """Send a message; the answer to it.

    Raises EOFError if the workers end meanwhile, TimeoutError if there is neither an answer nor a sign that they are at
    work for ``timeout_s``.
    """
    try:
        limit = nullcontext() if timeout_s is None else _limited(connection, timeout_s)
        with suppress(BrokenPipeError, ConnectionResetError), limit:  # who is busy has said so already, and closed
            connection.send(message)
        answer: tuple[Any, ...] = (WORKING,)
        while answer == (WORKING,):
            if timeout_s is not None and _is_silent(connection, timeout_s):
                raise TimeoutError(f"the resident workers did not answer {message[0]!r} within {timeout_s:g} s")
            answer = connection.recv()
    except (BrokenPipeError, ConnectionResetError) as error:
        raise EOFError from error
    except BlockingIOError as error:
        raise TimeoutError(f"the resident workers did not read {message[0]!r} within {timeout_s:g} s") from error
    return answer


def _is_silent(connection: Connection, seconds: float) -> bool:
    """Whether nothing comes for so long. In turns: a machine that stood still meanwhile has missed one of them."""
    while seconds > 0:
        turn = min(SIGN_S, seconds)
        if connection.poll(turn):
            return False
        seconds -= turn
    return True


def end_workers() -> bool:
    """Have the workers end, and wait until their memory is given back; whether nothing is left of them."""
    if (connection := connect()) is None:
        return True
    with connection, suppress(OSError):
        connection.send(("end",))
        return wait_until_gone(connection)
    return True


def end_silent(connection: Connection) -> None:
    """Have workers end that should answer and give no sign, and wait until they have: by hanging up, or if they are
    stopped by force."""
    hang_up(connection)
    _end_stopped()
    wait_until_gone(connection)


def hang_up(connection: Connection) -> None:
    """Say that no message will follow, and that the answer to the last one is of no use any more."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_WR)


def hung_up(connection: Connection) -> bool:
    """Whether the other side, of which there is something to read, has hung up or gone."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        try:
            return not same.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def wait_until_gone(connection: Connection, timeout_s: float = GONE_S) -> bool:
    """Wait until the workers at the other end have ended; whether they have."""
    with suppress(EOFError, OSError):
        while connection.poll(timeout_s):
            connection.recv()
        return False
    return True
