"""What a rank says of itself: where it computes, what it has computed, and the most memory that it has held."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Device:
    """``name``: "cpu", or that of a GPU. ``index``: of the GPU on its host; None on a CPU."""

    host: str
    name: str
    index: str | None = None

    def __str__(self) -> str:
        return f"{self.name} of {self.host}" if self.index is None else f"GPU {self.index} ({self.name}) of {self.host}"


@dataclass(frozen=True)
class Usage:
    """What a rank's updates have computed, as ``train.planner.sizes.Batch`` counts it, in ``seconds``.

    ``peak_memory``: bytes, the most so far: of a GPU what torch has reserved there, else of the process.
    """

    peak_memory: int
    seconds: float = 0.0
    rows: int = 0
    scored: int = 0
    pairs: float = 0.0


def this_device() -> Device:
    """Where this process computes."""
    if not torch.cuda.is_available():
        return Device(socket.gethostname(), "cpu")
    current, visible = torch.cuda.current_device(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    index = visible.split(",")[current] if visible else str(current)
    return Device(socket.gethostname(), torch.cuda.get_device_name(current), index)


def reset_peak_memory() -> None:
    """Have ``peak_memory`` count from now on: a resident process has worked for other runs before."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):  # where the kernel forbids it, the peak is since the process began
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Bytes; as of ``Usage``."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return 1024 * int(found[1]) if found else 0
