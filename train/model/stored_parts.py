"""Parameters that transformers makes of several stored tensors, as it does of the experts of most mixtures.

Most are put together of whole tensors, stacked and joined: of those each stored tensor is a box of the parameter, so
that a rank reads what its shard meets alone, and what is exported or sent goes under the checkpoint's own names. What
is computed in another way (transposed, split, interleaved) is left to transformers, one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, dot_natural_key

Box = tuple[slice, ...]


@dataclass(frozen=True)
class StoredPart:
    """``box`` of a parameter is what a checkpoint stores as ``key``."""

    key: str
    box: Box
    stacked: bool
    """The stored tensor lacks the parameter's first dimension, of which the box is one index."""

    def of(self, parameter: Tensor) -> Tensor:
        """The view of a whole parameter that is stored."""
        return self.as_stored(parameter[self.box])

    def as_stored(self, values: Tensor) -> Tensor:
        """Values of a part of the box, in the dimensions of the stored tensor."""
        return values[0] if self.stacked else values

    def within(self, common: Box) -> Box:
        """Where ``common``, a part of the box, lies in the stored tensor."""
        moved = tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(common, self.box, strict=True))
        return moved[1:] if self.stacked else moved


@dataclass(frozen=True)
class Conversion:
    """Parameters that transformers computes of stored tensors."""

    converter: WeightConverter
    name: str
    sources: tuple[tuple[str, str], ...]
    """(pattern of the converter, key in the checkpoint), in the order in which it takes them."""

    def run(self, model: Any, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Parameter name -> its whole values."""
        converter = deepcopy(self.converter)
        for pattern, key in self.sources:
            converter.add_tensor(self.name, key, pattern, read(key))
        made = converter.convert(self.name, model=model, config=model.config)
        return {name: values[0] if isinstance(values, list) else values for name, values in made.items()}


def conversion(converter: WeightConverter, name: str, sources: Sequence[tuple[str, str]]) -> Conversion:
    """``sources`` in any order."""
    return Conversion(converter, name, tuple(sorted(sources, key=lambda source: dot_natural_key(source[1]))))


def parts_of(made: Conversion, shapes: Mapping[str, Sequence[int]]) -> list[StoredPart] | None:
    """The parts of the one parameter that is made; None if it is not put together of whole tensors.

    ``shapes``: of the stored tensors, by key.
    """
    operations, patterns = made.converter.operations, made.converter.source_patterns
    kinds = [type(operation) for operation in operations]
    stacked = kinds[:1] == [MergeModulelist]
    joined = kinds[-1] is Concatenate
    if len(made.converter.target_patterns) > 1 or kinds not in (
        [MergeModulelist],
        [MergeModulelist, Concatenate],
        [Concatenate],
    ):
        return None
    if stacked and (operations[0].dim != 0 or (not joined and len({pattern for pattern, _ in made.sources}) > 1)):
        return None
    parts, start = [], 0
    for pattern in patterns:
        keys = [key for of, key in made.sources if of == pattern]
        for i, key in enumerate(keys):
            box = [slice(0, size) for size in shapes[key]]
            if stacked:
                box.insert(0, slice(i, i + 1))
            if joined:
                along = operations[-1].dim % len(box)
                size = box[along].stop
                box[along] = slice(start, start + size)
                if not stacked or i == len(keys) - 1:
                    start += size
            parts.append(StoredPart(key, tuple(box), stacked))
    return parts


def covers(parts: Sequence[StoredPart], shape: Sequence[int]) -> bool:
    """Whether the parts are all of a parameter of this shape."""
    ends = [max(part.box[d].stop for part in parts) for d in range(len(shape))]
    sizes = (torch.Size(s.stop - s.start for s in part.box).numel() for part in parts)
    return ends == list(shape) and sum(sizes) == torch.Size(shape).numel()


def common_box(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    common = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return common if all(s.start < s.stop for s in common) else None


def relative(box: Box, outer: Box) -> Box:
    """The index of ``box`` in a tensor that holds ``outer``."""
    return tuple(slice(b.start - o.start, b.stop - o.start) for b, o in zip(box, outer, strict=True))
