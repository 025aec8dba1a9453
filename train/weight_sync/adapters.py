"""Without the weights under them: A and B of each adapter, whole, into the engine's own slot for an adapter.

The engine has the parent's weights, which a run with adapters does not change. A layer of it adds B · A x, as one of
training does, where merged weights have the sum rounded to generation's type: in bfloat16 that rounds away most of what
a small adapter adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from serve.vllm.adapters.slots import begin, put, put_zero
from train.model.hf_io import whole_tensor
from train.model.lora import adapter_parameters

NUMBER: Final = 1
"""Of the adapter in training, in an engine for rollouts."""


def whole_adapters(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name as peft's files have it, whole tensor in generation's type), B scaled; every rank must take all of them.

    Shards are scaled and cast before they are gathered.
    """
    for name, parameter, factor in adapter_parameters(model):
        yield name, whole_tensor((parameter * factor).to(dtype))


def sync_adapters(model: nn.Module, llm: Any) -> None:
    """Load the adapters in training into the engine of this process; every rank must call it."""
    with torch.no_grad():
        load_adapters(llm, whole_adapters(model, llm.llm_engine.model_config.dtype))


def load_adapters(llm: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Have the engine of this process generate with these adapters, of ``whole_adapters``, from its next step on.

    Raises:
        AdapterRefused: one is of a layer that has none there.
    """
    found = dict(tensors)
    rank = max(tensor.shape[0] for name, tensor in found.items() if ".lora_A." in name)
    config = {"r": rank, "lora_alpha": rank, "target_modules": []}
    llm.collective_rpc(partial(put, number=NUMBER, tensors=found, config=config))


def begin_adapters(llm: Any) -> None:
    """Have the engine of this process generate with adapters that add nothing, until others are loaded."""
    llm.collective_rpc(begin)
    llm.collective_rpc(partial(put_zero, number=NUMBER))
