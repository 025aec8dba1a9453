"""What a rollout engine takes of each device that it is split over: counted alike by a plan and by the engine's rank.

A plan counts parameters by transformers' own model, a rank by the headers of the files that its engine loads. Imports
no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from serve.kv_cache import device_share
from serve.standby_room import weight_bytes
from serve.vllm.adapters.slots import body_parameters, places_bytes
from train.config.training import TrainConfig
from train.planner.sizes import ITEMSIZE

ADAPTER_COPIES: Final = 2
"""Of the adapters in training: vLLM's slot, and what was put into it."""


def engine_bytes(parameters: int, in_fp8: int, *, itemsize: int, tensor_parallel_size: int, adapters: int = 0) -> int:
    """Of the weights on a device: a byte for each of the parameters that are ``in_fp8``, ``itemsize`` for the others.

    ``adapters``: bytes of both copies, which each device has whole.
    """
    return (itemsize * (parameters - in_fp8) + in_fp8) // tensor_parallel_size + adapters


def engine_share(config: TrainConfig, policy: Path, *, kv_cache: int, device: int) -> float:
    """``device_share`` of an engine for rollouts on the policy in a folder.

    The weights are in ``train.dtype`` whatever type the files have, and in fp8 as ``train.fp8.rollout`` says.

    Raises PolicyError, and ValueError if there are no weights.
    """
    itemsize, lora = ITEMSIZE[config.dtype], config.lora
    whole, _ = weight_bytes(policy, config.dtype)
    in_fp8 = body_parameters(policy) if config.fp8 is not None and config.fp8.rollout is not None else 0
    adapters = 0
    if config.generates_beside_adapters and lora is not None:
        modules = None if lora.target_modules == "all-linear" else lora.target_modules
        adapters = places_bytes(policy, count=ADAPTER_COPIES, rank=lora.rank, itemsize=itemsize, modules=modules)
    size = config.rollout.tensor_parallel_size
    weights = engine_bytes(whole // itemsize, in_fp8, itemsize=itemsize, tensor_parallel_size=size, adapters=adapters)
    return device_share(weights, kv_cache, device)
