"""Asks whether this machine computes in fp8 where the settings of training have it, before anything is started."""

from __future__ import annotations

from deploy.gpus import gpus
from deploy.memory_check import computes_on_cpu
from train.config.fp8 import fp8_unsupported
from train.config.training import TrainConfig


def fp8_problem(config: TrainConfig) -> str | None:
    """Why not; None if it does, or if that can't be known here: each rank looks at its own device again."""
    if config.fp8 is None or config.ray_address is not None:
        return None
    if computes_on_cpu():
        return fp8_unsupported(config.fp8, "the CPU of this machine", None)
    try:
        found = gpus()
    except Exception:  # noqa: BLE001  a driver that does not answer keeps nobody from a GPU that may well do
        return None
    if not found:
        return None
    newest = max(found, key=lambda gpu: gpu.capability)
    major, minor = newest.capability
    return fp8_unsupported(config.fp8, f"{newest.name} (compute capability {major}.{minor})", newest.capability)
