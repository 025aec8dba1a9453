"""Two machines of a Ray cluster on this one: each has a network of its own, its own address, its own Ray.

Linux's network namespaces, joined by a bridge: ports, loopback and Ray's processes of a node are its own, so that
a node is killed as a machine is. They share the disk, the host's name and the process table. Needs root.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

_RAY = Path(sys.executable).with_name("ray")
_START_S = 300
HEAD, WORKER = "10.77.0.1", "10.77.0.2"
_HOST = "10.77.0.254/24"


@dataclass
class Node:
    """A machine of the cluster; ``cpus`` is what Ray counts on it."""

    space: str
    address: str
    folder: Path
    environment: dict[str, str]
    cpus: int = 2

    def start(self) -> None:
        """Start its Ray: the head's, or one that joins the head. Raises CalledProcessError, TimeoutExpired."""
        head = [f"--address={HEAD}:6379"]
        if self.address == HEAD:
            head = ["--head", "--port=6379", "--include-dashboard=true", f"--dashboard-host={HEAD}"]
        own = [f"--node-ip-address={self.address}", f"--num-cpus={self.cpus}", f"--temp-dir={self.folder}"]
        own += ["--object-store-memory=100000000", "--disable-usage-stats"]
        subprocess.run(
            self._inside([str(_RAY), "start", *head, *own]), env=self.environment, check=True, timeout=_START_S
        )

    def popen(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Run a command on it, its output in a file."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self._inside(command), env=self.environment, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT
            )

    def kill(self) -> None:
        """Kill all of its processes at once, as a loss of power does."""
        deadline = time.monotonic() + 120
        while pids := subprocess.check_output(["ip", "netns", "pids", self.space], text=True).split():
            assert time.monotonic() < deadline, pids
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)

    def _inside(self, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.space, *command]


def can_make_networks() -> bool:
    """Whether this process may make network namespaces."""
    return shutil.which("ip") is not None and subprocess.run(["unshare", "-n", "true"], check=False).returncode == 0


@contextmanager
def two_nodes(python_path: Sequence[str]) -> Iterator[tuple[Node, Node]]:
    """The head and a worker, both started; all of their processes and networks are gone at the end."""
    token = secrets.token_hex(16)
    ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "OMP_NUM_THREADS": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GLOO_", "NCCL_"))}
    environment = inherited | ours | {"PYTHONPATH": ":".join([str(ROOT), *python_path])}
    name = f"mr{os.getpid() % 100_000}"
    # Ray's sockets are in it, whose paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))
    nodes = tuple(
        Node(f"{name}n{number}", address, folder / str(number), environment)
        for number, address in enumerate((HEAD, WORKER), start=1)
    )
    try:
        _ip("link", "add", f"{name}b", "type", "bridge")
        _ip("addr", "add", _HOST, "dev", f"{name}b")
        _ip("link", "set", f"{name}b", "up")
        for node in nodes:
            _ip("netns", "add", node.space)
            _ip("link", "add", f"{node.space}v", "type", "veth", "peer", "name", "eth0", "netns", node.space)
            _ip("link", "set", f"{node.space}v", "master", f"{name}b", "up")
            _ip("-n", node.space, "link", "set", "lo", "up")
            _ip("-n", node.space, "addr", "add", f"{node.address}/24", "dev", "eth0")
            _ip("-n", node.space, "link", "set", "eth0", "up")
        for node in nodes:
            node.start()
        yield nodes[0], nodes[1]
    finally:
        for node in reversed(nodes):
            if Path("/run/netns", node.space).exists():
                node.kill()
                _ip("netns", "del", node.space)
        subprocess.run(["ip", "link", "del", f"{name}b"], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
