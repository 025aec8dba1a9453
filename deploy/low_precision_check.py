"""Asks whether this machine computes in fewer bits where the settings of training have it, before anything starts."""

from __future__ import annotations

import importlib.util

from deploy.devices import computes_on_cpu
from serve.gpus import gpus
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


def torchao_problem(config: TrainConfig) -> str | None:
    """Which setting needs torchao, where that is not installed here; None otherwise, or if training runs elsewhere."""
    if config.ray_address is not None or importlib.util.find_spec("torchao") is not None:
        return None
    lora, critic, fp8 = config.lora, config.algorithm.critic.lora, config.fp8
    needed = {
        "train.optimizer.name=adamw_8bit": config.optimizer.name == "adamw_8bit",
        "train.lora.base=nf4": lora is not None and lora.base is not None,
        "train.algorithm.critic.lora.base=nf4": critic is not None and critic.base is not None,
        "train.fp8.training": fp8 is not None and fp8.training is not None,
    }
    if wants := [setting for setting, needs in needed.items() if needs]:
        return f"{wants[0]} needs torchao, which is not installed: pip install 'millrace[low-precision]'"
    return None
