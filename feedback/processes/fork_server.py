"""Processes that are forked from one that has imported what they need, rather than import it again.

torch, transformers and vLLM take ten seconds to import. A fork server has done so, has one thread, and forks on
request; the child runs what ``python ARGUMENTS`` would run, with the requester's environment, working directory, open
files, signal mask, umask and niceness. It ends when its server ends, and when its requester does. Linux alone.

The socket has no name in the file system, but one that every process of the machine can list. So both sides must be of
the same user and know a secret, which stands in ``ADDRESS`` only: the server proves it before it is sent anything.

As a program, this file takes the place of ``python`` where another program starts it, such as Ray: it requests the
process, is what signals reach, and ends as it does. Where there is no server it becomes that ``python``. It imports the
standard library alone.
"""

from __future__ import annotations

import atexit
import ctypes
import hmac
import importlib
import json
import os
import runpy
import secrets
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn

ADDRESS: Final = "MILLRACE_FORK_SERVER"
"""The environment variable with the name of the server and its secret, for all processes below one."""
PARENT: Final = "MILLRACE_PARENT"
"""The environment variable with the process that one is to end with."""

_ONLY_AT_EXEC: Final = ("LD_PRELOAD", "MALLOC_CONF", "PYTHONHASHSEED", "PYTHONHOME")
_LONGEST: Final = 2**20
_ANSWER_S: Final = 10.0
_POLL_S: Final = 0.1
_MOST_TURNED_AWAY: Final = 1000  # between two looks at those who have been let in
_PR_SET_PDEATHSIG: Final = 1
_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Listener:
    """A socket for a server, whose requesters may connect before it serves."""

    socket: socket.socket
    secret: str

    @classmethod
    def inherited(cls, descriptor: int) -> Listener:
        """The one that this process was started with, in whose environment ``ADDRESS`` is of it."""
        return cls(socket.socket(fileno=descriptor), os.environ[ADDRESS].partition(":")[2])

    @property
    def address(self) -> str:
        """What ``ADDRESS`` is to say."""
        return f"{str(self.socket.getsockname()[1:], 'ascii')}:{self.secret}"


def listen() -> Listener | None:
    """None where there can be no server."""
    if sys.platform != "linux":
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0millrace-{secrets.token_hex(16)}")
    listener.listen(socket.SOMAXCONN)  # others may connect, and are turned away as they are accepted: room for ours
    return Listener(listener, secrets.token_hex(16))


class ForkedProcess:
    """What ``subprocess.Popen`` has, of a process that a fork server has forked."""

    def __init__(self, connection: socket.socket, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection, self._lock = connection, threading.RLock()  # a signal's handler may ask meanwhile
        self._polling = False
        self._server_died = False
        self._gone = pidfd  # readable when it has ended, whoever says so
        self._gone_since: float | None = None

    def poll(self) -> int | None:
        """The exit code, -n if signal n has ended it; None while it runs.

        It is that of SIGKILL where the server says nothing: it has ended, or is itself stopped.
        """
        with self._lock:
            if self.returncode is None and not self._polling:  # what a handler asks meanwhile has this answer to come
                self._polling = True
                try:
                    self.returncode = self._look()
                finally:
                    self._polling = False
                if self.returncode is not None:
                    self._connection.close()
                    os.close(self._gone)
            return self.returncode

    def _look(self) -> int | None:
        try:
            message = self._connection.recv(_LONGEST)
        except BlockingIOError:
            if not self._server_is_late():
                return None
            message = b""
        except OSError:
            message = b""
        if not message and not select.select([self._gone], [], [], 0)[0]:
            self._server_died = True  # and it ends because of that
            return None
        return int(json.loads(message)["code"]) if message else -signal.SIGKILL

    def _server_is_late(self) -> bool:
        """Whether it has ended for a while, and its server has not said how."""
        if not select.select([self._gone], [], [], 0)[0]:
            return False
        self._gone_since = self._gone_since or time.monotonic()
        return time.monotonic() - self._gone_since > _ANSWER_S

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired after so many seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                from subprocess import TimeoutExpired

                raise TimeoutExpired("a forked process", timeout or 0.0)
            with suppress(OSError, ValueError):  # another thread has seen its end
                source: Any = self._gone if self._server_died else self._connection
                select.select([source], [], [], min(left, 1.0))
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with self._lock:
            if self.poll() is None:
                with suppress(ProcessLookupError):  # it has ended, and its server is about to say how
                    signal.pidfd_send_signal(self._gone, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    files: Sequence[int] = (0, 1, 2),
    grace: float | None = None,
    patience: float = 0.0,
) -> ForkedProcess | None:
    """Have the server that the environment names run ``command``, whose first word is this interpreter.

    Args:
        environment: of the process; this one's by default.
        files: its stdin, stdout and stderr.
        grace: seconds that a command has to end below a subreaper, if it is to be run below one.
        patience: seconds to wait for a server that still imports; without any, only one that is ready is asked.

    Returns None where there is no server, where it is not ready in time, or can't run such a command.
    """
    variables = dict(os.environ if environment is None else environment)
    name, _, secret = variables.get(ADDRESS, "").partition(":")
    arguments = list(command[1:])
    if not name or command[0] != sys.executable or not _understood(arguments):
        return None
    if patience <= 0 and not _is_ready(name):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        request = {
            "arguments": arguments,
            "environment": variables,
            "folder": os.getcwd(),  # which may have been removed
            "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "umask": _umask(),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "grace": grace,
        }
        connection.settimeout(patience or _ANSWER_S)
        connection.connect(f"\0{name}")
        if not is_ours(connection):
            raise OSError(f"{ADDRESS} names a server of another user")
        nonce = secrets.token_bytes(16)
        connection.send(nonce)
        if not hmac.compare_digest(connection.recv(_LONGEST), _proof(secret, nonce)):  # when it is ready
            raise OSError(f"{ADDRESS} names a server without the secret")
        connection.settimeout(_ANSWER_S)
        socket.send_fds(connection, [json.dumps({**request, "secret": secret}).encode()], list(files))
        message, pidfds, _, _ = socket.recv_fds(connection, _LONGEST, 1)
        answer = json.loads(message or b"{}")
    except (OSError, ValueError):
        connection.close()
        return None
    if "pid" not in answer or not pidfds:
        connection.close()
        return None
    connection.setblocking(False)
    return ForkedProcess(connection, answer["pid"], pidfds[0])


def _ready_name(name: str) -> str:
    """The socket that is there once a server of that name has imported what it imports. Nobody reads from it."""
    return f"\0{name}-ready"


def _is_ready(name: str) -> bool:
    """Whether a server serves. To ask the server itself would have one started."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(_ready_name(name)) == 0


@dataclass(frozen=True)
class Job:
    """What a forked process is to run: ``python`` with these arguments; below a subreaper if there is a ``grace``."""

    arguments: list[str]
    grace: float | None
    parent: int

    def run(self) -> NoReturn:
        """Run it in this process, as its main program, and end.

        Its threads are waited for and its ``atexit`` functions run, as Python does, unless it skips its teardown
        itself; the rest of the teardown is skipped: what was imported takes half a second to be taken down.
        """
        process_exit = importlib.import_module("feedback.processes.exit")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        arguments = self.arguments[self.arguments[0] == "-P" :]
        code = 0
        try:
            if arguments[0] == "-m":
                module = importlib.import_module(arguments[1])
                sys.argv = [str(module.__file__), *arguments[2:]]
                module.main()
            else:
                sys.argv = arguments
                runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:  # noqa: BLE001 - the end of the program
            traceback.print_exc()
            code = 1
        if not process_exit.teardown_is_skipped():
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        process_exit.skip_teardown("this process was forked")
        raise process_exit.end_process(code)  # it does not return


class ForkServer:
    """Forks on request, in ``turn``. For a process with one thread of Python's.

    Args:
        listener: of ``listen``.
        imported: the variables that imports have set, which its children have too.
        outdated: whether what was imported is no longer what is installed; then nothing is forked any more.
    """

    def __init__(
        self, listener: Listener, imported: Mapping[str, str], outdated: Callable[[], bool] = lambda: False
    ) -> None:
        self.address, self._secret = listener.address, listener.secret
        self._listener, self._imported, self._outdated = listener.socket, dict(imported), outdated
        self._fixed = {name: os.environ.get(name) for name in _ONLY_AT_EXEC}
        self._greeted: set[socket.socket] = set()  # to whom the secret was proven
        self._requesters: dict[socket.socket, int | None] = {}  # and the process that each has got
        self._graced: set[int] = set()
        self._left: set[int] = set()  # whose requesters have gone
        self._ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ready.bind(_ready_name(self.address.partition(":")[0]))
        wake, self._woken = socket.socketpair()
        for end in (wake, self._woken):
            end.setblocking(False)
        self._wake = wake
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    @property
    def serves_somebody(self) -> bool:
        return bool(self._requesters or self._left)

    def turn(self, timeout: float) -> Job | None:
        """Serve for up to so many seconds. In this process it returns None, in a forked one what that is to run."""
        self._reap()
        readable, _, _ = select.select([self._listener, self._woken, *self._requesters], [], [], timeout)
        for ready in readable:
            if ready is self._woken:
                with suppress(BlockingIOError):
                    while ready.recv(4096):
                        pass
            elif ready is self._listener:
                self._accept()
            elif (job := self._hear(ready)) is not None:
                return job
        self._reap()
        return None

    def close(self) -> None:
        """Serve nobody any more. What was forked ends with this process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (self._listener, self._ready, self._wake, self._woken, *self._requesters):
            each.close()

    def _accept(self) -> None:
        """Take a requester, and turn away whoever of other users waits before it."""
        for _ in range(_MOST_TURNED_AWAY):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # no file left: what was forked goes on
                time.sleep(_POLL_S)
                return
            if is_ours(connection):
                self._requesters[connection] = None
                return
            connection.close()
            if not select.select([self._listener], [], [], 0)[0]:
                return

    def _hear(self, requester: socket.socket) -> Job | None:
        """What a requester says: its nonce, what to run, or that it has gone."""
        files: list[int] = []
        try:
            message, files, _, _ = socket.recv_fds(requester, _LONGEST, 3, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            message = b""
        try:
            if not message or self._requesters[requester] is not None:
                self._leave(requester)
            elif requester not in self._greeted:
                self._greeted.add(requester)
                with suppress(OSError):  # it has gone already, which is heard next
                    requester.send(_proof(self._secret, message))
            elif (request := _Request.of(message, self._secret)) is None:
                self._leave(requester)
            else:
                return self._fork(requester, request, files)
            return None
        finally:
            for file in files:
                os.close(file)

    def _leave(self, requester: socket.socket) -> None:
        """Forget a requester that has gone, or says what none says, and end what was forked for it."""
        pid = self._requesters.pop(requester)
        self._greeted.discard(requester)
        requester.close()
        if pid is not None:
            self._left.add(pid)
            with suppress(ProcessLookupError):  # it is a zombie at most until it is reaped here
                os.kill(pid, signal.SIGTERM if pid in self._graced else signal.SIGKILL)

    def _fork(self, requester: socket.socket, request: _Request, files: list[int]) -> Job | None:
        variables = request.environment
        if (
            len(files) != 3
            or any(variables.get(name) != value for name, value in self._fixed.items())
            or self._outdated()
        ):
            return self._refuse(requester)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        own = os.getpid()
        # A signal that comes before the child has handlers of its own must not be taken by those of this process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        try:
            pid = os.fork()
        except OSError:  # no memory, or too many processes: what has been forked goes on
            return self._refuse(requester)
        finally:
            if os.getpid() == own:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if pid == 0:
            try:
                self._become(request, files, own)
            except BaseException:  # noqa: BLE001 - it is no server
                traceback.print_exc()
                os._exit(1)
            return Job(request.arguments, request.grace, own)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # no file left
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return self._refuse(requester)
        self._requesters[requester] = pid
        if request.grace is not None:
            self._graced.add(pid)
        with suppress(OSError):
            socket.send_fds(requester, [json.dumps({"pid": pid}).encode()], [pidfd])
        os.close(pidfd)
        return None

    @staticmethod
    def _refuse(requester: socket.socket) -> None:
        with suppress(OSError):  # it has gone already, which is heard next
            requester.send(b"{}")

    def _become(self, request: _Request, files: list[int], parent: int) -> None:
        """In the child: be as if it had been started by the requester."""
        end_with(parent, signal.SIGKILL if request.grace is None else signal.SIGTERM)
        self.close()
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        if request.grace is None:
            os.setpgid(0, 0)
        else:
            os.setsid()
        for to, file in enumerate(files):
            os.dup2(file, to)
        os.chdir(request.folder)
        os.umask(request.umask)
        variables = self._imported | request.environment
        if PARENT in variables:
            variables[PARENT] = str(parent)
        os.environ.clear()
        os.environ.update(variables)
        before = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:] = [*before, *(path for path in sys.path if path not in before)]
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()  # Python's own generator is seeded anew by itself
        if (torch := sys.modules.get("torch")) is not None:
            torch.default_generator.seed()
        os.setpriority(os.PRIO_PROCESS, 0, max(request.nice, os.getpriority(os.PRIO_PROCESS, 0)))
        set_title(request.arguments)
        signal.pthread_sigmask(signal.SIG_SETMASK, request.mask)

    def _reap(self) -> None:
        for requester, pid in list(self._requesters.items()):
            if pid is not None and (code := _ended(pid)) is not None:
                with suppress(OSError):
                    requester.send(json.dumps({"code": code}).encode())
                requester.close()
                del self._requesters[requester]
                self._greeted.discard(requester)
                self._graced.discard(pid)
        for pid in list(self._left):
            if _ended(pid) is not None:
                self._left.discard(pid)
                self._graced.discard(pid)


@dataclass(frozen=True)
class _Request:
    """A process that is to be forked, as its requester has it."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    mask: list[int]
    umask: int
    nice: int
    grace: float | None

    @classmethod
    def of(cls, message: bytes, secret: str) -> _Request | None:
        """None where the message is no request, or lacks the secret."""
        try:
            fields = json.loads(message)
            if not hmac.compare_digest(fields.pop("secret").encode(), secret.encode()):
                return None
            request = cls(**fields)
            return request if _understood(request.arguments) and isinstance(request.environment, dict) else None
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def _proof(secret: str, nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), nonce, "sha256")


def _umask() -> int:
    """This process' umask, which can be had from the system without setting it for a moment."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))


def is_ours(connection: socket.socket) -> bool:
    """Whether this user is at the other end. Anybody may take the address of a server that has gone."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


def end_with(parent: int, number: int) -> None:
    """As ``feedback.processes.exit.end_with_parent``, for a program that has nothing but the standard library."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def set_title(arguments: Sequence[str]) -> None:
    """Have this process shown as ``python`` with these arguments, where that can be done."""
    with suppress(ImportError):
        os.environ.setdefault("SPT_NOENV", "1")  # its environment stays readable
        importlib.import_module("setproctitle").setproctitle(" ".join([sys.executable, *arguments]))


def _ended(pid: int) -> int | None:
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return -signal.SIGKILL  # somebody else has reaped it
    return os.waitstatus_to_exitcode(status) if done else None


def _understood(arguments: Sequence[str]) -> bool:
    """Whether it is ``[-P] -m MODULE …`` or ``[-P] FILE …``."""
    rest = arguments[arguments[:1] == ["-P"] :]
    return bool(rest) and ((rest[0] == "-m" and len(rest) > 1) or not rest[0].startswith("-"))


def main() -> None:
    """Be ``python`` for who has started this file in its place."""
    command = [sys.executable, *sys.argv[1:]]
    if PARENT in os.environ:
        end_with(int(os.environ[PARENT]), signal.SIGKILL)
    process = fork(command, patience=_ANSWER_S)
    if process is None:
        os.execv(sys.executable, command)
    for number in _FORWARDED:
        signal.signal(number, lambda number, frame: process.send_signal(number))
    code = process.wait()
    if code < 0:
        with suppress(OSError):  # SIGKILL has no other handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
