"""From a Hugging Face folder into FSDP2 shards, and the names and types that it stores them by.

A rank reads of each tensor only the slice that it holds, also where transformers makes one parameter of several stored
tensors (the experts of most mixtures): ``train.model.stored_parts``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from serve.policies.folder import safetensors_header
from train.model.stored_parts import (
    Conversion,
    StoredPart,
    common_box,
    conversion,
    covers,
    parts_of,
    relative,
)

ADAPTER = ".lora_"
"""In the names of the parameters that no checkpoint holds: the adapter's own."""

FLOATS: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating-point types by their names in safetensors."""


def remember_names(model: PreTrainedModel, policy: Path) -> None:
    """Keep on the bare model its class (``made_as``), and how ``policy`` stores each parameter: under which names
    (``checkpoint_keys``), in which parts (``checkpoint_parts``), or as what else (``conversions``).

    It must come before ``fully_shard``, which changes the model's class, by which transformers knows its names.
    """
    model.made_as = type(model)
    model.checkpoint_keys, made = names(model, list(stored_in(policy)))
    model.checkpoint_parts, model.conversions = {}, []
    shapes = stored_shapes(policy) if made else {}
    for of in made:
        if (parts := parts_of(of, shapes)) is not None:
            model.checkpoint_parts[of.name] = parts
        else:
            model.conversions.append(of)


def load(
    model: nn.Module,
    policy: Path,
    device: torch.device,
    unstored: frozenset[str] = frozenset(),
    others: Collection[str] = (),
) -> None:
    """Give the sharded parameters of ``model``, on the meta device, the values that ``policy`` stores.

    Values are converted to each parameter's own dtype. Every rank must call it.

    Args:
        model: after ``remember_names`` and ``fully_shard``.
        device: where this rank's shards live.
        unstored: plain names of parameters that keep what they have if the policy does not store them.
        others: plain names of parameters that are left as they are.

    Raises:
        ValueError: the folder has no safetensors, lacks a tensor, or has one of another shape.
    """
    files = stored_in(policy)
    keys: dict[str, list[str]] = model.checkpoint_keys
    absent = {name for name in unstored if not keys.get(name)}
    wanted = {
        name: t
        for name, t in held(model)
        if ADAPTER not in name and plain_name(name) not in absent and plain_name(name) not in others
    }
    by_plain = {plain_name(name): name for name in wanted}
    made = [of for of in model.conversions if of.name in by_plain]
    whole = {name: t for name, t in wanted.items() if keys.get(plain_name(name))}
    parts = {name: model.checkpoint_parts.get(plain_name(name), []) for name in wanted.keys() - whole.keys()}
    fill(wanted, read_slices(whole, keys, files), device)
    fill(wanted, read_parts({name: (wanted[name], of) for name, of in parts.items() if of}, files, policy), device)
    found = {*whole, *(name for name, of in parts.items() if of)}
    for of in made:
        values = of.run(model, lambda key: read_whole(files[key], key))
        named = {by_plain[name]: values[name] for name in values.keys() & by_plain.keys()}
        fill(wanted, own_parts(named, wanted, policy), device)
        found |= named.keys()
    if missing := sorted(plain_name(name) for name in wanted.keys() - found):
        raise ValueError(f"{policy} has no tensors for {missing[:8]}{' …' if len(missing) > 8 else ''}")


def stored_tensors(model: nn.Module, parameters: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name in a checkpoint, whole tensor), from parameters by their plain names; every rank must take all of them.

    What the policy stored under several names comes once under each. A parameter that transformers had put together
    from several tensors (experts) is taken apart again.
    """
    for name, tensor in parameters:
        yield from stored_as(model, name, whole_tensor(tensor))


def stored_as(model: nn.Module, name: str, whole: Tensor) -> Iterable[tuple[str, Tensor]]:
    """The tensors of a checkpoint that a whole parameter becomes, as of ``stored_tensors``."""
    keys: dict[str, list[str]] = model.checkpoint_keys
    if keys.get(name):
        return [(key, whole) for key in keys[name]]
    if name in model.checkpoint_parts:
        return [(part.key, part.of(whole)) for part in model.checkpoint_parts[name]]
    converted: dict[str, Tensor] = revert_weight_conversion(model, {name: whole})
    return converted.items()


def is_own(made_as: type) -> bool:
    """Whether a model's class is a user's, and neither transformers' nor of code that comes with the model."""
    return made_as.__module__.partition(".")[0] not in ("transformers", TRANSFORMERS_DYNAMIC_MODULE_NAME)


# ------------------------------------------------------------------------------------------------------- names


def plain_name(name: str) -> str:
    """A parameter's name in the bare model, without what activation checkpointing and LoRA put around its module."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("base_layer.", "")


def held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything that a checkpoint holds: parameters, a tied one once, and persistent buffers.

    A forward pass leaves the root's parameters gathered, in the compute dtype; here they are the master weights again.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def names(model: PreTrainedModel, keys: list[str]) -> tuple[dict[str, list[str]], list[Conversion]]:
    """Plain parameter name -> names in a checkpoint that has ``keys``; none for one that is not stored as it is, and
    what those are made of.

    A tied parameter has the keys of all its names. The transforms of transformers that were needed are kept on the
    model, where its ``revert_weight_conversion`` looks for them.
    """
    first: dict[int, str] = {}
    alias: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        alias[plain_name(name)] = first.setdefault(id(parameter), plain_name(name))
    alias |= {plain_name(name): plain_name(name) for name, _ in held(model) if plain_name(name) not in alias}
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, list[str]] = {name: [] for name in alias.values()}
    sources: dict[str, list[tuple[str, str]]] = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, alias)
        if name not in alias and key in alias:
            name, pattern = key, None
        if pattern is None and name in alias:
            found[alias[name]].append(key)
        elif pattern is not None and name in alias:
            sources.setdefault(alias[name], []).append((pattern, key))
    for name, of in found.items():
        of.sort(key=lambda key: (key != name, key))
    model._weight_conversions = [t for t in transforms if t.was_used()]
    return found, [conversion(of_pattern[of[0][0]], name, of) for name, of in sources.items()]


def stored_in(policy: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it."""
    index = policy / "model.safetensors.index.json"
    if index.exists():
        return {key: policy / name for key, name in json.loads(index.read_text())["weight_map"].items()}
    single = policy / "model.safetensors"
    if not single.exists():
        raise ValueError(f"{policy} has neither {single.name} nor {index.name}; a policy's weights are safetensors")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def stored_dtypes(policy: Path) -> dict[str, torch.dtype]:
    """Tensor name -> the floating-point type that ``policy`` stores it in, whatever its config says."""
    headers = (safetensors_header(path) for path in set(stored_in(policy).values()))
    entries = ((name, entry["dtype"]) for header in headers for name, entry in header.items())
    return {name: FLOATS[dtype] for name, dtype in entries if dtype in FLOATS}


def stored_shapes(policy: Path) -> dict[str, list[int]]:
    """Tensor name -> the shape that ``policy`` stores it in."""
    headers = (safetensors_header(path) for path in set(stored_in(policy).values()))
    return {name: entry["shape"] for header in headers for name, entry in header.items()}


def common_dtype(dtypes: Collection[torch.dtype]) -> torch.dtype:
    """The one type of all, or float32."""
    return next(iter(dtypes)) if len(set(dtypes)) == 1 else torch.float32


# ------------------------------------------------------------------------------------------------------ reading


def fill(wanted: dict[str, Tensor], values: Iterator[tuple[str, Tensor]], device: torch.device) -> None:
    """Put each rank's part of the values, in place, where the meta tensors are: ties and references stay."""
    for name, local in values:
        target = wanted[name]
        local = local.to(device=device, dtype=target.dtype, copy=True)
        if isinstance(target, DTensor):
            torch.utils.swap_tensors(target, as_parameter(local, like=target))
        elif target.is_meta:
            torch.utils.swap_tensors(target, nn.Parameter(local, requires_grad=target.requires_grad))
        else:
            target.copy_(local)


def as_parameter(local: Tensor, *, like: DTensor) -> nn.Parameter:
    """This rank's part, where it lies, as a parameter that is sharded as ``like``."""
    if local.device.type == like.device_mesh.device_type:
        whole = DTensor.from_local(
            local.contiguous(),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
    else:  # from_local would move it to the mesh's devices, and train.fsdp.cpu_offload keeps it in the host's memory
        whole = torch.empty_like(like, dtype=local.dtype, device=local.device, requires_grad=False)
        whole.to_local().copy_(local)
    return nn.Parameter(whole, requires_grad=like.requires_grad)


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor's values, gathered if it is sharded; every rank must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    # What FSDP has cut of a slice makes the slice whole first: torch has no way from both to the whole at once.
    slices = [Replicate() if isinstance(p, _StridedShard) else p for p in tensor.placements]
    return tensor.redistribute(placements=slices).full_tensor()


def own_slice(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor, one slice per dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))


def read_slices(
    wanted: dict[str, Tensor], keys: dict[str, list[str]], files: dict[str, Path]
) -> Iterator[tuple[str, Tensor]]:
    """(name, this rank's part), read from the files; file by file, so that one is open at a time."""
    by_file: dict[Path, list[str]] = {}
    for name in wanted:
        by_file.setdefault(files[keys[plain_name(name)][0]], []).append(name)
    for path, of_file in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name in of_file:
                key, target = keys[plain_name(name)][0], wanted[name]
                stored = file.get_slice(key)
                require_shape(key, stored.get_shape(), target, path)
                yield name, stored[own_slice(target)] if target.ndim else file.get_tensor(key)


def read_parts(
    wanted: dict[str, tuple[Tensor, list[StoredPart]]], files: dict[str, Path], policy: Path
) -> Iterator[tuple[str, Tensor]]:
    """(name, this rank's part) of parameters that are stored in parts: what its shard meets of each, and no more."""
    for name, (target, parts) in wanted.items():
        if not covers(parts, target.shape):
            raise ValueError(
                f"{policy}: the {len(parts)} tensors that {plain_name(name)} is made of, {parts[0].key} to "
                f"{parts[-1].key}, are not all of its shape {list(target.shape)}"
            )
        own = own_slice(target)
        by_file: dict[Path, list[tuple[StoredPart, tuple[slice, ...]]]] = {}
        for part in parts:
            if (common := common_box(part.box, own)) is not None:
                by_file.setdefault(files[part.key], []).append((part, common))
        local: Tensor | None = None
        for path, of_file in by_file.items():
            with safe_open(path, framework="pt") as file:
                for part, common in of_file:
                    values = file.get_slice(part.key)[part.within(common)]
                    if local is None:
                        local = values.new_empty([s.stop - s.start for s in own])
                    part.as_stored(local[relative(common, own)]).copy_(values)
        yield name, torch.empty([s.stop - s.start for s in own]) if local is None else local


def own_parts(values: dict[str, Tensor], wanted: dict[str, Tensor], where: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, this rank's part) of whole values."""
    for name, whole in values.items():
        require_shape(plain_name(name), list(whole.shape), wanted[name], where)
        yield name, whole[own_slice(wanted[name])]


def read_whole(path: Path, key: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(key)
        return tensor


def require_shape(key: str, stored: list[int], target: Tensor, where: Path) -> None:
    if list(stored) != list(target.shape):
        raise ValueError(f"{where}: {key} has shape {list(stored)}; the model's is {list(target.shape)}")
