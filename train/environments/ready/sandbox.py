"""Runs code that nobody trusts, as what a policy wrote is: without network, and without this machine's files.

What it does is in ``sandbox_init``. Namespaces of Linux are the wall; where the kernel, or a container's runtime, does
not let this user make them, nothing is run. It is no virtual machine: a hole in the kernel is a hole in it.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Final, Literal

from train.environments.ready import sandbox_init

_SYSTEM: Final = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")


class SandboxUnavailable(RuntimeError):
    """This machine does not let a program be cut off; the text says why, and what to do."""


@dataclass(frozen=True)
class SandboxLimits:
    """``seconds``: by the clock. ``cpu_seconds``, ``memory_bytes`` (of addresses): of each process.

    ``disk_bytes``, ``files``: of all that it writes, which is kept in memory. ``output_bytes``: of both streams.
    """

    seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 512 * 2**20
    processes: int = 16
    open_files: int = 64
    disk_bytes: int = 32 * 2**20
    files: int = 1024
    output_bytes: int = 2**16


@dataclass(frozen=True)
class Ended:
    """How a program ended: ``exited`` by itself, with ``code`` (128 and the signal that ended it), or over a limit."""

    how: Literal["exited", "seconds", "output"]
    code: int
    output: str
    errors: str


def run(
    command: Sequence[str],
    *,
    files: Mapping[str, str] | None = None,
    text: str = "",
    limits: SandboxLimits | None = None,
) -> Ended:
    """Run a program to its end, or to the end of its time.

    Args:
        command: the program's path, which lies in the system's folders or Python's, and its arguments.
        files: by name, in the folder that it runs in.
        text: its standard input.

    Raises:
        SandboxUnavailable: it can't be cut off here.
    """
    limits = limits or SandboxLimits()
    parts = {"command": list(command), "files": dict(files or {}), "limits": asdict(limits), "readable": _readable()}
    spec = json.dumps(parts).encode()
    refusals, refuses = os.pipe()
    os.set_blocking(refusals, False)
    with open(refusals, "rb", buffering=0) as refusal:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", sandbox_init.__file__, str(refuses)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"LANG": "C.UTF-8"},
                start_new_session=True,
                pass_fds=[refuses],
            )
        finally:
            os.close(refuses)
        try:
            how, output, errors = _exchange(process, b"%d\n%s%s" % (len(spec), spec, text.encode()), limits)
            if how != "exited":
                process.kill()  # and with it process 1, and all below
            code = process.wait(limits.seconds)
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                with suppress(OSError):
                    stream.close()
        why = (refusal.read() or b"").decode(errors="replace")
    if why:
        raise SandboxUnavailable(
            f"code can't be run cut off from this machine: {why}. It needs Linux namespaces and seccomp: allow "
            "unprivileged user namespaces (kernel.unprivileged_userns_clone, "
            "kernel.apparmor_restrict_unprivileged_userns), or in a container unshare and mount "
            "(--cap-add SYS_ADMIN, or a seccomp profile that has them)"
        )
    return Ended(how, code, output.decode(errors="replace"), errors.decode(errors="replace"))


@cache
def require() -> None:
    """Raise SandboxUnavailable unless a program can be run here."""
    if sys.platform != "linux":
        raise SandboxUnavailable(f"code can't be run cut off on {sys.platform}: it needs Linux namespaces")
    ended = run([sys.executable, "-I", "-c", "print('here')"])
    if ended.output != "here\n":
        raise SandboxUnavailable(f"Python does not start in the sandbox: {ended}")


def _readable() -> list[str]:
    """What a program may read: the system's folders, and this Python's own, none below another."""
    found: list[str] = []
    for path in (*_SYSTEM, sys.base_prefix, sys.prefix, str(Path(sys.executable).resolve().parent.parent)):
        inside = any(Path(path).is_relative_to(other) for other in found)
        if os.path.lexists(path) and path != "/" and not inside:
            found.append(path)
    return found


def _exchange(process: subprocess.Popen[bytes], given: bytes, limits: SandboxLimits) -> tuple[Any, bytes, bytes]:
    """(how it ended, its output, its errors), given its input."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + limits.seconds
    found: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        for stream in found:
            selector.register(stream, selectors.EVENT_READ)
        how = "exited"
        while selector.get_map():
            if (left := deadline - time.monotonic()) <= 0:
                how = "seconds"
                break
            for key, _ in selector.select(left):
                stream = key.fileobj  # type: ignore[assignment]
                if stream is process.stdin:
                    with suppress(BlockingIOError, BrokenPipeError):
                        given = given[os.write(key.fd, given[: 2**16]) :]
                        if given:
                            continue
                    selector.unregister(stream)
                    process.stdin.close()
                elif data := os.read(key.fd, 2**16):
                    found[stream] += data
                else:
                    selector.unregister(stream)
            if sum(map(len, found.values())) > limits.output_bytes:
                how = "output"
                break
    output, errors = (bytes(of[: limits.output_bytes]) for of in found.values())
    return how, output, errors
