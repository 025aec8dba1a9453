"""Without a plan: every tensor is gathered whole on every rank, one at a time, and vLLM's loaders take their slice.

For models whose loaders compute, which a plan can't follow; and what ``make bench-reshard`` compares with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from train.model.hf_io import stored_tensors
from train.model.lora import plain_parameters


def gather(model: nn.Module, llm: Any) -> None:
    """Load the trained weights into the engine of this process; every rank must call it."""
    load_whole(llm, whole_tensors(model, llm.llm_engine.model_config.dtype))


def whole_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name in a checkpoint, whole tensor in generation's type); every rank must take all of them.

    Shards are cast before they are gathered, so that half of the bytes of float32 master weights move.
    """
    return stored_tensors(model, ((name, tensor.to(dtype)) for name, tensor in plain_parameters(model)))


def load_whole(llm: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load weights, whole and by the names of a checkpoint, into the engine of this process.

    Loading runs inside vLLM's layerwise reload, which knows about fused, sharded and prepacked weights; a bare
    ``load_weights`` on a live engine does not.
    """

    def load(worker: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        from serve.vllm.weight_update import experts_packed_again, finish_reload

        target, config = worker.get_model(), worker.vllm_config
        with torch.no_grad(), set_current_vllm_config(config), experts_packed_again(target):
            initialize_layerwise_reload(target)
            dtype = config.model_config.dtype
            target.load_weights((name, t.to(dtype)) for name, t in tensors)
            finish_reload(target, config.model_config)

    llm.collective_rpc(load)
