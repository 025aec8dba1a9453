"""New weights into a live vLLM engine: the weight-transfer backend ``millrace_mapped``.

This module runs inside vLLM's worker process, which imports it because ``worker_extension_cls`` names
``MillraceWorker``. A load has two parts. ``millrace_prefetch`` maps a policy's safetensors and checks their sha256 in
a thread, while the engine serves. The weight update itself (vLLM's start, update, finish) then only copies from the
mapping, between two engine steps, through vLLM's layerwise reload, which knows about fused, sharded, padded and
prepacked weights.

Format of the files: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from serve.model_folder import safetensors_header

BACKEND: Final = "millrace_mapped"

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The dtypes of weights that can be swapped: the loader casts between floating types and nothing else."""

_PR_SET_PDEATHSIG: Final = 1

# vLLM warns of every layer that a checkpoint doesn't name, tied heads and rotary tables too. finish_reload below knows
# which of them are right, and fails on the others.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class MappedFile:
    """One safetensors file in memory, copy-on-write: nothing that is done to its tensors reaches the disk."""

    def __init__(self, path: Path) -> None:
        self.header = safetensors_header(path)
        with path.open("rb") as file:
            self._start = 8 + int.from_bytes(file.read(8), "little")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._map.madvise(mmap.MADV_WILLNEED)

    def sha256(self) -> str:
        """Hash of the very bytes that the tensors are made of; reading them also brings them into memory."""
        return hashlib.sha256(self._map).hexdigest()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in file order, views of the mapping."""
        for name, entry in sorted(self.header.items(), key=lambda item: item[1]["data_offsets"][0]):
            shape = entry["shape"]
            count = 1
            for size in shape:
                count *= size
            dtype = DTYPES[entry["dtype"]]
            if count == 0:
                yield name, torch.empty(shape, dtype=dtype)
                continue
            offset = self._start + entry["data_offsets"][0]
            yield name, torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)


class Prefetch:
    """A policy's weights on their way from disk into memory, in a thread of their own."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        """``files``: name of each safetensors file -> the sha256 that it must have."""
        self.folder = folder
        self.files: list[MappedFile] = []
        self.hashes: dict[str, str] = {}
        self.error: str | None = None
        self._expected = files
        self._thread = threading.Thread(target=self._run, name="millrace-prefetch", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            for name, expected in sorted(self._expected.items()):
                file = MappedFile(self.folder / name)
                self.hashes[name] = file.sha256()
                if self.hashes[name] != expected:
                    raise ValueError(f"{name} has sha256 {self.hashes[name][:12]}…, the manifest says {expected[:12]}…")
                self.files.append(file)
        except Exception as error:  # noqa: BLE001 - a thread's failure is handed to whoever asks for its state
            self.error = f"{type(error).__name__}: {error}"


@dataclass
class MappedInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class MappedUpdateInfo(WeightTransferUpdateInfo):
    """Which prefetched policy to load."""

    folder: str


class MappedWeights(WeightTransferEngine[MappedInitInfo, MappedUpdateInfo]):
    """Loads prefetched safetensors into the live model."""

    init_info_cls = MappedInitInfo
    update_info_cls = MappedUpdateInfo

    prefetch: Prefetch | None = None
    loaded: dict[str, str] | None = None
    _open = False

    def init_transfer_engine(self, init_info: MappedInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Lay the model out as a checkpoint has it, ready to be loaded."""
        self._open = True
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one policy. The base class also waits for an accelerator; the copies here are done when they return."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: MappedUpdateInfo) -> None:
        """Hand every mapped tensor to the model's own loader."""
        prefetch = self.prefetch
        if prefetch is None or not prefetch.done or str(prefetch.folder) != update_info.folder:
            raise RuntimeError(f"{update_info.folder} has not been prefetched")
        if prefetch.error:
            raise RuntimeError(prefetch.error)
        self.loaded = None
        self.model.load_weights(item for file in prefetch.files for item in file.tensors())
        self.loaded = dict(prefetch.hashes)

    def finish_weight_update(self) -> None:
        """Bring the weights into the form the kernels use. Raises RuntimeError if a layer got no new weights."""
        finish_reload(self.model, self.model_config)
        self._open = False
        self.prefetch = None  # unmap

    def shutdown(self) -> None:
        """Drop what was prefetched."""
        self.prefetch = None

    def abandon(self) -> None:
        """Undo what a failed update left: forget what it buffered, put the kernels' own tensors back.

        Their values are those of the old policy in some layers and of the new one in others.
        """
        if not self._open:
            return
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)
        self._open = False


class MillraceWorker:
    """What Millrace adds to vLLM's worker; called through ``collective_rpc``."""

    weight_transfer_engine: MappedWeights
    vllm_config: Any

    def millrace_adopt(self, parent: int) -> int:
        """Tie this process to the API process: die with it, leave Ctrl-C to it. Returns this process's id."""
        if os.getppid() == parent:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        return os.getpid()

    def millrace_prefetch(self, folder: str, files: dict[str, str]) -> None:
        """Begin to map and hash a policy's weights. Replaces an earlier prefetch."""
        self.weight_transfer_engine.prefetch = Prefetch(Path(folder), files)

    def millrace_prefetched(self) -> dict[str, Any]:
        """{"done": bool, "error": text or None} of the prefetch under way."""
        prefetch = self.weight_transfer_engine.prefetch
        return {"done": prefetch is not None and prefetch.done, "error": prefetch.error if prefetch else None}

    def millrace_abandon(self) -> None:
        """End a weight update that failed, wherever it did, so that another one can start."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.abandon()
        self.weight_transfer_engine.reset_weight_update_target()
        self._weight_update_active = False  # vLLM's worker itself ends an update only where update_weights failed

    def millrace_loaded(self) -> dict[str, str]:
        """sha256, by file, of the bytes that the last whole weight update was made of."""
        return self.weight_transfer_engine.loaded or {}


def finish_reload(model: torch.nn.Module, model_config: Any) -> None:
    """End a layerwise reload: bring the weights into the form that the kernels use. Raises RuntimeError if a layer got
    no new weights.

    vLLM's reload handles each layer that the checkpoint names. A tied output head is not named: its weight, being the
    embedding's, is new by now, but on a CPU it computes with a prepacked copy made from the old one. So layers that
    share the weights of another one are prepared again.
    """
    unloaded = {name: layer for name, layer in model.named_modules() if _got_nothing(layer)}
    finalize_layerwise_reload(model, model_config)
    owners = {
        parameter.data_ptr()
        for name, layer in model.named_modules()
        if name not in unloaded
        for parameter in layer.parameters(recurse=False)
    }
    for name, layer in unloaded.items():
        for parameter_name, parameter in layer.named_parameters(recurse=False):
            if parameter.numel() and parameter.data_ptr() not in owners:
                raise RuntimeError(f"{name}.{parameter_name} got no new weights: it still holds the old policy's")
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)


def _got_nothing(layer: torch.nn.Module) -> bool:
    """Whether a layer with parameters of its own waits for weights and has been given none in this update."""
    info = get_layerwise_info(layer)
    return info.can_load() and info.load_numel <= 0 and any(True for _ in layer.parameters(recurse=False))


def _register() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, MappedWeights)


_register()
