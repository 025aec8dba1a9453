"""New weights into a live vLLM engine.

This module runs inside vLLM's worker process, which imports it because ``worker_extension_cls`` names
``MillraceWorker``. There are two ways. Where the model allows it, standby weights are prepared while the first set
serves, and ``millrace_commit`` exchanges the two between two engine steps (``serve.vllm.standby_weights``). Else the
weights are loaded in place, the engine held, by the weight-transfer backend ``millrace_mapped`` through vLLM's
layerwise reload, which knows about every kind of fused, sharded, quantized and prepacked weight.
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
from serve.vllm import per_request_logprobs
from serve.vllm.standby_weights import StandbyWeights, hashes, unsupported_reason

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
    standby: StandbyWeights | None = None
    releasing: threading.Thread | None = None
    """The thread that frees earlier standby weights."""
    _open = False

    def init_transfer_engine(self, init_info: MappedInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Give the model the layout of a checkpoint, ready to be loaded."""
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
        per_request_logprobs.install(self.model_runner)

    def millrace_adopt(self, parent: int) -> int:
        """Tie this process to the API process: die with it, leave Ctrl-C to it. Returns this process's id."""
        if os.getppid() == parent:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        return os.getpid()

    def millrace_unsupported_reason(self) -> str | None:
        """Why the model can't have standby weights; None if it can."""
        return unsupported_reason(self.weight_transfer_engine.model, self.vllm_config)

    def millrace_prepare_standby(self, folder: str, files: dict[str, dict[str, Any]], spare_bytes: int) -> None:
        """Begin to prepare standby weights, unless those that are there hold them already. As ``StandbyWeights``."""
        engine = self.weight_transfer_engine
        if engine.standby is not None and engine.standby.done and engine.standby.holds == hashes(files):
            return
        self.millrace_release()
        engine.standby = StandbyWeights(
            engine.model, self.vllm_config, Path(folder), files, spare_bytes=spare_bytes, after=engine.releasing
        )

    def millrace_standby_state(self) -> dict[str, Any]:
        """{"done": bool, "error": text or None} of the standby weights."""
        standby = self.weight_transfer_engine.standby
        if standby is None:
            return {"done": True, "error": "no standby weights are prepared"}
        error = f"{type(standby.error).__name__}: {standby.error}" if standby.error else None
        return {"done": standby.done, "error": error}

    def millrace_commit(self, wanted: dict[str, str]) -> dict[str, Any]:
        """Exchange the two sets; the standby weights must be ``wanted``, sha256 by file.

        {"ms": how long it took, "kept": whether the old set is there to go back to}. The label of what follows and the
        call to resume are on their way already, so a failure ends this process: better no token than a wrong label.
        """
        began = time.perf_counter()
        engine = self.weight_transfer_engine
        standby = engine.standby
        try:
            if standby is None or not standby.done or standby.error or standby.holds != wanted:
                raise RuntimeError("the standby weights are not the ones that were prepared")
            kept = standby.exchange(engine.loaded or {})
        except BaseException:
            log.critical("the exchange of the weights failed: the engine ends", exc_info=True)
            logging.shutdown()
            os._exit(1)
        engine.loaded = dict(wanted)
        return {"ms": (time.perf_counter() - began) * 1e3, "kept": kept}

    def millrace_release(self) -> None:
        """Free the standby weights, if there are any."""
        engine = self.weight_transfer_engine
        standby, engine.standby = engine.standby, None
        if standby is not None:
            engine.releasing = standby.release()

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
        """Record which weights the engine was started on."""
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
    """Whether a layer with parameters of its own waits for weights and got none in this update."""
    info = get_layerwise_info(layer)
    return info.can_load() and info.load_numel <= 0 and any(True for _ in layer.parameters(recurse=False))


WeightTransferEngineFactory.register_engine(BACKEND, MappedWeights)
