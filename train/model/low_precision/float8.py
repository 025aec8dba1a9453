"""Linear layers that multiply in fp8 (arXiv 2209.05433), by torchao: their weights, gradients and names stay.

Weights, activations and gradients are scaled and rounded to 8-bit floats as they are multiplied. What computes between
layers is in the compute dtype, and so is the output layer, whose log-probabilities are made tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from train.config.fp8 import fp8_unsupported

if TYPE_CHECKING:
    from train.config.fp8 import Fp8Config

_MULTIPLE: Final = 16
"""Of which a layer's sizes must be multiples, for the kernels of a GPU."""

_ROUTERS: Final = frozenset(("gate", "router"))
"""Last names of the linear layers that choose experts: a token's experts must not depend on rounding."""


def require_fp8(fp8: Fp8Config | None) -> None:
    """Raise ValueError if the device of this rank can't compute by these settings."""
    if why := fp8_unsupported(fp8, *_device()):
        raise ValueError(why)


def convert_layers(layers: list[nn.Module], fp8: Fp8Config) -> list[str]:
    """Have the linear layers inside of decoder layers multiply in fp8, in place.

    They must not be sharded yet, and have no adapters, which stay in the compute dtype.

    Returns:
        The names, inside of a decoder layer, of the layers that do, each once.

    Raises:
        ValueError: this rank's device can't compute in fp8, ``keep`` names a layer that there is not, or none is left.
    """
    require_fp8(fp8.model_copy(update={"rollout": None}))
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    there = {name.rsplit(".", 1)[-1] for layer in layers for name, _ in _linear(layer)}
    if unknown := sorted(set(fp8.keep) - there):
        raise ValueError(
            f"train.fp8.keep: no linear layer is called {', '.join(unknown)}; there are {', '.join(sorted(there))}"
        )
    _, capability = _device()
    emulate = fp8_unsupported(fp8.model_copy(update={"emulate": False}), "", capability) is not None
    assert fp8.training is not None
    # Tokens are summed over in the gradient of a weight, and their number is no multiple of 16.
    config = replace(Float8LinearConfig.from_recipe_name(fp8.training), emulate=emulate, pad_inner_dim=True)
    found: dict[str, None] = {}
    for layer in layers:
        names = {name for name, module in _linear(layer) if _suits(name, module, fp8)}
        convert_to_float8_training(layer, config=config, module_filter_fn=lambda _, name, names=names: name in names)
        found |= dict.fromkeys(names)
    if not found:
        raise ValueError(
            f"train.fp8.training={fp8.training}: no linear layer of {type(layers[0]).__name__} can be computed in fp8, "
            f"whose sizes must be multiples of {_MULTIPLE}; set it to null"
        )
    return sorted(found)


def _suits(name: str, module: nn.Linear, fp8: Fp8Config) -> bool:
    last = name.rsplit(".", 1)[-1]
    sizes = (module.in_features, module.out_features)
    return last not in _ROUTERS and last not in fp8.keep and not any(size % _MULTIPLE for size in sizes)


def _linear(layer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in layer.named_modules():
        if type(module) is nn.Linear:
            yield name, module


def _device() -> tuple[str, tuple[int, int] | None]:
    """This rank's device, and its compute capability if it is a GPU."""
    if not torch.cuda.is_available():
        return "a CPU", None
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})", (major, minor)
