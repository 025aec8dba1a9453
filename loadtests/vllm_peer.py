"""vLLM's own server, as the load tests start it: with the engine's configuration of ``millrace serve``.

Flags and variables are those that Millrace sets by default (``serve/vllm/boot.py``). They are written here again, since
load tests import nothing of the product. vLLM's statistics stay on (no ``--disable-log-stats``): both servers count
tokens and times and export them as metrics. The line that vLLM logs of them is below the log level that both have.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Final

SEQUENCES: Final = 64
"""``serve.engine.max_num_seqs``."""


def command(model: Path, port: int, *, dtype: str, kv_cache_bytes: int) -> list[str]:
    """Serve the model's folder as ``model`` on a port of loopback."""
    flags = {"--model": model, "--served-model-name": "model", "--host": "127.0.0.1", "--port": port}
    flags |= {"--dtype": dtype, "--kv-cache-memory-bytes": kv_cache_bytes, "--max-num-seqs": SEQUENCES}
    flags |= {"--distributed-executor-backend": "uni", "--uvicorn-log-level": "warning"}
    switches = ["--enforce-eager", "--enable-prefix-caching", "--disable-uvicorn-access-log"]
    if not _has_gpu():
        switches.append("--no-enable-chunked-prefill")
    values = [str(text) for flag in flags.items() for text in flag]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *values, *switches]


def variables() -> dict[str, str]:
    """What the server's environment has beside this process's own.

    Without VLLM_ENABLE_V1_MULTIPROCESSING=0, vLLM on a CPU runs the model in a worker below its engine's process,
    whatever the flags say (``vllm/platforms/cpu.py``).
    """
    found = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCHDYNAMO_DISABLE": "1",
    }
    if not _has_gpu():
        found["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) - 1))
    return found


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
