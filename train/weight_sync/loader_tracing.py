"""What vLLM's own weight loaders read and where they put it, found by running them on tensors without values.

A copy of the live model, in a checkpoint's layout, is loaded on the meta device, and every copy that a loader makes is
recorded: which slice of which checkpoint tensor goes to which slice of which parameter. That covers fused
projections, padded vocabularies, replicated heads and tied embeddings without a table of architectures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from serve.vllm.standby_weights import forget, standby_layers
from train.weight_sync.slices import Box, ReshardError


@dataclass(frozen=True)
class Need:
    """``box`` of ``tensor`` goes to ``parameter`` of ``layer``: an element that lies ``i`` from the box's start goes to
    storage position ``offset + i · strides``."""

    tensor: str
    box: Box
    layer: str
    parameter: str
    offset: int
    strides: tuple[int, ...]

    def view(self, parameter: Tensor, box: Box) -> Tensor:
        """Where ``box``, a part of this need's, lies in the parameter (in the checkpoint's layout)."""
        starts = [b0 - n0 for (b0, _), (n0, _) in zip(box, self.box, strict=True)]
        return parameter.data.as_strided(
            [stop - start for start, stop in box],
            self.strides,
            parameter.storage_offset() + self.offset + sum(i * s for i, s in zip(starts, self.strides, strict=True)),
        )


@dataclass(frozen=True)
class Filled:
    """A part of a parameter that gets a constant, as padding does."""

    layer: str
    parameter: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class LoaderTrace:
    """What the loaders of one rank need. ``forms``: (shape, strides) of each parameter that gets weights."""

    needs: tuple[Need, ...]
    fills: tuple[Filled, ...]
    forms: Mapping[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]


def trace_loaders(model: nn.Module, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> LoaderTrace:
    """Run the loaders of ``model``, a live vLLM model, on tensors of these names and shapes; it stays as it is.

    Must run under vLLM's ``set_current_vllm_config``.

    Raises:
        ReshardError: a loader does more than copy, or leaves part of a parameter without weights.
    """
    standby = standby_layers(model)
    try:
        return _traced(model, standby, shapes, dtype)
    finally:
        forget(standby.values())


def _traced(
    model: nn.Module, standby: Mapping[nn.Module, nn.Module], shapes: Mapping[str, Sequence[int]], dtype: torch.dtype
) -> LoaderTrace:
    names = {layer: name for name, layer in model.named_modules()}
    parameters, buffers = (
        {
            (names[layer], key): tensor
            for layer, copy in standby.items()
            for key, tensor in getattr(copy, kind).items()
            if tensor is not None
        }
        for kind in ("_parameters", "_buffers")
    )
    recorder = _CopyRecorder(parameters, buffers)
    with torch.no_grad(), recorder:
        try:
            standby[model].load_weights(recorder.offered(shapes, dtype))
        except ReshardError:
            raise
        except Exception as error:
            raise ReshardError(
                f"{type(model).__name__}'s loaders can't be traced at {recorder.current}: {type(error).__name__}: "
                f"{error}; set train.rollout.reshard to gather, which loads whole tensors"
            ) from error
    return recorder.trace(model)


class _CopyRecorder(TorchDispatchMode):
    """Records what is copied from the tensors on offer into the parameters."""

    def __init__(self, parameters: dict[tuple[str, str], Tensor], buffers: dict[tuple[str, str], Tensor]) -> None:
        super().__init__()
        self.current = "the start"
        self._parameters = parameters
        self._places = {_storage(tensor): place for place, tensor in (*buffers.items(), *parameters.items())}
        self._offered: dict[int, tuple[str, Tensor]] = {}
        self._needs: list[Need] = []
        self._fills: list[Filled] = []

    def offered(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
            self._offered[_storage(tensor)] = (name, tensor)
            self.current = name
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self._written(func, args, kwargs or {})
        if place is not None:
            if func is torch.ops.aten.copy_.default:
                self._copied(place, args[0], args[1])
            elif func is torch.ops.aten.fill_.Scalar or func is torch.ops.aten.zero_.default:
                value = float(args[1]) if len(args) > 1 else 0.0
                view = args[0]
                self._fills.append(
                    Filled(*place, view.storage_offset(), tuple(view.shape), tuple(view.stride()), value)
                )
            else:
                raise self._error(place, f"calls {func} on it")
            return args[0]  # there is nothing to copy, and a bias of the copy is not on the meta device
        return func(*args, **(kwargs or {}))

    def trace(self, model: nn.Module) -> LoaderTrace:
        self._require_all(model)
        touched = {(n.layer, n.parameter) for n in self._needs} | {(f.layer, f.parameter) for f in self._fills}
        forms = {
            place: (tuple(p.shape), tuple(p.stride())) for place, p in self._parameters.items() if place in touched
        }
        return LoaderTrace(tuple(self._needs), tuple(self._fills), forms)

    def _written(self, func: Any, args: Any, kwargs: Any) -> tuple[str, str] | None:
        """The parameter that an operation writes to."""
        if not func._schema.is_mutable:
            return None
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                place = self._places.get(_storage(value))
                if place is not None:
                    return place
        return None

    def _copied(self, place: tuple[str, str], target: Tensor, source: Tensor) -> None:
        if _storage(source) not in self._offered:
            raise self._error(place, "gives it computed values")
        if place not in self._parameters:
            raise self._error(place, "loads it into a buffer")
        name, whole = self._offered[_storage(source)]
        if _sizes(target) != _sizes(source):
            raise self._error(place, f"repeats a slice of shape {tuple(source.shape)} over {tuple(target.shape)}")
        if source.numel() == 0:
            return
        # For each dimension of the checkpoint's tensor: the span that was read, and the stride in the parameter.
        box, strides, offset = [], [], source.storage_offset()
        kept = [(n, s, t) for n, s, t in zip(_sizes(source), _strides(source), _strides(target), strict=True)]
        for size, stride in zip(whole.shape, whole.stride(), strict=True):
            start = min(offset // stride, size - 1) if stride else 0
            offset -= start * stride
            span = next((k for k in kept if k[1] == stride and size > 1), None)
            if span is not None:
                kept.remove(span)
            box.append((start, start + (span[0] if span else 1)))
            strides.append(span[2] if span else 0)
        if kept or offset or any(stop > size for (_, stop), size in zip(box, whole.shape, strict=True)):
            raise self._error(place, f"reads {tuple(source.shape)} of it with strides {tuple(source.stride())}")
        self._needs.append(Need(name, tuple(box), *place, target.storage_offset(), tuple(strides)))

    def _require_all(self, model: nn.Module) -> None:
        """Every parameter gets weights in every part, or is another one's under a second name, or there is none of it.

        Only the number of elements is compared: loaders do not write the same place twice.
        """
        written: dict[tuple[str, str], int] = {}
        for need in self._needs:
            size = math.prod(stop - start for start, stop in need.box)
            written[need.layer, need.parameter] = written.get((need.layer, need.parameter), 0) + size
        for fill in self._fills:
            written[fill.layer, fill.parameter] = written.get((fill.layer, fill.parameter), 0) + math.prod(fill.sizes)
        shared = {id(model.get_submodule(layer)._parameters[key]) for layer, key in written}
        for (layer, key), parameter in self._parameters.items():
            got, size = written.get((layer, key), 0), parameter.numel()
            if got != size and (got or id(model.get_submodule(layer)._parameters[key]) not in shared):
                raise ReshardError(
                    f"vLLM's loaders give {layer}.{key} {got} of its {size} weights; the rest would stay the old "
                    "policy's. Set train.rollout.reshard to gather, which loads whole tensors"
                )

    def _error(self, place: tuple[str, str], what: str) -> ReshardError:
        return ReshardError(
            f"vLLM's loader of {'.'.join(place)} can't be traced at {self.current}: it {what}; set "
            "train.rollout.reshard to gather, which loads whole tensors"
        )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _sizes(tensor: Tensor) -> list[int]:
    return [n for n in tensor.shape if n > 1]


def _strides(tensor: Tensor) -> list[int]:
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
