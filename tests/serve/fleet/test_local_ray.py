"""A real Ray of our own: where it listens, whom it lets in, and what reaches it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import psutil
import pytest

from serve.local_ray.cluster import exposed, loopback_sockets
from tests.paths import ROOT
from tests.trees import left_of

OWNER = """
import json, os, signal, stat, sys, threading
from pathlib import Path
import psutil, ray
from serve.local_ray.cluster import connect, local_ray

before = signal.getsignal(signal.SIGTERM)
with local_ray(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, logging_level="ERROR"):
    @ray.remote
    class Worker:
        def variables(self): return dict(os.environ)
        def niceness(self): return os.nice(0)
    worker = Worker.remote()
    variables = ray.get(worker.variables.remote())
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    print(json.dumps({
        "listening": {p.name(): sorted({c.laddr.ip for c in p.net_connections("tcp") if c.status == "LISTEN"})
                      for p in processes},
        "blocked": {p.name(): Path(f"/proc/{p.pid}/status").read_text().split("SigBlk:")[1].split()[0]
                    for p in processes[1:]},
        "address": ray.get_runtime_context().gcs_address,
        "mode": stat.S_IMODE(os.stat(variables["RAY_AUTH_TOKEN_PATH"]).st_mode),
        "auth": variables["RAY_AUTH_MODE"],
        "niceness": ray.get(worker.niceness.remote()),
        "gloo": variables.get("GLOO_SOCKET_IFNAME"),
        "handler kept": signal.getsignal(signal.SIGTERM) is before,
        "pids": [p.pid for p in processes[1:]],
    }), flush=True)
    for process in processes[1:]:
        process.send_signal(signal.SIGTERM)
    sys.stdin.readline()
    print(json.dumps({"answers": ray.get(worker.variables.remote(), timeout=60) == variables}), flush=True)
print(json.dumps({"mode after": os.environ.get("RAY_AUTH_MODE")}))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the owner of a Ray says of it, all of whose processes get SIGTERM, and what a stranger sees meanwhile."""
    home = tmp_path_factory.mktemp("home")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["HOME"] = str(home)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert owner.stdout is not None
    report: dict[str, Any] = json.loads(owner.stdout.readline())
    stranger = f"import ray; ray.init(address={report['address']!r}, logging_level='ERROR')"
    report["stranger"] = subprocess.run(
        [sys.executable, "-c", stranger],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment
        | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
    )
    output, _ = owner.communicate("go on\n", timeout=120)
    for line in output.splitlines():
        report |= json.loads(line)
    report["code"] = owner.returncode
    report["home"] = sorted(path.name for path in home.iterdir())
    return report


def test_what_runs_on_it_is_not_starved_by_busy_neighbours(report: dict[str, Any]) -> None:
    assert report["niceness"] == os.nice(0) + 5


def test_every_process_of_it_listens_on_loopback_alone(report: dict[str, Any]) -> None:
    listening = report["listening"]
    assert {"raylet", "gcs_server", "ray::DashboardAgent", "ray::RuntimeEnvAgent"} <= set(listening)
    assert {ip for found in listening.values() for ip in found} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert report["gloo"] == loopback_sockets()["GLOO_SOCKET_IFNAME"]


def test_it_asks_for_a_token_that_its_owner_alone_can_read_and_that_is_nobodys_default(report: dict[str, Any]) -> None:
    assert (report["auth"], report["mode"]) == ("token", 0o600)
    assert report["stranger"].returncode != 0
    assert "uth" in report["stranger"].stderr
    assert ".ray" not in report["home"]  # where Ray keeps a token that all of a user's clusters share, readable by all
    assert report["mode after"] is None


def test_signals_to_all_of_its_processes_end_none_and_its_owner_keeps_its_handlers(report: dict[str, Any]) -> None:
    stopping = 1 << 14 | 1 << 1 | 1  # SIGTERM, SIGINT, SIGHUP
    assert {name for name, mask in report["blocked"].items() if int(mask, 16) & stopping != stopping} == set()
    assert report["answers"]
    assert report["handler kept"]
    assert report["code"] == 0
    assert left_of(psutil.Process(pid) for pid in report["pids"] if psutil.pid_exists(pid)) == []


ENDLESS = """
import json, time
import psutil, ray
from serve.local_ray.cluster import local_ray
with local_ray(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, logging_level="ERROR"):
    @ray.remote
    class Worker:
        def works(self): time.sleep(600)
    worker = Worker.remote()
    worker.works.remote()
    time.sleep(1)
    print(json.dumps([p.pid for p in psutil.Process().children(recursive=True)]), flush=True)
    time.sleep(600)
"""


def test_nothing_of_it_is_left_when_its_owner_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    processes = [psutil.Process(pid) for pid in json.loads(owner.stdout.readline())]
    owner.kill()
    owner.communicate()
    assert left_of(processes, timeout=30) == []  # Ray's agents take a minute by themselves


RAISES = """
import ray
from serve.local_ray.cluster import local_ray
options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20, "logging_level": "ERROR"}
try:
    with local_ray(**options):
        raise KeyError("a training that failed")
except KeyError:
    ray.init(**options)
    print("another started")
"""


def test_a_block_that_raises_leaves_its_token_to_no_other_ray() -> None:
    ran = subprocess.run([sys.executable, "-c", RAISES], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert ran.stdout == "another started\n", ran.stderr[-3000:]


EXPOSED = """
from serve.local_ray.cluster import LocalRayError, local_ray
options = {"num_cpus": 1, "include_dashboard": True, "object_store_memory": 80 << 20, "logging_level": "ERROR"}
try:
    with local_ray(dashboard_host="0.0.0.0", **options):
        print("started")
except LocalRayError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(("mode", "begins"), [("disabled", "refused: "), ("token", "started")])
def test_what_others_reach_is_refused_without_a_token_and_logged_with_one(mode: str, begins: str) -> None:
    """A dashboard on all addresses, as nothing of ours asks for."""
    done = subprocess.run(
        [sys.executable, "-c", EXPOSED],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"RAY_AUTH_MODE": mode},
    )
    output = done.stdout + done.stderr
    assert done.stdout.startswith(begins), output
    assert "other machines reach" in output
    assert "on 0.0.0.0:" in output
    assert ("unset RAY_AUTH_MODE" in output) == (mode == "disabled")


@pytest.mark.parametrize(
    ("address", "is_exposed"),
    [("127.0.0.1", False), ("127.8.9.10", False), ("::1", False), ("0.0.0.0", True), ("::", True)],
)
def test_a_process_is_exposed_if_it_listens_where_others_reach_it(address: str, is_exposed: bool) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        port = listener.getsockname()[1]
        found = [line for line in exposed([psutil.Process()]) if line.endswith(f"{address}:{port}")]
        assert bool(found) == is_exposed
