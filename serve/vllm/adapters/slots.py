"""Low-rank adapters in an engine: vLLM's own slots for them, filled from tensors, without a file.

vLLM fills a slot from a folder that a request names, when the first such request comes. Here an adapter is put under
its number beforehand, from tensors or from files that were verified, and a request names the number of one that is
there: vLLM then reads nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from serve.config import EngineConfig
from serve.policies.folder import compute_dtype, safetensors_header

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.lora.request import LoRARequest

_NOWHERE: Final = Path("/nowhere")  # vLLM refuses a request without a path
_ITEMSIZE: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has kernels for (``vllm.config.lora.MaxLoRARanks``)."""


class AdapterRefused(ValueError):
    """An engine can't have this adapter; the text says why."""


def adapter_arguments(
    folder: Path, *, count: int, rank: int, modules: Collection[str] | None = None, setting: str
) -> dict[str, Any]:
    """vLLM's arguments of an engine, on the policy in ``folder``, that has room for adapters.

    Args:
        count: adapters at once.
        rank: the largest.
        modules: names of the layers that may have one; by default all linear ones but the output layer.
        setting: what messages call ``rank``.

    Raises:
        AdapterRefused: vLLM has no kernels for the rank.
    """
    if rank > RANKS[-1]:
        raise AdapterRefused(f"{setting}={rank} is more than the {RANKS[-1]} that vLLM has adapters of")
    names = linear_layers(folder) if modules is None else modules
    return {
        "enable_lora": True,
        "max_loras": count,
        "max_cpu_loras": count,
        "max_lora_rank": next(size for size in RANKS if size >= rank),
        "lora_target_modules": sorted({name.rsplit(".", 1)[-1] for name in names}),
    }


def linear_layers(folder: Path) -> set[str]:
    """The last names of the linear layers inside the body of the policy in a folder: all but the output layer."""
    return {name for name, _ in _linear(folder)}


def request_of(number: int, folder: Path = _NOWHERE) -> LoRARequest:
    """What a request to the engine carries that is to be answered with adapter ``number``, which is there.

    ``folder``: from where vLLM reads it, should it be there no more.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=f"millrace-{number}", lora_int_id=number, lora_path=str(folder))


def places_bytes(folder: Path, *, count: int, rank: int, itemsize: int, modules: Collection[str] | None = None) -> int:
    """Memory that the slots of ``adapter_arguments`` take at most, on each rank of an engine."""
    names = None if modules is None else {name.rsplit(".", 1)[-1] for name in modules}
    sides = sum(sum(shape) for name, shape in _linear(folder) if names is None or name in names)
    return count * next(size for size in RANKS if size >= rank) * sides * itemsize


def body_parameters(folder: Path) -> int:
    """Parameters in the matrices of the body of the policy in a folder: what vLLM quantizes, where it does."""
    return sum(rows * columns for _, (rows, columns) in _linear(folder))


def server_places_bytes(engine: EngineConfig, folder: Path) -> int:
    """``places_bytes`` of a server's engine on the policy in ``folder``; 0 if it has no room for adapters."""
    if (room := engine.adapters) is None:
        return 0
    itemsize = _ITEMSIZE[compute_dtype(folder, engine.dtype)]
    return places_bytes(folder, count=room.count, rank=room.rank, itemsize=itemsize)


def _linear(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """(last name, shape) of each matrix in a layer of the body."""
    for path in folder.glob("*.safetensors"):
        for name, entry in safetensors_header(path).items():
            parts = name.split(".")
            if parts[-1] == "weight" and len(entry["shape"]) == 2 and any(part.isdigit() for part in parts):
                yield parts[-2], tuple(entry["shape"])


# --------------------------------------------------------------------------- in the worker, between two steps


def begin(worker: Any) -> None:
    """Make the engine's worker ready for adapters; before any other call."""
    if worker.device.type == "cpu":
        from serve.vllm.adapters.cpu_products import install

        install(_manager(worker))


def put(worker: Any, number: int, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Have the engine's worker know an adapter under ``number`` from now on, in place of the one that it had.

    Args:
        tensors: A [r, in] and B [out, r], whole, by the names that peft's files have.
        config: peft's; B is multiplied by its lora_alpha / r.

    Raises:
        AdapterRefused: it is larger than the engine has room for, of a kind that vLLM doesn't have, or of a layer that
            has none here. The one before is gone then.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_dict(dict(config))
    manager = _manager(worker)
    try:
        helper.validate_legal(manager.lora_config)
    except ValueError as error:
        raise AdapterRefused(f"the engine can't have this adapter: {error}") from error
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        number,
        dict(tensors),
        helper,
        device=str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    if halves := sorted(name for name, of in adapter.loras.items() if of.lora_a is None or of.lora_b is None):
        raise AdapterRefused(f"the adapter has one of A and B alone of {', '.join(halves)}")
    manager.remove_adapter(number)
    if len(manager) >= manager.lora_slots:
        raise AdapterRefused(f"all of the engine's adapters are in use: {', '.join(map(str, manager.list_adapters()))}")
    manager.add_adapter(adapter)
    if unknown := sorted(adapter.loras.keys() - manager.modules.keys()):
        manager.remove_adapter(number)
        raise AdapterRefused(f"the engine has no adapters of {', '.join(unknown)}")
    manager.activate_adapter(number)


def put_zero(worker: Any, number: int) -> None:
    """Have the engine's worker know, under ``number``, an adapter that adds nothing."""
    manager = _manager(worker)
    manager.remove_adapter(number)
    worker.model_runner.lora_manager.add_dummy_lora(request_of(number), rank=1)
    manager.activate_adapter(number)


def remove(worker: Any, number: int) -> None:
    """Free an adapter's slot. No request may name it any more."""
    _manager(worker).remove_adapter(number)


def forget_all(worker: Any) -> None:
    """Free all slots; requests that are computed anew after they gave way to others go on without an adapter."""
    runner = worker.model_runner
    runner.reset_lora_state()
    for request in getattr(runner, "requests", {}).values():  # vLLM's first runner keeps what they came with
        request.lora_request = None


def _manager(worker: Any) -> Any:
    return worker.model_runner.lora_manager._adapter_manager
