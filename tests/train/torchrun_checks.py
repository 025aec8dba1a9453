"""A module of tests run by torchrun, a rank a process, each with training and vLLM in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

from tests.paths import ROOT

ENGINE_IN_RANK: Final = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
"""The environment of such a process on a CPU."""


def answer_of_ranks(
    module: str, *arguments: object, ranks: int, timeout: float, environment: Mapping[str, str] = ENGINE_IN_RANK
) -> dict[str, Any]:
    """The last line of JSON that the module prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*torchrun, "-m", module, *map(str, arguments)],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, f"{module} ended with {done.returncode}:\n{done.stderr[-6000:]}"
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer
