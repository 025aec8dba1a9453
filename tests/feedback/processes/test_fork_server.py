from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from feedback.processes import fork_server
from tests.paths import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork servers are for Linux")

PATIENCE_S = 60.0
SERVER = """
import os, socket, sys
from feedback.processes import fork_server
os.environ["SET_BY_AN_IMPORT"] = "1"
outdated = lambda: os.path.exists(os.environ.get("OUTDATED", ""))
import json, decimal   # what programs below find imported
__import__(sys.argv[2])
server = fork_server.ForkServer(fork_server.Listener.inherited(int(sys.argv[1])), {"SET_BY_AN_IMPORT": "1"}, outdated)
while (job := server.turn(1.0)) is None:
    pass
job.run()
"""
PROGRAM = """
import json, os, signal, sys
print(json.dumps({
    "argv": sys.argv, "imported": "decimal" in sys.modules, "folder": os.getcwd(), "value": os.environ.get("VALUE"),
    "set": os.environ.get("SET_BY_AN_IMPORT"), "mine": os.environ.get("OF_THE_SERVER"), "nice": os.getpriority(0, 0),
    "blocked": signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "path": sys.path, "name": __name__,
    "pipes": sum(os.path.realpath(f"/proc/self/fd/{f}").startswith("/proc") for f in os.listdir("/proc/self/fd")),
}), flush=True)
sys.exit(int(os.environ.get("CODE", "0")))
"""


REQUEST = {"arguments": [], "environment": {}, "folder": "/", "mask": [], "umask": 18, "nice": 0, "grace": None}


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with serving(getattr(request, "param", "json"), OUTDATED=str(tmp_path / "outdated")) as process:
        yield process


@contextmanager
def serving(imports: str, text: str = SERVER, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    listener = fork_server.listen()
    assert listener is not None
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OF_THE_SERVER": "1", fork_server.ADDRESS: listener.address}
    with listener.socket:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", text, str(listener.socket.fileno()), imports],
            env={**environment, **more},
            pass_fds=[listener.socket.fileno()],
        )
        process.address = listener.address  # type: ignore[attr-defined]
    yield process
    process.kill()
    process.wait(PATIENCE_S)


def variables(server: subprocess.Popen[bytes], **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), fork_server.ADDRESS: server.address, **more}  # type: ignore[attr-defined]


def program(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "program.py"
    file.write_text(text)
    return [sys.executable, "-P", str(file), "a", "b c"]


def run(
    server: subprocess.Popen[bytes], command: list[str], output: Path, **more: str
) -> fork_server.ForkedProcess | None:
    with output.open("wb") as out, open(os.devnull, "rb") as nothing:
        files = (nothing.fileno(), out.fileno(), out.fileno())
        return fork_server.fork(command, environment=variables(server, **more), files=files, patience=PATIENCE_S)


def test_a_program_runs_with_what_is_imported_and_otherwise_as_its_requester_would_run_it(
    server: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    process = run(server, program(tmp_path, PROGRAM), tmp_path / "out", VALUE="ä", CODE="7")
    assert process is not None
    assert process.wait(PATIENCE_S) == 7
    assert process.poll() == 7
    said = json.loads((tmp_path / "out").read_text())
    assert said["argv"] == [str(tmp_path / "program.py"), "a", "b c"]
    assert (said["imported"], said["name"], said["folder"]) == (True, "__main__", str(tmp_path))
    assert (said["value"], said["set"], said["mine"]) == ("ä", "1", None)
    assert said["path"][0] == str(ROOT)
    assert said["blocked"] is False


def test_the_signal_mask_and_the_niceness_are_the_requesters(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        code = (
            "import os, sys; os.nice(3); from feedback.processes import fork_server as f\n"
            "p = f.fork(sys.argv[1:], patience=60); sys.exit(p.wait(180))"
        )
        command = [sys.executable, "-c", code, *program(tmp_path, PROGRAM)]
        done = subprocess.run(command, env=variables(server), capture_output=True, timeout=PATIENCE_S, check=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    said = json.loads(done.stdout)
    assert said["blocked"] is True
    assert said["nice"] == os.getpriority(os.PRIO_PROCESS, 0) + 3


@pytest.mark.parametrize(("end", "code"), [("import os; os.kill(os.getpid(), 9)", -9), ("1 / 0", 1), ("exit('no')", 1)])
def test_the_end_is_told_as_it_was(server: subprocess.Popen[bytes], tmp_path: Path, end: str, code: int) -> None:
    process = run(server, program(tmp_path, end), tmp_path / "out")
    assert process is not None
    assert process.wait(PATIENCE_S) == code
    said = (tmp_path / "out").read_text()
    assert ("ZeroDivisionError" in said) == (end == "1 / 0")
    assert ("no" in said) == ("no" in end)


def test_signals_reach_it_and_none_reaches_another_when_it_has_ended(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    process = run(server, program(tmp_path, "import time; print('up', flush=True); time.sleep(600)"), tmp_path / "out")
    assert process is not None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.terminate()
    assert process.wait(PATIENCE_S) == -signal.SIGTERM
    process.kill()
    assert process.poll() == -signal.SIGTERM


@pytest.mark.parametrize("dies", ["requester", "server"])
def test_it_ends_with_its_requester_and_with_its_server(
    server: subprocess.Popen[bytes], tmp_path: Path, dies: str
) -> None:
    sleeper = program(tmp_path, "import time; time.sleep(600)")
    code = (
        "import sys; from feedback.processes import fork_server as f\n"
        "p = f.fork(sys.argv[1:], patience=60); print(p.pid, flush=True); print(p.wait(180), flush=True)"
    )
    command = [sys.executable, "-c", code, *sleeper]
    with subprocess.Popen(command, env=variables(server), stdout=subprocess.PIPE, text=True) as requester:
        assert requester.stdout is not None
        forked = psutil.Process(int(requester.stdout.readline()))
        (requester if dies == "requester" else server).kill()
        _until(lambda: not forked.is_running() or forked.status() == psutil.STATUS_ZOMBIE)
        if dies == "server":
            assert requester.stdout.readline() == "-9\n"


def test_what_takes_the_place_of_python_forwards_signals_and_ends_as_its_program_does(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    in_place = [sys.executable, "-I", "-S", fork_server.__file__]
    ok = subprocess.run(
        [*in_place, *program(tmp_path, PROGRAM)[1:]],
        env=variables(server, CODE="5"), capture_output=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (ok.returncode, json.loads(ok.stdout)["imported"]) == (5, True)
    sleeper = program(tmp_path, "import time; print('up', flush=True); time.sleep(600)")[1:]
    with subprocess.Popen([*in_place, *sleeper], env=variables(server), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait(PATIENCE_S) == -signal.SIGTERM


@pytest.mark.parametrize("why", ["no server", "a dead one", "another allocator", "one that imports", "another command"])
def test_where_it_can_not_be_forked_nothing_is_and_python_itself_runs(
    server: subprocess.Popen[bytes], tmp_path: Path, why: str
) -> None:
    command, environment, patience = program(tmp_path, PROGRAM), variables(server), PATIENCE_S
    if why == "no server":
        del environment[fork_server.ADDRESS]
    elif why == "a dead one":
        server.kill()
        server.wait(PATIENCE_S)
    elif why == "another allocator":
        environment["LD_PRELOAD"] = ""
    elif why == "one that imports":  # it listens, and there is no patience
        listener = fork_server.listen()
        assert listener is not None
        environment[fork_server.ADDRESS], patience = listener.address, 0.0
    else:
        command = [sys.executable, "-c", "pass"]
    assert fork_server.fork(command, environment=environment, patience=patience) is None
    if why in ("no server", "a dead one", "another allocator"):
        in_place = [sys.executable, "-I", "-S", fork_server.__file__, *command[2:]]
        done = subprocess.run(in_place, env=environment, capture_output=True, timeout=PATIENCE_S, check=True)
        assert json.loads(done.stdout)["imported"] is False


def test_without_patience_a_server_that_is_ready_is_asked(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert run(server, program(tmp_path, "pass"), tmp_path / "out") is not None  # it serves from here on
    process = fork_server.fork(program(tmp_path, PROGRAM), environment=variables(server), patience=0.0)
    assert process is not None
    assert process.wait(PATIENCE_S) == 0


def test_an_address_that_another_user_has_taken_is_not_asked(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        os.seteuid(65534)
        try:
            other.bind("\0millrace-taken")
            other.listen()
        finally:
            os.seteuid(0)
        other.settimeout(PATIENCE_S)
        received: list[bytes] = []

        def listen() -> None:
            connection, _ = other.accept()
            with connection, suppress(OSError):  # it has gone before it was ready
                connection.send(b"ready")
                received.append(connection.recv(2**20))

        listening = threading.Thread(target=listen)
        listening.start()
        environment = {**variables(server), fork_server.ADDRESS: "millrace-taken:secret"}
        assert fork_server.fork(program(tmp_path, PROGRAM), environment=environment, patience=PATIENCE_S) is None
        listening.join(PATIENCE_S)
        assert received in ([], [b""])


def test_a_requester_that_has_gone_before_it_is_refused_ends_nothing(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (tmp_path / "sleeper").mkdir()
    sleeper = run(server, program(tmp_path / "sleeper", "import time; time.sleep(600)"), tmp_path / "slept")
    assert sleeper is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone:
        name, secret = server.address.split(":")  # type: ignore[attr-defined]
        gone.connect(f"\0{name}")
        gone.send(b"nonce")
        assert gone.recv(2**20) == fork_server._proof(secret, b"nonce")
        server.send_signal(signal.SIGSTOP)
        gone.send(json.dumps({**REQUEST, "arguments": program(tmp_path, PROGRAM)[1:], "secret": secret}).encode())
    server.send_signal(signal.SIGCONT)
    again = run(server, program(tmp_path, "pass"), tmp_path / "out")
    assert again is not None
    assert again.wait(PATIENCE_S) == 0
    assert sleeper.poll() is None
    sleeper.kill()
    assert sleeper.wait(PATIENCE_S) == -signal.SIGKILL


def test_one_without_the_secret_has_nothing_run(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Names of sockets stand in /proc/net/unix, also for a container with the host's network and user id."""
    name, secret = server.address.split(":")  # type: ignore[attr-defined]
    command = program(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    for wrong in ({}, {"secret": ""}, {"secret": "0" * len(secret)}, {"secret": None}):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(PATIENCE_S)
            stranger.connect(f"\0{name}")
            stranger.send(b"nonce")
            stranger.recv(2**20)
            message = json.dumps({**REQUEST, "arguments": command[1:], **wrong}).encode()
            socket.send_fds(stranger, [message], [0, 1, 2])
            assert stranger.recv(2**20) == b""
    assert fork_server.fork(command, environment=variables(server) | {fork_server.ADDRESS: name}, patience=60) is None
    assert not (tmp_path / "ran").exists()


def test_a_server_without_the_secret_is_sent_nothing(tmp_path: Path) -> None:
    """It may have taken the name of one that has gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(f"\0millrace-{tmp_path.name}")
        other.listen()
        other.settimeout(PATIENCE_S)
        received: list[bytes] = []

        def listen() -> None:
            connection, _ = other.accept()
            with connection:
                received.append(connection.recv(2**20))
                connection.send(fork_server._proof("another", received[0]))
                received.append(connection.recv(2**20))

        listening = threading.Thread(target=listen)
        listening.start()
        environment = {**os.environ, fork_server.ADDRESS: f"millrace-{tmp_path.name}:secret"}
        assert fork_server.fork(program(tmp_path, PROGRAM), environment=environment, patience=PATIENCE_S) is None
        listening.join(PATIENCE_S)
        assert [len(message) for message in received] == [16, 0]


@pytest.mark.parametrize("message", [b"{", b"[]", b"{}", b"1", b'{"signal": 9}'])
def test_a_message_that_is_none_ends_its_connection_alone(
    server: subprocess.Popen[bytes], tmp_path: Path, message: bytes
) -> None:
    process = run(server, program(tmp_path, "import time; time.sleep(600)"), tmp_path / "out")
    assert process is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.settimeout(PATIENCE_S)
        other.connect("\0" + server.address.split(":")[0])  # type: ignore[attr-defined]
        other.send(b"nonce")
        other.recv(2**20)
        other.send(message)
        assert other.recv(2**20) == b""
    assert process.poll() is None
    process.kill()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_signal_right_after_the_fork_reaches_it_and_not_the_handlers_of_its_server(tmp_path: Path) -> None:
    text = SERVER.replace(
        "server = ",
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: None)\n"
        "os.register_at_fork(after_in_child=lambda: time.sleep(0.5))  # a machine with much to do\n"
        "server = ",
    )
    with serving("json", text) as server:
        forked = run(server, program(tmp_path, "import time; time.sleep(60)"), tmp_path / "out")
        assert forked is not None
        forked.terminate()
        assert forked.wait(PATIENCE_S) == -signal.SIGTERM


def test_files_get_the_mode_that_the_requesters_umask_leaves(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        process = run(server, program(tmp_path, f"open({str(tmp_path / 'secret')!r}, 'w').close()"), tmp_path / "out")
        assert process is not None
        assert process.wait(PATIENCE_S) == 0
    finally:
        os.umask(before)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_what_was_forked_can_be_killed_while_its_server_hangs(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    process = run(server, program(tmp_path, "import time; time.sleep(600)"), tmp_path / "out")
    assert process is not None
    server.send_signal(signal.SIGSTOP)
    process.kill()
    _until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    server.send_signal(signal.SIGCONT)
    assert process.wait(PATIENCE_S) == -signal.SIGKILL


def test_that_it_has_ended_is_noticed_while_its_server_hangs(
    server: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = run(server, program(tmp_path, "import time; time.sleep(600)"), tmp_path / "out")
    assert process is not None
    server.send_signal(signal.SIGSTOP)
    assert process.poll() is None
    process.kill()
    monkeypatch.setattr(fork_server, "_ANSWER_S", 0.1)
    assert process.wait(PATIENCE_S) == -signal.SIGKILL


def test_nothing_is_forked_of_a_version_that_is_no_longer_installed_and_what_was_goes_on(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    before = run(server, program(tmp_path, "import time; time.sleep(600)"), tmp_path / "out")
    assert before is not None
    (tmp_path / "outdated").touch()
    (tmp_path / "later").mkdir()
    assert run(server, program(tmp_path / "later", "pass"), tmp_path / "later" / "out") is None
    assert before.poll() is None
    before.kill()
    assert before.wait(PATIENCE_S) == -signal.SIGKILL


def test_its_threads_and_functions_at_exit_end_as_in_any_python(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    text = (
        "import atexit, threading\natexit.register(lambda: print('at exit'))\nmain = threading.main_thread()\n"
        "threading.Thread(target=lambda: (main.join(), print('the thread'))).start()\nprint('the program')"
    )
    process = run(server, program(tmp_path, text), tmp_path / "out")
    assert process is not None
    assert process.wait(PATIENCE_S) == 0
    assert (tmp_path / "out").read_text().splitlines() == ["the program", "the thread", "at exit"]


def test_a_keyboard_interrupt_is_raised(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    raised = run(server, program(tmp_path, "import signal; signal.raise_signal(signal.SIGINT)"), tmp_path / "raised")
    assert raised is not None
    assert raised.wait(PATIENCE_S) == 1
    assert "KeyboardInterrupt" in (tmp_path / "raised").read_text()


@pytest.mark.parametrize("server", ["torch"], indirect=True)
def test_each_has_random_numbers_of_its_own_from_torch(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    said = set()
    for number in range(2):
        out = tmp_path / str(number)
        process = run(server, program(tmp_path, "import torch; print(torch.initial_seed())"), out)
        assert process is not None
        assert process.wait(PATIENCE_S) == 0
        said.add(out.read_text())
    assert len(said) == 2


def test_a_requester_whose_folder_was_removed_gets_none(
    server: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = program(tmp_path, PROGRAM)
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    assert fork_server.fork(command, environment=variables(server), patience=PATIENCE_S) is None


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _files(server: subprocess.Popen[bytes]) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{server.pid}/fd")}


def test_a_server_that_may_open_no_more_files_refuses_and_goes_on(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    command, output = program(tmp_path, PROGRAM), tmp_path / "output"
    assert (before := run(server, command, output)) is not None
    assert before.wait(PATIENCE_S) == 0
    process = psutil.Process(server.pid)
    deadline = time.monotonic() + PATIENCE_S
    while len(process.net_connections("unix")) > 4:  # listening, ready, and two to wake itself: the requester's is gone
        assert time.monotonic() < deadline
    limits, used = process.rlimit(psutil.RLIMIT_NOFILE), _files(server)
    free = [number for number in range(2 * len(used) + 10) if number not in used]
    process.rlimit(psutil.RLIMIT_NOFILE, (free[4], limits[1]))  # for the connection and the requester's three
    assert run(server, command, output) is None
    assert not process.children()
    process.rlimit(psutil.RLIMIT_NOFILE, limits)
    assert (after := run(server, command, output)) is not None
    assert after.wait(PATIENCE_S) == 0


def test_a_handler_that_asks_while_the_end_is_looked_at_changes_nothing(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    forked = run(server, program(tmp_path, "import sys; sys.exit(3)"), tmp_path / "output")
    assert forked is not None
    asked: list[int | None] = []
    look = forked._look

    def interrupted() -> int | None:
        found = look()
        asked.append(forked.poll())  # as a handler between two of its lines
        if found is not None:
            forked.send_signal(signal.SIGTERM)
        return found

    forked._look = interrupted  # type: ignore[method-assign]
    assert forked.wait(PATIENCE_S) == 3
    assert set(asked) == {None}
