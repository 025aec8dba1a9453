"""A policy that memory has no room for, computing all the same: each module reads its weights when its turn comes.

For ``serve.policies.probe``, which wants the logprobs of a few tokens in float32 from what was written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from feedback.trusted_code import trusted
from serve.policies.probe import Unreadable
from train.model.fsdp import causal_lm, skeleton
from train.model.hf_io import stored_in

Read = Callable[[], Tensor]
"""Reads one parameter, as the model has it, in the type that it is stored in."""


def piecewise_model(folder: Path, model_class: Any = None) -> PreTrainedModel:
    """A policy in float32 whose modules read their parameters when they compute, and drop them behind it.

    Args:
        model_class: a user's own; by default that of the policy's config.

    Raises:
        Unreadable: a parameter is not read from the folder, or a buffer is neither stored nor made by transformers.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted(folder))
    model = skeleton(config, model_class or causal_lm, buffer=_unset)
    reads = _reads(model, folder)
    for prefix, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
            if name in reads:
                module._buffers[key] = reads[name]()
            elif bool((buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer)).any()):
                raise Unreadable(f"{name} is not stored, and transformers has no rule for it")
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for module in model.modules():
        own: dict[str, Read] = {}
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            tied = names[id(parameter)]
            found = next((name for name in tied if name in reads), None)
            if found is None:
                raise Unreadable(f"{tied[0]} is none of what is stored in {folder.name}")
            own[key] = reads[found]
        if own:
            module.register_forward_pre_hook(partial(_fill, own=own))
            module.register_forward_hook(partial(_drop, own=own), always_call=True)
    return model.eval()


def _reads(model: PreTrainedModel, folder: Path) -> dict[str, Read]:
    """How each parameter and buffer is read, by name, as transformers would load it; for what is stored."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    files, state = stored_in(folder), model.state_dict()
    plain: dict[str, str] = {}
    made: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if pattern is None:
            plain[name] = key
        else:
            made.setdefault(name, []).append((key, pattern))

    def read(key: str) -> Tensor:
        with safe_open(files[key], framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor

    def make(name: str) -> Tensor:
        converter = deepcopy(by_pattern[made[name][0][1]])
        for key, pattern in made[name]:
            converter.add_tensor(name, key, pattern, partial(read, key))
        tensor: Tensor = converter.convert(name, model=model, config=model.config)[name]
        return tensor

    return {name: partial(make, name) for name in made} | {name: partial(read, key) for name, key in plain.items()}


def _unset(buffer: Tensor) -> Tensor:
    """As ``buffer``, on the CPU, with values that no model computes."""
    if buffer.is_floating_point():
        return torch.full_like(buffer, math.nan, device="cpu")
    least = False if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min
    return torch.full_like(buffer, least, device="cpu")


def _fill(module: nn.Module, _: Any, *, own: dict[str, Read]) -> None:
    for key, read in own.items():
        module._parameters[key] = nn.Parameter(read().float(), requires_grad=False)


def _drop(module: nn.Module, *_: Any, own: dict[str, Read]) -> None:
    for key in own:
        parameter = module._parameters[key]
        assert parameter is not None
        module._parameters[key] = nn.Parameter(parameter.to("meta"), requires_grad=False)
