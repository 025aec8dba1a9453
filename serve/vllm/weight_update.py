"""New weights into a live vLLM engine.

This module runs inside vLLM's worker process, which imports it because ``worker_extension_cls`` names
``MillraceWorker``. There are two ways. Where the model allows it, standby weights are prepared while the first set
serves, and ``millrace_commit`` exchanges the two between two engine steps (``serve.vllm.standby_weights``). Else
``millrace_load`` loads the weights in place, the engine held, through vLLM's layerwise reload, which knows about every
kind of fused, sharded, quantized and prepacked weight.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from feedback.processes.exit import end_with_parent
from serve.policies.adapter_files import ADAPTER_CONFIG
from serve.policies.mapped_safetensors import MappedFile
from serve.vllm import per_request_logprobs
from serve.vllm.adapters import slots
from serve.vllm.standby_weights import RELEASE_TIMEOUT_S, StandbyWeights, bytes_available, hashes, unsupported_reason

log = logging.getLogger(__name__)


# vLLM's attention in 16 bits uses AMX where the processor has it, but doesn't ask the kernel for leave, without which
# its first instruction ends the process. oneDNN asks with its first product, which no layer of a small model makes.
torch.cpu._init_amx()

# vLLM warns of every layer that a checkpoint doesn't name, tied heads and rotary tables too. finish_reload below knows
# which of them are right, and fails on the others.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class LoadsWeights:
    """What every worker of ours adds to vLLM's: other weights for its model. Called through ``collective_rpc``.

    ``files``: name of each safetensors file of a policy -> its ``sha256`` and ``fingerprint``.
    """

    vllm_config: Any
    model_runner: Any
    device: torch.device

    _loaded: dict[str, str] | None = None  # sha256 by file of the weights that serve

    @torch.no_grad()
    def millrace_load(self, folder: str, files: dict[str, dict[str, Any]]) -> None:
        """Load a policy into the live weights, the engine held, by the model's own loader.

        Raises ChangedOnDisk, RuntimeError if a layer got no new weights. The kernels' own tensors are then back in
        their places; their values are those of the old policy in some layers and of the new one in others.
        """
        self._loaded = None
        model, config = self.model_runner.get_model(), self.vllm_config.model_config
        slots.forget_all(self)  # adapters are of the weights before
        with set_current_vllm_config(self.vllm_config), experts_packed_again(model):
            try:
                initialize_layerwise_reload(model)
                mapped = [MappedFile(Path(folder) / name, files[name]["fingerprint"]) for name in sorted(files)]
                model.load_weights(item for file in mapped for item in file.tensors())
                for file in mapped:
                    file.require_unchanged()
                finish_reload(model, config)
            except BaseException:
                for layer in model.modules():
                    info = get_layerwise_info(layer)
                    if info.can_load():  # forget what it buffered
                        info.loaded_weights.clear()
                        info.load_numel = 0
                finalize_layerwise_reload(model, config)
                raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self._loaded = hashes(files)


class MillraceWorker(LoadsWeights):
    """What a server adds to vLLM's worker; called through ``collective_rpc``, with ``files`` as of ``LoadsWeights``."""

    _standby: StandbyWeights | None = None
    _releasing: threading.Thread | None = None  # frees earlier standby weights

    def millrace_begin(self, parent: int, loaded: dict[str, str]) -> int:
        """Tie this process to the API process: die with it, leave Ctrl-C to it. Returns this process's id.

        Each request is answered with its own logprobs, whatever others of the same step ask for. ``loaded``: sha256 by
        file of the weights that the engine was started on.
        """
        if os.getppid() == parent:
            end_with_parent(parent)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        per_request_logprobs.install(self.model_runner)
        if self.vllm_config.lora_config is not None:
            slots.begin(self)
        self._loaded = loaded
        return os.getpid()

    def millrace_free_bytes(self) -> int:
        """Memory of its device, or of the machine, that nobody has; earlier standby weights are free by then."""
        if self._releasing is not None:
            self._releasing.join(RELEASE_TIMEOUT_S)
        return bytes_available(self.device)

    def millrace_unsupported_reason(self) -> str | None:
        """Why the model can't have standby weights; None if it can."""
        return unsupported_reason(self.model_runner.get_model(), self.vllm_config)

    def millrace_prepare_standby(self, folder: str, files: dict[str, dict[str, Any]], spare_bytes: int) -> None:
        """Begin to prepare standby weights, unless those that are there hold them already. As ``StandbyWeights``."""
        if self._standby is not None and self._standby.done and self._standby.holds == hashes(files):
            return
        self.millrace_release()
        model, after = self.model_runner.get_model(), self._releasing
        self._standby = StandbyWeights(
            model, self.vllm_config, Path(folder), files, device=self.device, spare_bytes=spare_bytes, after=after
        )

    def millrace_standby_state(self) -> dict[str, Any]:
        """{"done": bool, "error": text or None} of the standby weights."""
        standby = self._standby
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
        standby = self._standby
        try:
            if standby is None or not standby.done or standby.error or standby.holds != wanted:
                raise RuntimeError("the standby weights are not the ones that were prepared")
            kept = standby.exchange(self._loaded or {})
        except BaseException:
            log.critical("the exchange of the weights failed: the engine ends", exc_info=True)
            logging.shutdown()
            os._exit(1)
        self._loaded = dict(wanted)
        slots.forget_all(self)
        return {"ms": (time.perf_counter() - began) * 1e3, "kept": kept}

    def millrace_put_adapter(self, number: int, folder: str, files: dict[str, dict[str, Any]]) -> None:
        """Have an adapter in peft's format under a number. Raises ChangedOnDisk, AdapterRefused."""
        [name] = files
        mapped = MappedFile(Path(folder) / name, files[name]["fingerprint"])
        config = json.loads((Path(folder) / ADAPTER_CONFIG).read_bytes())
        slots.put(self, number, dict(mapped.tensors()), config)
        try:
            mapped.require_unchanged()
        except BaseException:
            slots.remove(self, number)
            raise

    def millrace_remove_adapter(self, number: int) -> None:
        """Forget an adapter, which no request names any more."""
        slots.remove(self, number)

    def millrace_release(self) -> None:
        """Free the standby weights, if there are any."""
        standby, self._standby = self._standby, None
        if standby is not None:
            self._releasing = standby.release()


@contextmanager
def experts_packed_again(model: torch.nn.Module) -> Iterator[None]:
    """Within, experts of ``model`` whose weights are prepared again are packed again.

    On a CPU vLLM packs experts when it makes their kernel, which it does once
    (``UnquantizedFusedMoEMethod._setup_kernel``): reloaded, they would lie as a checkpoint has them, and the kernel
    would read them as packed. So they have no kernel meanwhile; a layer that is not prepared gets its own back.
    """
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    kernels = [
        (method, method.moe_kernel)
        for method in methods
        if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend is UnquantizedMoeBackend.CPU
    ]
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel


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
