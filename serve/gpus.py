"""Memory and use of this machine's NVIDIA GPUs, from the driver's library (NVML), which comes with vLLM for GPUs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU at this moment: bytes, and the share of the last moments in which it was at work.

    ``capability``: its compute capability. ``use``: NaN where the driver does not measure it, as of a GPU in MIG mode.
    """

    index: int
    used_bytes: int
    total_bytes: int
    use: float
    name: str = "a GPU"
    capability: tuple[int, int] = (0, 0)


def smallest_gpu() -> Gpu | None:
    """That with the least memory; None where there is none, or none that this process may use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    return min(gpus(), key=lambda gpu: gpu.total_bytes, default=None)


def gpus() -> list[Gpu]:
    """All of them; none without a driver, or without its library in Python."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return []
    try:
        return [_read(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _read(nvml, index: int) -> Gpu:  # type: ignore[no-untyped-def]
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        use = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError_NotSupported:
        use = math.nan
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    name = nvml.nvmlDeviceGetName(handle)
    return Gpu(index, int(memory.used), int(memory.total), use, str(name), (int(major), int(minor)))
