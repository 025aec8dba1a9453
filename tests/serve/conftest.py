"""Tiny random policies, and one real server on a real vLLM engine for the whole session."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from feedback.processes.fork_server import ForkedProcess
from loadtests.server import free_port
from loadtests.tiny_model import make_model_folder
from serve.policies.store import Pointer, PolicyStore
from tests.paths import ROOT
from tests.processes import start_forked


@cache
def reference_model(folder: Path) -> Any:
    """The policy by transformers, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logprobs(
    folder: Path, prompt: list[int], response: list[int], *, temperature: float = 1.0, start: int = 0
) -> list[float]:
    """Logprobs by transformers, in float32, of the response tokens from ``start`` on."""
    logits = reference_model(folder)(torch.tensor([prompt + response])).logits[0] / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    at = len(prompt) - 1
    return [logprobs[at + i, token].item() for i, token in enumerate(response) if i >= start]


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three model folders of one architecture with different weights."""
    root = tmp_path_factory.mktemp("models")
    return [make_model_folder(root / f"m{seed}", seed) for seed in (1, 2, 3)]


@pytest.fixture
def store(tmp_path: Path) -> PolicyStore:
    """An empty policy store."""
    return PolicyStore(tmp_path / "policies")


START_TIMEOUT_S = 600
"""So much because other tests run meanwhile; a server that ends is not waited for."""

SERVER = ROOT / "tests" / "serve" / "server_process.py"


@dataclass
class LiveServer:
    """A server process, its home and a way to look into its lake."""

    home: Path
    url: str
    process: subprocess.Popen[bytes] | ForkedProcess
    store: PolicyStore
    log: Path

    def rows(self, table: str, where: str = "true") -> list[dict[str, Any]]:
        """Rows of a table, sealed or still in the journal."""
        with Lake(str(self.home / "lake"), LakeConfig()).connect(self.home / "journal") as connection:
            return connection.sql(f"SELECT * FROM {table} WHERE {where}").to_arrow_table().to_pylist()

    def outcomes(self, **headers: str) -> dict[str, int]:
        """What its requests for responses have come to."""
        text = httpx.get(f"{self.url}/metrics", headers=headers, timeout=60).text
        found = re.findall(r'millrace_outcomes_total\{outcome="(\w+)"\} (\d+)', text)
        return {"complete": 0, "failed": 0, "refused": 0, "left": 0} | {name: int(count) for name, count in found}

    def engine(self) -> psutil.Process:
        """The process of its engine."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        (engine,) = (one for one in below if "EngineCore" in " ".join(one.cmdline()))
        return engine

    def promote(self, version: int) -> Pointer:
        """Move the pointer."""
        pointer = self.store.serving()
        return self.store.promote(version, expected=pointer.version if pointer else None, who="test", why="test")

    def settle(self, pointer: Pointer, timeout: float = 120) -> dict[str, Any]:
        """Wait until the server has acted on the pointer, well or not; returns ``GET /policy``."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            policy: dict[str, Any] = httpx.get(f"{self.url}/policy", timeout=60).json()
            if (
                policy["generation"] == pointer.generation
                or (policy["failed"] or {}).get("generation") == pointer.generation
            ):
                return policy
            time.sleep(0.02)
        raise TimeoutError(f"generation {pointer.generation} was not acted on; {self.log.read_text()[-2000:]}")


def start_server(
    home: Path, store: PolicyStore, capture: dict[str, Any] | None = None, *, forked: bool = True, **serve: Any
) -> LiveServer:
    """Start a server process on a free port and wait until it is ready. The user's modules are in ``home``.

    ``forked``: from a process that has imported vLLM, of which a fleet's replicas would have nothing.
    """
    port = free_port()
    settings = {
        "serve": {
            "port": port,
            "policies": str(store.root),
            "replicas": str(home / "replicas"),
            "keys": str(home / "keys.json"),
            "audit": str(home / "audit.jsonl"),
            "engine": {"kv_cache_bytes": 64 << 20, "threads": 1},
            "swap": {"poll_seconds": 0.05},
            **serve,
        },
        "feedback": {
            "capture": capture or {},
            "kinds": {"metrics": {"clicked": {"type": "boolean"}}},
            "journal": {"folder": str(home / "journal"), "segment_seconds": 1},
            "lake": {"uri": str(home / "lake"), "seal_seconds": 1, "storage_options": {"aws_secret_access_key": "s"}},
            "scoring": {
                "judge": {"url": "http://judge.invalid/v1", "model": "m", "rubric": "{response}", "api_key": "secret"}
            },
        },
    }
    log = home / "server.log"
    arguments, variables = [str(SERVER), json.dumps(settings)], os.environ | {"PYTHONPATH": str(home)}
    process: subprocess.Popen[bytes] | ForkedProcess
    if forked and "fleet" not in serve:
        process = start_forked(arguments, log, variables)
    else:
        with log.open("wb") as output:
            command = [sys.executable, *arguments]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=variables)
    server = LiveServer(home, f"http://127.0.0.1:{port}", process, store, log)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/ready", timeout=2).status_code == 200:
                return server
        time.sleep(0.1)
    process.kill()
    raise RuntimeError(f"the server did not get ready:\n{log.read_text()[-4000:]}")


def stop_server(server: LiveServer) -> int:
    """SIGTERM; returns the exit code."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(180)
    except subprocess.TimeoutExpired:
        server.process.kill()
        raise


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, model_folders: list[Path]) -> Iterator[LiveServer]:
    """The session's server. Policies 1 to 3 are there; 1 serves at first."""
    home = tmp_path_factory.mktemp("home")
    store = PolicyStore(home / "policies")
    for number, folder in enumerate(model_folders):
        store.publish(folder, parent=number or None, lineage={"test": True}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    live = start_server(home, store, forked=False)  # as `millrace serve` is, for most tests
    yield live
    stop_server(live)


@pytest.fixture
async def client(server: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the session's server."""
    limits = httpx.Limits(max_connections=128)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
        yield http
