"""The optimizer of the settings over a sharded model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from train.import_object import import_object
from train.model.hf_io import plain_name
from train.optimizers.muon import MOMENTUM, Muon

if TYPE_CHECKING:
    from train.config.sections import OptimizerConfig

Groups = list[dict[str, Any]]


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, learning_rate: float, *, all_patterns_fit: bool
) -> torch.optim.Optimizer:
    """The optimizer of the parameters that are trained.

    Args:
        learning_rate: the peak, of a group without a factor.
        all_patterns_fit: refuse patterns of ``config.groups`` that fit none of them.

    Raises:
        ValueError: such a pattern; or ``config.name`` can't be had, or not for this model.
    """
    found = parameter_groups(model, config, learning_rate, all_patterns_fit=all_patterns_fit)
    groups = [group for of_kind in found for group in of_kind]
    if config.name == "adamw":
        return torch.optim.AdamW(
            groups, lr=learning_rate, betas=config.betas, fused=True
        )  # a fifth of the time on a CPU
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate, momentum=config.momentum or 0.0)
    if config.name == "adamw_8bit":
        return _adamw_8bit(groups, config, learning_rate)
    if config.name == "muon":
        matrices, others = found
        if not matrices:
            raise ValueError(
                f"train.optimizer.name=muon: {type(model).__name__} trains no linear layers inside its body, and Muon "
                "is for their matrices alone; use adamw"
            )
        momentum = MOMENTUM if config.momentum is None else config.momentum
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Muon(matrices, others, lr=learning_rate, momentum=momentum, betas=config.betas, device=device)
    return _own(groups, config, learning_rate)


def parameter_groups(
    model: nn.Module, config: OptimizerConfig, learning_rate: float, *, all_patterns_fit: bool
) -> tuple[Groups, Groups]:
    """(those of matrices, where the optimizer is Muon; all others). Raises as ``make_optimizer``."""
    keys: dict[str, list[str]] = getattr(model, "checkpoint_keys", {})
    matrices = {id(p) for p in body_matrices(model)} if config.name == "muon" else set()
    unused = {group.pattern for group in config.groups}
    found: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        plain = plain_name(name)
        stored = (keys.get(plain) or [plain])[0]
        fitting = next((group for group in config.groups if re.search(group.pattern, stored)), None)
        decay = config.weight_decay if parameter.ndim > 1 or config.decay_vectors else 0.0
        factor = 1.0
        if fitting is not None:
            unused.discard(fitting.pattern)
            factor = fitting.learning_rate_factor
            decay = decay if fitting.weight_decay is None else fitting.weight_decay
        rate = learning_rate * factor
        group = found[id(parameter) not in matrices].setdefault(
            (rate, decay), {"params": [], "lr": rate, "initial_lr": rate, "weight_decay": decay}
        )
        group["params"].append(parameter)
    if unused and all_patterns_fit:
        raise ValueError(
            f"train.optimizer.groups: no parameter in training fits {', '.join(sorted(unused))} before another; they "
            f"are called {', '.join(sorted(_kinds(model)))}"
        )
    return list(found[0].values()), list(found[1].values())


def body_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Weights of the linear layers inside a model's body: no embedding, no output, no experts stored in one tensor."""
    body = getattr(model, "base_model", model)
    return [module.weight for module in body.modules() if isinstance(module, nn.Linear) and module.weight.requires_grad]


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Have the state of every parameter on ``device``; numbers stay where they are."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[key] = value.to(device)


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The state of every parameter, but for numbers."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim)


def _adamw_8bit(groups: Groups, config: OptimizerConfig, learning_rate: float) -> torch.optim.Optimizer:
    """8-bit Adam (arXiv 2110.02861): torchao's."""
    from torchao.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=learning_rate, betas=config.betas)
    return optimizer


def _own(groups: Groups, config: OptimizerConfig, learning_rate: float) -> torch.optim.Optimizer:
    make = import_object("train.optimizer.name", config.name, "class or function")
    try:
        optimizer = make(groups, lr=learning_rate, **config.options)
    except TypeError as error:
        raise ValueError(
            f"train.optimizer.name={config.name!r} is called with groups of parameters, lr and "
            f"train.optimizer.options={config.options}: {error}"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"train.optimizer.name={config.name!r} made {type(optimizer).__name__}, which is no torch.optim.Optimizer"
        )
    if "weight_decay" not in optimizer.defaults and any(group["weight_decay"] for group in groups):
        raise ValueError(
            f"train.optimizer.name={config.name!r} has no weight_decay, and train.optimizer sets one; take it out"
        )
    return optimizer


def _kinds(model: nn.Module) -> set[str]:
    """Names of parameters in training, once for all layers."""
    every: Sequence[str] = [plain_name(name) for name, p in model.named_parameters() if p.requires_grad]
    return {re.sub(r"\.\d+\.", ".0.", name) for name in every}
