"""Standby weights: a second set, in the form that vLLM's kernels use, prepared while the first one serves.

A standby copy of the live model's layers is loaded by the model's own loaders and prepared by vLLM's own layers: fused,
padded, and on a CPU prepacked. What then differs between the two, parameters and the kernels' own attributes, is a list
of places; an exchange swaps their contents, by reference where nothing holds addresses (an eager engine), else by
copying into the live tensors (compiled graphs and CUDA graphs go on reading where they read before).

``unsupported_reason`` decides which models can have standby weights; any other is loaded in place.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, Final

import torch
from torch import nn
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    _get_original_loader,
    _layerwise_process,
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

from serve.kv_cache import available_memory
from serve.policies.folder import safetensors_header
from serve.policies.mapped_safetensors import MappedFile
from serve.standby_room import SLACK

_NICENESS: Final = 10  # about a tenth of a processor beside one busy thread: behind requests, and yet in time
_YIELD_S: Final = 0.002  # between two tensors, so that the engine's thread gets the interpreter
RELEASE_TIMEOUT_S: Final = 60.0


class NotEnoughMemory(RuntimeError):
    """A second set of weights would not fit; the text has both numbers."""


@dataclass(frozen=True)
class Place:
    """One thing that an exchange swaps: ``key`` of two dicts."""

    live: dict[str, Any]
    standby: dict[str, Any]
    key: str


class StandbyWeights:
    """The second set, prepared by a thread of low priority; ``done`` and ``error`` are its state."""

    def __init__(
        self,
        model: nn.Module,
        vllm_config: Any,
        folder: Path,
        files: dict[str, dict[str, Any]],
        *,
        device: torch.device,
        spare_bytes: int,
        after: threading.Thread | None,
    ) -> None:
        """``files``: name of each safetensors file -> its ``sha256`` and ``fingerprint``.

        ``device``: the worker's; ``spare_bytes``: memory that must be left when the set is there; ``after``: what gives
        memory back, to wait for.
        """
        self.holds = hashes(files)
        """sha256 by file of the weights that the second set holds."""
        self.error: BaseException | None = None
        self._model, self._vllm_config, self._device = model, vllm_config, device
        self._spare_bytes, self._after = spare_bytes, after
        # What sleeps gives back the memory that it has started with: weights that came later have to be there, too.
        self._by_reference = keeps_no_addresses(vllm_config) and not vllm_config.model_config.enable_sleep_mode
        self._folder, self._files = folder, files
        self._places: list[Place] = []
        self._layers: list[nn.Module] = []
        self._thread = threading.Thread(target=self._run, name="millrace-standby", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the thread has come to its end, well or not."""
        return not self._thread.is_alive()

    def exchange(self, serving: dict[str, str]) -> bool:
        """Make the second set the one that serves; between two steps. Whether the old set is kept, as the second one.

        ``serving``: sha256 by file of the set that serves. After a failure the live model is a mixture.
        """
        if not self._by_reference:
            with torch.no_grad():
                for place in self._places:
                    place.live[place.key].data.copy_(place.standby[place.key].data, non_blocking=True)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            return False
        for place in self._places:
            place.live[place.key], place.standby[place.key] = place.standby[place.key], place.live[place.key]
        self.holds = serving
        return True

    def release(self) -> threading.Thread:
        """Give the second set's memory back, in a thread: the kernel takes a while to take back a large one."""
        thread = threading.Thread(target=self._release, name="millrace-release", daemon=True)
        thread.start()
        return thread

    # Inside

    def _run(self) -> None:
        threads = torch.get_num_threads()
        try:
            _low_priority()
            if self._after is not None:
                self._after.join(RELEASE_TIMEOUT_S)
            torch._C.set_num_threads(1)  # of this thread; vLLM has put torch.set_num_threads out of use
            with on_a_stream_of_its_own(self._device):
                self._require_memory()
                self._prepare()
        except BaseException as error:  # noqa: BLE001 - a thread's failure is part of its state
            self.error = error
            self._release()
        finally:
            torch._C.set_num_threads(threads)

    def _require_memory(self) -> None:
        needed = bytes_needed(self._model, self._vllm_config, [self._folder / name for name in self._files])
        available = bytes_available(self._device)
        if needed + self._spare_bytes > available:
            raise NotEnoughMemory(
                f"a second set of weights takes {_mib(needed)}, {_mib(available)} are available, and "
                f"serve.swap.spare_bytes keeps {_mib(self._spare_bytes)} of them free; free some memory, or set "
                "serve.swap.in_place, which needs no second set"
            )

    @torch.no_grad()
    def _prepare(self) -> None:
        files = [MappedFile(self._folder / name, self._files[name]["fingerprint"]) for name in sorted(self._files)]
        standby = standby_layers(self._model)
        self._layers = list(standby.values())
        for copy in standby.values():
            initialize_online_processing(copy)
        standby[self._model].load_weights(_yielding(files))
        loaded = self._finish(standby)
        self._places = [place for layer, copy in standby.items() if copy in loaded for place in _places(layer, copy)]
        for file in files:
            file.require_unchanged()

    def _finish(self, standby: dict[nn.Module, nn.Module]) -> set[nn.Module]:
        """Prepare what the loaders left open; returns the copies that hold weights of the new policy."""
        names = {layer: name for name, layer in self._model.named_modules()}
        loaded, rest = set(), []
        for layer, copy in standby.items():
            info = get_layerwise_info(copy)
            if not info.can_load():  # all its weights came, so it was prepared at once
                loaded.add(copy)
            elif info.load_numel > 0:  # all but its padding
                _layerwise_process(copy, info)
                loaded.add(copy)
            else:
                rest.append((layer, copy))
            time.sleep(_YIELD_S)
        # A tied head is not named by a checkpoint: its weight is the embedding's, and it has its own prepacked copy.
        new = {
            id(layer._parameters[key]): copy._parameters[key]
            for layer, copy in standby.items()
            if copy in loaded
            for key in layer._parameters
        }
        for layer, copy in rest:
            parameters = {key: value for key, value in layer._parameters.items() if value is not None}
            if not any(value.numel() for value in parameters.values()):
                continue
            for key, value in parameters.items():
                if id(value) not in new:
                    raise RuntimeError(f"{names[layer]}.{key} got no new weights: it would keep the old policy's")
                copy._parameters[key] = new[id(value)]
            if method := getattr(copy, "quant_method", None):
                method.process_weights_after_loading(copy)
            loaded.add(copy)
        return loaded

    def _release(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()  # it may still be at work when the API has given up waiting
        _low_priority()
        places, self._places = self._places, []
        layers, self._layers = self._layers, []
        self.holds = {}
        with torch.no_grad():
            for place in places:
                value = place.standby.pop(place.key, None)
                if isinstance(value, torch.Tensor) and value is not place.live.get(place.key):
                    torch.Tensor.set_(value)  # frees the memory without the interpreter's lock, as `del` doesn't
                    value.__dict__.clear()
                del value
                time.sleep(_YIELD_S / 10)
        forget(layers)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.empty_cache()  # torch would keep it, and the device's free memory not have it


@contextmanager
def on_a_stream_of_its_own(device: torch.device) -> Iterator[None]:
    """Within, a thread works on a GPU and has the engine's steps not wait for it; behind it all is done. Else nothing.

    A new thread is on the first GPU, whichever its process has, and on the stream of the steps.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
        torch.cuda.current_stream().synchronize()


def unsupported_reason(model: nn.Module, vllm_config: Any) -> str | None:
    """Why this model can't have standby weights; None if it can."""
    if vllm_config.speculative_config is not None:
        return "it is served with a draft model"
    if (lora := vllm_config.lora_config) is not None and lora.target_modules is None:  # of serve.engine.extra
        return "it is served with LoRA adapters of any layers, which may be around its embedding"
    if model.__class__.__dict__.get("process_weights_after_loading"):
        return f"{type(model).__name__} derives weights of its own after loading"
    if vllm_config.device_config.device.type == "cpu" and not keeps_no_addresses(vllm_config):
        return "it is compiled, and a CPU's prepacked weights are part of the graph"
    for name, layer in model.named_modules():
        if is_deferred_attention_layer(layer) and not isinstance(layer, Attention):
            return f"{name} ({type(layer).__name__}) derives weights of its own after loading"
        if not any(parameter.numel() for parameter in layer.parameters(recurse=False)) and not hasattr(
            layer, "cpu_linear"
        ):
            continue
        method = getattr(layer, "quant_method", None)
        if method is not None and not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
            return f"{name} is prepared by {type(method).__name__}"
        if any(True for _ in layer.buffers(recurse=False)):
            return f"{name} has buffers beside its weights"
    return None


def keeps_no_addresses(vllm_config: Any) -> bool:
    """Whether every step looks its weights up anew."""
    compilation = vllm_config.compilation_config
    return compilation.mode in (None, CompilationMode.NONE) and compilation.cudagraph_mode in (
        None,
        CUDAGraphMode.NONE,
    )


def bytes_needed(model: nn.Module, vllm_config: Any, files: list[Path]) -> int:
    """Memory that a second set takes in this process, at most."""
    itemsize = vllm_config.model_config.dtype.itemsize
    stored = sum(math.prod(entry["shape"]) * itemsize for path in files for entry in safetensors_header(path).values())
    prepacked = sum(
        layer.weight.numel() * itemsize
        for layer in model.modules()
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear")
    )
    return int(SLACK * (stored / vllm_config.parallel_config.tensor_parallel_size + prepacked))


def bytes_available(device: torch.device) -> int:
    """Memory that this process can still get: the GPU's, or the machine's within the bounds of its control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def forget(layers: Iterable[nn.Module]) -> None:
    """Let go of standby copies, and of what they share with the live layers they were made of, such as a kernel's
    handle of prepacked weights: what vLLM notes of a layer refers to that layer, and so would keep it for ever."""
    for layer in layers:
        LAYERWISE_INFO.pop(layer, None)
        layer.__dict__.clear()  # a parameter's loader is a method of its layer: a cycle


def standby_layers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """layer -> its standby copy, for all layers: the same settings, weights of its own, in a checkpoint's layout.

    ``forget`` the copies when they are of no more use.
    """
    standby: dict[nn.Module, nn.Module] = {}

    def make(layer: nn.Module) -> nn.Module:
        if layer not in standby:
            copy = standby[layer] = object.__new__(type(layer))
            copy.__dict__.update(layer.__dict__)
            copy.__dict__["_non_persistent_buffers_set"] = set(layer._non_persistent_buffers_set)
            for kind in ("_parameters", "_buffers"):
                copy.__dict__[kind] = dict(layer.__dict__[kind])
            copy.__dict__["_modules"] = {
                name: child if child is None else make(child) for name, child in layer._modules.items()
            }
        return standby[layer]

    make(model)
    for layer, copy in standby.items():
        source, info = get_layerwise_info(layer), get_layerwise_info(copy)
        info.restore_device = source.restore_device
        info.restore_metadata = (
            {name: _belonging_to(copy, to_meta_tensor(tensor)) for name, tensor in source.restore_metadata[0].items()},
            {name: _belonging_to(copy, to_meta_tensor(tensor)) for name, tensor in source.restore_metadata[1].items()},
        )
        restore_layer_on_meta(copy, info)
        for name, parameter in copy._parameters.items():
            if parameter is not None and parameter is layer._parameters.get(name):  # vLLM leaves biases where they are
                own = torch.empty_like(parameter)
                own.__class__ = parameter.__class__
                own.__dict__ = dict(parameter.__dict__)
                copy._parameters[name] = _belonging_to(copy, own)
    return standby


def _belonging_to(layer: nn.Module, tensor: torch.Tensor) -> Any:
    """The tensor, its loader a method of that layer whatever layer and wrapper it had before."""
    if hasattr(tensor, "weight_loader"):
        tensor.weight_loader = _get_original_loader(tensor)
    for key, value in tensor.__dict__.items():
        if isinstance(value, MethodType) and (
            value.__self__ is layer_ref_sentinel or isinstance(value.__self__, type(layer))
        ):
            tensor.__dict__[key] = value.__func__.__get__(layer)
    return tensor


def _places(layer: nn.Module, copy: nn.Module) -> Iterator[Place]:
    """Where a prepared standby layer differs from the live one."""
    if missing := layer._parameters.keys() ^ copy._parameters.keys():
        raise RuntimeError(f"{type(layer).__name__} has other parameters after loading: {sorted(missing)}")
    for key, parameter in layer._parameters.items():
        if parameter is not None and copy._parameters[key] is not parameter:
            _belonging_to(layer, copy._parameters[key])
            yield Place(layer._parameters, copy._parameters, key)
    for key in layer.__dict__.keys() | copy.__dict__.keys():
        if key.startswith(("_parameters", "_buffers", "_modules", "_non_persistent")):
            continue
        if key not in layer.__dict__ or key not in copy.__dict__:
            raise RuntimeError(f"{type(layer).__name__} has other attributes after loading: {key}")
        if layer.__dict__[key] is not copy.__dict__[key]:
            yield Place(layer.__dict__, copy.__dict__, key)


def _yielding(files: list[MappedFile]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        for item in file.tensors():
            yield item
            time.sleep(_YIELD_S)


def _low_priority() -> None:
    # Linux has a priority for each thread. What this thread does for long, it does without the interpreter's lock.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def hashes(files: dict[str, dict[str, Any]]) -> dict[str, str]:
    """sha256 by file."""
    return {name: file["sha256"] for name, file in files.items()}
