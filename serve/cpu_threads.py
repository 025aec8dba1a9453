"""How many threads a step of a CPU engine is worth.

Waking a thread for a small step costs more than it saves, and takes a core from the API process. A step's work is its
tokens times the weights that each goes through.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import torch

_BYTES_A_THREAD: Final = 800_000_000
"""Weights times tokens that keep a thread busy for some seven milliseconds, before another is worth waking. Measured on
two cores with a model of 12 MB: at 8 tokens one thread is a third faster than two, at 64 a tenth slower (but it leaves
a core to the API process), at 512 half as fast."""


class Threads:
    """Sets the number of threads of this process's PyTorch before each step; no more than it has at first."""

    def __init__(self, vllm_config: Any) -> None:
        on_cpu = vllm_config.device_config.device_type == "cpu"
        here = vllm_config.parallel_config.world_size == 1  # else the workers are processes of their own
        folder = Path(vllm_config.model_config.model)
        self._weights = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if on_cpu and here else 0
        self._most = torch.get_num_threads() if self._weights else 1
        self._set = self._most

    def fit(self, tokens: int) -> None:
        """To be called before a step of so many tokens."""
        if self._most == 1:
            return
        worth = min(self._most, max(1, math.ceil(tokens * self._weights / _BYTES_A_THREAD)))
        if worth != self._set:
            # Not torch.set_num_threads, in whose place vLLM's CPU worker puts a function that does nothing.
            torch._C.set_num_threads(worth)
            self._set = worth
