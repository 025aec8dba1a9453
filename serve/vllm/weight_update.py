"""New weights into a live vLLM engine.

This module runs inside vLLM's worker process, which imports it because ``worker_extension_cls`` names
``MillraceWorker``. There are two ways. Where the model allows it, a second set of weights is laid out in the kernels'
form while the first one serves, and ``millrace_commit`` exchanges the two between two engine steps
(serve/vllm/standby_weights.py). Else the weights are loaded in place, the engine held, by the weight-transfer backend
``millrace_mapped`` through vLLM's layerwise reload, which knows about every kind of fused, sharded, quantized and
prepacked weight.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
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

from serve.policies.mapped_safetensors import MappedFile
from serve.vllm import sampler
from serve.vllm.standby_weights import Shadow, hashes, obstacle

log = logging.getLogger(__name__)

BACKEND: Final = "millrace_mapped"

_PR_SET_PDEATHSIG: Final = 1

# vLLM warns of every layer that a checkpoint doesn't name, tied heads and rotary tables too. finish_reload below knows
# which of them are right, and fails on the others.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class MappedInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class MappedUpdateInfo(WeightTransferUpdateInfo):
    """Which policy to load. ``files``: name of each safetensors file -> its ``sha256`` and ``fingerprint``."""

    folder: str
    files: dict[str, dict[str, Any]]


class MappedWeights(WeightTransferEngine[MappedInitInfo, MappedUpdateInfo]):
    """Loads safetensors into the live model, in place."""

    init_info_cls = MappedInitInfo
    update_info_cls = MappedUpdateInfo

    loaded: dict[str, str] | None = None
    """sha256 by file of the weights that serve, if a swap brought them."""
    shadow: Shadow | None = None
    """The second set of weights."""
    releasing: threading.Thread | None = None
    """What gives the memory of an earlier second set back."""
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
        """Hand every tensor to the model's own loader. Raises ChangedOnDisk."""
        self.loaded = None
        names = sorted(update_info.files)
        files = [MappedFile(Path(update_info.folder) / name, update_info.files[name]["fingerprint"]) for name in names]
        self.model.load_weights(item for file in files for item in file.tensors())
        for file in files:
            file.require_unchanged()
        self.loaded = hashes(update_info.files)

    def finish_weight_update(self) -> None:
        """Bring the weights into the form the kernels use. Raises RuntimeError if a layer got no new weights."""
        finish_reload(self.model, self.model_config)
        self._open = False

    def shutdown(self) -> None:
        """Nothing to release: the process ends."""

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
    model_runner: Any

    def millrace_sampler(self) -> None:
        """Answer each request with its own logprobs, whatever others of the same step ask for."""
        sampler.install(self.model_runner)

    def millrace_adopt(self, parent: int) -> int:
        """Tie this process to the API process: die with it, leave Ctrl-C to it. Returns this process's id."""
        if os.getppid() == parent:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        return os.getpid()

    def millrace_obstacle(self) -> str | None:
        """Why weights can't be laid out beforehand; None if they can."""
        return obstacle(self.weight_transfer_engine.model, self.vllm_config)

    def millrace_lay_out(self, folder: str, files: dict[str, dict[str, Any]], spare_bytes: int) -> None:
        """Begin to lay out a second set of weights, unless the one there holds them already.

        ``files``: name of each safetensors file -> its ``sha256`` and ``fingerprint``. ``spare_bytes``: memory that
        must be left when it is done.
        """
        engine = self.weight_transfer_engine
        if engine.shadow is not None and engine.shadow.done and engine.shadow.holds == hashes(files):
            return
        self.millrace_release()
        engine.shadow = Shadow(
            engine.model, self.vllm_config, Path(folder), files, spare_bytes=spare_bytes, after=engine.releasing
        )

    def millrace_laid_out(self) -> dict[str, Any]:
        """{"done": bool, "error": text or None} of the second set."""
        shadow = self.weight_transfer_engine.shadow
        if shadow is None:
            return {"done": True, "error": "no weights are laid out"}
        error = f"{type(shadow.error).__name__}: {shadow.error}" if shadow.error else None
        return {"done": shadow.done, "error": error}

    def millrace_commit(self, wanted: dict[str, str]) -> dict[str, Any]:
        """Exchange the two sets; the second one must hold the weights ``wanted``, sha256 by file.

        {"ms": how long it took, "kept": whether the old set is there to go back to}. The label of what follows and the
        order to go on are on their way already, so a failure ends this process: better no token than a wrong label.
        """
        began = time.perf_counter()
        engine = self.weight_transfer_engine
        shadow = engine.shadow
        try:
            if shadow is None or not shadow.done or shadow.error or shadow.holds != wanted:
                raise RuntimeError("the second set of weights is not the one that was laid out")
            kept = shadow.exchange(engine.loaded or {})
        except BaseException:
            log.critical("the exchange of the weights failed: the engine ends", exc_info=True)
            logging.shutdown()
            os._exit(1)
        engine.loaded = dict(wanted)
        return {"ms": (time.perf_counter() - began) * 1e3, "kept": kept}

    def millrace_release(self) -> None:
        """Forget the second set, if there is one."""
        engine = self.weight_transfer_engine
        shadow, engine.shadow = engine.shadow, None
        if shadow is not None:
            engine.releasing = shadow.release()

    def millrace_abandon(self) -> None:
        """End a weight update that failed, wherever it did, so that another one can start."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.abandon()
        self.weight_transfer_engine.reset_weight_update_target()
        self._weight_update_active = False  # vLLM's worker itself ends an update only where update_weights failed

    def millrace_loaded(self) -> dict[str, str]:
        """sha256, by file, of the weights that serve; empty before the first swap."""
        return self.weight_transfer_engine.loaded or {}

    def millrace_serves(self, files: dict[str, str]) -> None:
        """Tell which weights the engine was started on."""
        self.weight_transfer_engine.loaded = dict(files)


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
