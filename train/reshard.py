"""From FSDP shards to vLLM's weights, in the processes that hold both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def hand_over(model: nn.Module, llm: Any) -> None:
    """Load the trained weights into the engine of this process; every rank must call it.

    Each tensor is gathered whole, one at a time, and vLLM's own loaders take the slice that the rank holds. Loading
    runs inside vLLM's layerwise reload, which knows about fused, sharded and prepacked weights; a bare
    ``load_weights`` on a live engine does not.
    """

    def load(worker: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        from serve.weights import finish_reload

        target, config = worker.get_model(), worker.vllm_config
        with torch.no_grad(), set_current_vllm_config(config):
            initialize_layerwise_reload(target)
            target.load_weights(whole_tensors(model, config.model_config.dtype))
            finish_reload(target, config.model_config)

    llm.collective_rpc(load)


def whole_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter, each tied one once."""
    for name, parameter in model.named_parameters():
        shard = parameter.detach()
        whole = shard.full_tensor() if hasattr(shard, "full_tensor") else shard
        yield name, whole.to(dtype)
