"""Low-rank adapters (LoRA, arXiv 2106.09685) on a sharded model: only they are trained, and a critic's head.

A layer with an adapter computes ``W x + s · B A x``, A [r, in], B [out, r], s = alpha / r. The layers are peft's; here
they are put in, given their first values, merged, switched off and written in peft's format.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.model.hf_io import ADAPTER, as_parameter, held, own_slice, plain_name, whole_tensor
from train.model.low_precision.nf4 import is_packed, stored_part, unpacked

if TYPE_CHECKING:
    from train.config.sections import AdapterConfig, LoraConfig

NAME = "default"


def add_adapters(
    model: nn.Module, config: AdapterConfig, *, whole: frozenset[str] = frozenset(), setting: str = "train.lora"
) -> None:
    """Put adapters around the target layers, in place, and freeze all else. The model must not be sharded yet.

    Args:
        whole: names of parameters that are trained themselves, which no adapter may be around: a critic's head.
        setting: what messages call ``config``.

    Raises:
        ValueError: no layer is a target, or one is of a kind that cannot be merged here (tied, or not linear), or is
            trained whole.
        ImportError: peft is not installed.
    """
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(peft_config(config, "SEQ_CLS" if whole else "CAUSAL_LM"), model, adapter_name=NAME)
    except ValueError as error:
        linear = sorted({name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ValueError(
            f"{setting}.target_modules={config.target_modules!r} fits no layer of {type(model).__name__}; its linear "
            f"layers are called {', '.join(linear)}, and 'all-linear' takes all but the output layer"
        ) from error
    adapted = {name.split(ADAPTER)[0] for name, _ in model.named_parameters() if ADAPTER in name}
    users = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name in sorted(adapted):
        if not hasattr(model.get_submodule(name), "lora_A") or ".lora_embedding" in name:
            kind = type(model.get_submodule(name)).__name__
            raise ValueError(f"{setting}.target_modules takes linear layers; {name} is {kind}")
        if f"{name}.weight" in whole:
            raise ValueError(f"{setting}.target_modules takes layers of the body; {name} is trained whole")
        base = model.get_submodule(name).get_base_layer().weight
        if users[id(base)] > 1:
            raise ValueError(f"{setting}.target_modules takes layers with weights of their own; that of {name} is tied")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(ADAPTER in name or name in whole)


def initialise(model: nn.Module, device: torch.device) -> None:
    """Give the sharded adapters, on the meta device, their first values: A as nn.Linear's default, B zero.

    A's values depend on the parameter's name alone, not on how many ranks there are.
    """
    for name, parameter in list(model.named_parameters()):
        if ADAPTER not in name:
            continue
        assert isinstance(parameter, DTensor)
        whole = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            digest = hashlib.sha256(f"0 {plain_name(name)}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        local = whole[own_slice(parameter)].to(device=device, dtype=parameter.dtype, copy=True)
        torch.utils.swap_tensors(parameter, as_parameter(local, like=parameter))


def merged_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor or DTensor) of every weight, adapters merged; a tied one once. Every rank must take all.

    A merged weight is W + s · B A, in float32 where W is, sharded as W is: a rank computes only its own part, from A
    and B gathered whole. W in NF4 is what it rounds to, as training multiplies by it. The others are the model's own
    parameters. Persistent buffers come last, whole.
    """
    keys: dict[str, list[str]] = model.checkpoint_keys
    for name, tensor in plain_parameters(model):
        yield (keys.get(name) or [name])[0], tensor


def plain_parameters(model: nn.Module, policy: Path | None = None) -> Iterator[tuple[str, Tensor]]:
    """As ``merged_parameters``, by the parameters' names in the bare model.

    ``policy``: merge into what this folder stores where the model has it in NF4.
    """
    for name, tensor in held(model):
        if ADAPTER in name:
            continue
        layer = model.get_submodule(name.removesuffix(".base_layer.weight")) if ".base_layer.weight" in name else None
        with torch.no_grad():
            if layer is None:
                yield plain_name(name), tensor.detach()
                continue
            if policy is not None and is_packed(tensor):
                part = stored_part(model, policy, plain_name(name), tensor)
            else:
                part = unpacked(tensor)
            yield plain_name(name), merged(layer, tensor, part)


def merged(layer: nn.Module, weight: Tensor, part: Tensor) -> Tensor:
    """W + s · B A, sharded as ``weight``, whose part on this rank is ``part``; computed in float32."""
    a, b = (whole_tensor(getattr(layer, side)[NAME].weight).float() for side in ("lora_A", "lora_B"))
    scale: float = layer.scaling[NAME]
    rows, columns = own_slice(weight)
    # GPT-2's layers store [in, out].
    delta = (b[columns] @ a[:, rows]).T if layer.fan_in_fan_out else b[rows] @ a[:, columns]
    sum_ = (part.float() + scale * delta).to(part.dtype)
    return as_parameter(sum_, like=weight).detach() if isinstance(weight, DTensor) else sum_


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within, the model computes as its base does. The adapters add nothing: their scale is zero."""
    layers = [m for m in model.modules() if hasattr(m, "set_scale")]
    if not layers:
        raise ValueError("the model has no adapters to switch off")
    for layer in layers:
        layer.set_scale(NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(NAME, 1.0)


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor, float]]:
    """(name as peft's files have it, parameter, factor) of each A and B; a layer adds B · A x times B's factor."""
    for name, parameter in held(model):
        if ADAPTER not in name:
            continue
        layer = model.get_submodule(name.split(ADAPTER)[0])
        factor = float(layer.scaling[NAME]) if ".lora_B." in name else 1.0
        yield "base_model.model." + plain_name(name).replace(f".{NAME}.", "."), parameter.detach(), factor


def require_publishable(model: nn.Module) -> None:
    """Raise ValueError for adapters that can't be merged by the names in a checkpoint, from the files alone."""
    keys: dict[str, list[str]] = model.checkpoint_keys
    for name, layer in model.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        weight = f"{plain_name(name + '.')}weight"
        if layer.fan_in_fan_out or keys.get(weight) != [weight]:
            raise ValueError(
                f"train.lora.publish=adapter: {plain_name(name + '.').removesuffix('.')} is stored otherwise than peft "
                "names it: use train.lora.publish=merged, or other train.lora.target_modules"
            )


def export_adapter(model: nn.Module, config: LoraConfig, policy: Path, folder: Path) -> None:
    """Write the adapter to ``folder`` in peft's format (safetensors, float32); every rank must call it."""
    tensors = {name: whole_tensor(parameter).cpu().contiguous() for name, parameter, _ in adapter_parameters(model)}
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        exported = peft_config(config, "CAUSAL_LM")
        exported.base_model_name_or_path = str(policy)
        exported.inference_mode = True
        exported.save_pretrained(folder)


def peft_config(config: AdapterConfig, task_type: str) -> Any:
    from peft import LoraConfig as PeftLoraConfig

    return PeftLoraConfig(
        task_type=task_type,
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
    )
