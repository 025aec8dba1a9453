"""Frozen weights in NF4, which is 4 bits a value and a scale for every 64 (QLoRA, arXiv 2305.14314), by torchao.

They are the weights that adapters are around. A rank holds its rows of them in 4 bits, FSDP2 gathers them in 4 bits
(one rank alone holds all of them, outside of it), and a layer unpacks its weight as it multiplies, in either pass.
Their scales are 8 bits each, and so have scales too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.model.hf_io import as_parameter, own_slice, plain_name, require_shape, stored_in

BLOCK: Final = 64
_SCALES: Final = 256  # that share a scale, at most

Named = dict[str, nn.Parameter]
"""Parameters by their plain names."""


def base_weights(model: nn.Module, shards: int, setting: str) -> Named:
    """The weights that adapters are around. The model has adapters, and is not sharded yet.

    Args:
        shards: ranks that share a copy, by rows.
        setting: what messages call the setting that asks for this.

    Raises:
        ValueError: one can't be held in NF4, or not in equal parts by as many ranks.
    """
    found = {}
    users = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        if not name.endswith(".base_layer.weight"):
            continue
        layer = model.get_submodule(name.removesuffix(".weight"))
        plain = plain_name(name)
        if type(layer) is not nn.Linear or users[id(parameter)] > 1:
            raise ValueError(
                f"{setting}: {plain} is of {type(layer).__name__}, and torchao multiplies by NF4 in plain linear "
                "layers alone: leave it out of target_modules, or set this to null"
            )
        if not model.checkpoint_keys.get(plain):
            raise ValueError(f"{setting}: {plain} is put together from several stored tensors; set it to null")
        rows, columns = parameter.shape
        if rows % shards or rows // shards * columns % BLOCK:
            raise ValueError(
                f"{setting}: {plain} of {rows} times {columns} values can't be shared out by rows in whole blocks of "
                f"{BLOCK} to {shards} ranks, as FSDP2 gathers weights of 4 bits: change train.ranks or "
                "train.fsdp.replicas, leave it out of target_modules, or set this to null"
            )
        found[plain] = parameter
    return found


def load(model: nn.Module, names: Iterable[str], policy: Path, device: torch.device) -> None:
    """Give sharded weights, on the meta device, what ``policy`` stores, in NF4.

    A rank reads each whole, as the mean of its scales is one for all, and keeps its rows.

    Args:
        names: as ``base_weights`` found them.

    Raises:
        ValueError: the policy has one of another shape.
    """
    from torchao.quantization import NF4Tensor

    files, parameters = stored_in(policy), {plain_name(name): p for name, p in model.named_parameters()}
    for name in names:
        target = parameters[name]
        (key, *_) = model.checkpoint_keys[name]
        with safe_open(files[key], framework="pt") as file:
            stored = file.get_tensor(key)
        require_shape(key, list(stored.shape), target, files[key])
        whole = stored.to(device=device, dtype=target.dtype)
        rows = own_slice(target)[0]
        size = rows.stop - rows.start
        blocks = size * target.shape[1] // BLOCK
        packed = NF4Tensor.from_tensor(whole, BLOCK, math.gcd(blocks, _SCALES))
        local = packed.split(size)[rows.start // size]
        sharded = isinstance(target, DTensor)
        new = as_parameter(local, like=target) if sharded else nn.Parameter(local, requires_grad=False)
        torch.utils.swap_tensors(target, new)


def unpacked(weight: Tensor) -> Tensor:
    """This rank's part of a weight, as numbers if it is in NF4."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return local.get_original_weight() if is_packed(local) else local


def is_packed(weight: Tensor) -> bool:
    """Whether it is in NF4, or a shard of one that is."""
    return hasattr(weight.to_local() if isinstance(weight, DTensor) else weight, "get_original_weight")


def stored_part(model: nn.Module, policy: Path, name: str, like: Tensor) -> Tensor:
    """This rank's part of a weight as ``policy`` stores it; ``name``: its plain one."""
    key = model.checkpoint_keys[name][0]
    with safe_open(stored_in(policy)[key], framework="pt") as file:
        part: Tensor = file.get_slice(key)[own_slice(like)]
    return part.to(unpacked(like).device)
