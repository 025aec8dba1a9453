"""Writes slices into the weights of a live vLLM model, layer by layer, and has vLLM prepare what its kernels need.

A parameter that lies as checkpoints have it is written in place. The layout of one that vLLM has rearranged since (a
CPU's prepacked layers, quantized ones) is restored first, and prepared again by vLLM's own processing, as its layerwise
reload does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from serve.vllm.weight_update import experts_packed_again
from train.weight_sync.loader_tracing import LoaderTrace, Need
from train.weight_sync.slices import Box


class LiveWeights:
    """The weights of one rank of an engine that is between two batches."""

    def __init__(self, model: nn.Module, model_config: Any, trace: LoaderTrace) -> None:
        self._model, self._config = model, model_config
        self._fills = trace.fills
        self._layers = {name: model.get_submodule(name) for name in dict.fromkeys(n.layer for n in trace.needs)}
        self._rearranged = {name for name, layer in self._layers.items() if not _as_loaded(name, layer, trace)}
        self._open: set[str] = set()

    def write(self, need: Need, box: Box, values: Tensor) -> None:
        """Put ``values``, of the shape of ``box``, where they belong; other dtypes and devices are converted.

        They pass through the dtype that the engine loads checkpoints in: some of its parameters are wider (biases on a
        CPU with AMX are float32), and would tell a rank's own slice from one that came from another.
        """
        self.at(need, box).copy_(values.to(self._config.dtype))

    def at(self, need: Need, box: Box) -> Tensor:
        """Where ``box`` lies; its layer's layout is restored first if its kernels had rearranged it."""
        self._restore_layout(need.layer)
        return need.view(self._layers[need.layer].get_parameter(need.parameter), box)

    def finish(self, layer: str) -> None:
        """All weights of the layer are there: prepare it."""
        module = self._layers[layer]
        if layer in self._open:
            with experts_packed_again(module):
                _layerwise_process(module, get_layerwise_info(module))
            self._open.discard(layer)
        else:
            _prepare(module)

    def finish_all(self) -> None:
        """Prepare what is left: layers that share another one's weights (a tied head has a prepacked copy of its own
        on a CPU), and attention, which may derive weights from those of its projections."""
        written = {id(p) for layer in self._layers.values() for p in layer._parameters.values()}
        done = set(self._layers.values())
        for layer in self._model.modules():
            if layer not in done and any(id(p) in written for p in layer._parameters.values() if p is not None):
                _prepare(layer)
        for layer in self._model.modules():
            if is_deferred_attention_layer(layer):
                layer.process_weights_after_loading(self._config.dtype)

    def _restore_layout(self, name: str) -> None:
        if name not in self._rearranged or name in self._open:
            return
        layer = self._layers[name]
        info = get_layerwise_info(layer)
        info.kernel_tensors = get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        restore_layer_on_meta(layer, info)
        materialize_layer(layer, info)
        self._open.add(name)
        for fill in self._fills:
            if fill.layer == name:
                parameter = layer._parameters[fill.parameter]
                assert parameter is not None
                parameter.data.as_strided(fill.sizes, fill.strides, parameter.storage_offset() + fill.offset).fill_(
                    fill.value
                )


def _as_loaded(name: str, layer: nn.Module, trace: LoaderTrace) -> bool:
    """Whether the layer's parameters lie as checkpoints have them, so that new values can be written over the old."""
    method = getattr(layer, "quant_method", None)
    if method is not None and not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return False
    return all(
        (parameter := layer._parameters.get(key)) is not None
        and (tuple(parameter.shape), tuple(parameter.stride())) == form
        for (owner, key), form in trace.forms.items()
        if owner == name
    )


def _prepare(layer: nn.Module) -> None:
    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        method.process_weights_after_loading(layer)
