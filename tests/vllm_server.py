"""vLLM's own OpenAI server, with a small model, for tests of what asks such a server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from loadtests.server import free_port

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """Serve the model as ``tiny``, in float32: the address of its API."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", port, "--enforce-eager", "--dtype", "float32", "--max-num-seqs", 8),
        *("--kv-cache-memory-bytes", 64 << 20, *options),
    ]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, env=os.environ | _ENVIRONMENT
        )
    try:
        deadline = time.monotonic() + 400
        url = f"http://127.0.0.1:{port}"
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.2)
        else:
            raise RuntimeError(f"vLLM did not get ready:\n{log.read_text()[-3000:]}")
        yield f"{url}/v1"
    finally:
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
