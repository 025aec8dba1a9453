"""What a hostile program can do in the sandbox."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.paths import ROOT
from train.environments.ready import sandbox
from train.environments.ready.sandbox import Ended, SandboxLimits

PATIENT = SandboxLimits(seconds=60, cpu_seconds=30, processes=8)


def python(code: str, limits: SandboxLimits = PATIENT, **given: object) -> Ended:
    return sandbox.run([sys.executable, "-I", "-c", code], limits=limits, **given)  # type: ignore[arg-type]


def left() -> list[int]:
    """Processes below this one that the sandbox started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended, or is a zombie that its parent reaps in a moment
            if "sandbox_init" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def test_a_program_gets_its_files_and_its_input() -> None:
    ended = python(
        "import sys; print(open('a.txt').read(), sys.stdin.read())", files={"a.txt": "there"}, text="and here"
    )
    assert (ended.how, ended.code, ended.output) == ("exited", 0, "there and here\n")


def test_a_fork_bomb_comes_to_its_bound_and_leaves_nothing() -> None:
    bomb = (
        "import os, time\nchildren = 0\n"
        "while True:\n    try:\n        if os.fork() == 0:\n            time.sleep(1000)\n        children += 1\n"
        "    except OSError as error:\n        print(children, error, flush=True)\n        break"
    )
    ended = python(bomb)
    assert ended.output.split(" ", 1)[0] == str(PATIENT.processes - 1), ended
    assert left() == []
    endless = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert python(endless, SandboxLimits(seconds=3, processes=8)).how == "seconds"
    deadline = time.monotonic() + 120
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left() == []


def test_endless_output_ends_the_program() -> None:
    ended = python("while True: print('x' * 1000)", SandboxLimits(seconds=60, output_bytes=5000))
    assert ended.how == "output"
    assert len(ended.output) == 5000


def test_files_of_this_machine_are_not_there(tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_text("secret")
    paths = [str(secret), str(ROOT / "pyproject.toml"), "/etc/passwd", "/proc/1/environ", str(Path.home() / ".bashrc")]
    ended = python(f"import os\nfor path in {paths!r}: print(os.path.exists(path))\nprint(dict(os.environ))")
    assert ended.output.splitlines()[:-1] == ["False"] * len(paths), ended
    assert set(eval(ended.output.splitlines()[-1])) <= {"PATH", "HOME", "LANG", "PYTHONDONTWRITEBYTECODE", "LC_CTYPE"}


def test_what_it_may_read_it_can_not_write() -> None:
    ended = python(f"open({sys.base_prefix!r} + '/here', 'w')")
    assert ended.code == 1
    assert "Read-only file system" in ended.errors
    assert not (Path(sys.base_prefix) / "here").exists()


def test_it_can_neither_see_nor_kill_its_parent_or_anybody_else() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        attempt = (
            "import os, signal\nprint(os.getpid(), os.getppid())\n"
            f"for process in (os.getppid(), {os.getpid()}, {other.pid}):\n"
            "    try: os.kill(process, signal.SIGKILL)\n    except OSError as error: print(type(error).__name__)\n"
            "os.kill(-1, signal.SIGKILL) if os.fork() else None"
        )
        ended = python(attempt)
        assert ended.output.split()[:2] == ["2", "1"], ended
        assert ended.output.split()[2:5].count("ProcessLookupError") == 2, ended
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_there_is_no_network() -> None:
    attempt = (
        "import socket\nserver = socket.socket()\n"
        "for address in (('127.0.0.1', 22), ('192.0.2.1', 80)):\n"
        "    try: socket.create_connection(address, 2)\n    except OSError as error: print(error.strerror)\n"
        "print(socket.if_nameindex())"
    )
    ended = python(attempt)
    assert ended.output.splitlines()[:2] == ["Network is unreachable"] * 2, ended
    assert [name for _, name in eval(ended.output.splitlines()[2])] in (["lo"], [])


def test_a_disk_that_it_fills_is_its_own() -> None:
    before = os.statvfs("/tmp").f_bavail
    attempt = (
        "n = 0\ntry:\n    while True:\n"
        "        with open(f'f{n}', 'wb') as file: file.write(b'0' * 2**20)\n"
        "        n += 1\n"
        "except OSError as error: print(n, error.strerror)"
    )
    ended = python(attempt, SandboxLimits(seconds=60, disk_bytes=8 * 2**20))
    assert ended.output.endswith("No space left on device\n"), ended
    assert int(ended.output.split()[0]) <= 8
    many = python("for i in range(10**6): open(f'e{i}', 'w')", SandboxLimits(seconds=60, files=200))
    assert "No space left on device" in many.errors
    assert before - os.statvfs("/tmp").f_bavail < 2**20


def test_memory_and_processor_time_have_bounds() -> None:
    assert "MemoryError" in python("bytearray(2**30)").errors
    ended = python("while True: pass", SandboxLimits(seconds=60, cpu_seconds=1))
    assert (ended.how, ended.code) == ("exited", 128 + 9)
    started = time.monotonic()
    assert python("import time; time.sleep(60)", SandboxLimits(seconds=1)).how == "seconds"
    assert time.monotonic() - started < 30


def test_it_has_no_privileges_to_gain_others_by() -> None:
    ended = python(
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(os.getuid() != 0, libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), libc.setuid(0))"
    )
    assert ended.output == "True -1 -1\n", ended


def test_what_reaches_past_namespaces_and_limits_is_refused() -> None:
    attempt = (
        "import ctypes, errno, os, platform, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def refused(what, call):\n"
        "    try: found = call()\n    except OSError as error: found, why = -1, error.errno\n"
        "    else: why = ctypes.get_errno()\n"
        "    print(what, errno.errorcode[why] if found == -1 else 'done')\n"
        "keyctl = {'x86_64': 250, 'aarch64': 219}[platform.machine()]\n"
        "refused('sockets of virtual machines', lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))\n"
        "refused('a user namespace', lambda: libc.unshare(0x10000000))\n"
        "refused('memory without a process', lambda: os.memfd_create('a'))\n"
        "refused('memory without a process', lambda: libc.shmget(0, 2**20, 0o1600))\n"
        "refused('keys', lambda: libc.syscall(keyctl, 0, -3, 0))\n"
        "refused('other memory', lambda: libc.ptrace(16, os.getppid(), 0, 0))\n"
        "import subprocess, sys, threading\nthreads = [threading.Thread(target=print, args=('a thread',))]\n"
        "threads[0].start()\nthreads[0].join()\n"
        "print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout)"
    )
    assert python(attempt).output.splitlines() == [
        "sockets of virtual machines EAFNOSUPPORT",
        "a user namespace EPERM",
        "memory without a process EPERM",
        "memory without a process EPERM",
        "keys EPERM",
        "other memory EPERM",
        "a thread",
        "b'1\\n'",
    ]


def test_a_program_can_not_pass_for_a_machine_without_a_sandbox() -> None:
    forged = python(
        "import os\nos.write(2, b'sandbox: nothing works')\nfor fd in range(3, 64):\n"
        "    try: os.write(fd, b'refused')\n    except OSError: pass\nos._exit(113)"
    )
    assert (forged.how, forged.code, forged.errors) == ("exited", 113, "sandbox: nothing works")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts something")
def test_what_is_mounted_below_a_readable_folder_can_not_be_written_either() -> None:
    place = Path(sys.base_prefix) / "include"
    attempt = (
        "import ctypes, os, sys\nfrom train.environments.ready import sandbox\n"
        f"place = {str(place)!r}\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.unshare(0x20000) == 0 and libc.mount(b'none', b'/', None, 0x44000, None) == 0\n"
        "assert libc.mount(b'tmpfs', place.encode(), b'tmpfs', 0, b'mode=777') == 0\nopen(place + '/is_there', 'w')\n"
        'code = f\'import os; print(os.listdir({place!r})); open({place!r} + "/here", "w")\'\n'
        "ended = sandbox.run([sys.executable, '-I', '-c', code])\nprint(ended.output, ended.errors)"
    )
    done = subprocess.run(
        [sys.executable, "-c", attempt], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.stdout.startswith("['is_there']"), done
    assert "Read-only file system" in done.stdout, done


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes an ordinary user")
def test_an_ordinary_user_is_walled_in_as_well(tmp_path: Path) -> None:
    attempt = (
        "import sys\nfrom train.environments.ready import sandbox\n"
        "try: sandbox.require()\n"
        "except sandbox.SandboxUnavailable as error: print('REFUSED', error); raise SystemExit\n"
        "code = 'import os; print(os.getuid(), os.path.exists(\"/etc/passwd\"))'\n"
        "ended = sandbox.run([sys.executable, '-I', '-c', code])\nprint(ended.output, ended.errors)"
    )
    for executable in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(PermissionError, FileNotFoundError):
            done = subprocess.run(
                [executable, "-c", attempt],
                user=65534,
                group=65534,
                extra_groups=[],
                cwd="/",
                capture_output=True,
                text=True,
                timeout=120,
                env={"PYTHONPATH": str(ROOT)},
                check=False,
            )
            break
    else:
        pytest.skip("there is no Python here that other users may run")
    assert done.stdout.startswith(("1000 False", "REFUSED")), done


def test_a_program_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(sandbox.SandboxUnavailable, match="/no/such/program"):
        sandbox.run(["/no/such/program"])
