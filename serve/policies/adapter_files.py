"""What the folder of a policy holds that is an adapter beside another one's weights: peft's two files in their place.

All else is as in its base's folder. What reads tensors imports torch as it is called.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from serve.policies.folder import PolicyInvalid, safetensors_header

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."

_PLAIN: Final[dict[str, Any]] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "modules_to_save": None,
    "use_dora": False,
    "layer_replication": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Settings of peft's of which no other value is an adapter here."""


def check_adapter(folder: Path, base_weights: Iterable[Path]) -> None:
    """Raise PolicyInvalid unless the folder has a plain adapter of linear layers of the weights in these files."""
    config = _config(folder)
    for name, plain in _PLAIN.items():
        if config.get(name, plain) not in (plain, None):
            raise PolicyInvalid(f"{ADAPTER_CONFIG} has {name}={config[name]!r}, which is no plain adapter")
    header = safetensors_header(folder / ADAPTER_WEIGHTS)
    under = {name: entry for path in base_weights for name, entry in safetensors_header(path).items()}
    for layer in _layers(header):
        if (weight := under.get(f"{layer}.weight")) is None:
            raise PolicyInvalid(f"{ADAPTER_WEIGHTS} has an adapter of {layer}, of which its base has no weight")
        a, b = (header[f"{_PREFIX}{layer}.lora_{side}.weight"]["shape"] for side in "AB")
        if [b[0], a[1]] != weight["shape"] or not a[0] == b[1] == config["r"]:
            raise PolicyInvalid(
                f"{ADAPTER_WEIGHTS}: A {a} and B {b} of {layer} are no adapter of rank {config['r']} of a weight of "
                f"{weight['shape']}"
            )


def rank_of(folder: Path) -> int:
    """The rank of the adapter in a policy's folder."""
    return int(_config(folder)["r"])


def write_merged(base_weights: Iterable[Path], adapter: Path, folder: Path) -> None:
    """Write the weights in these files to ``folder``, by the same names, with the adapter of a folder merged into them.

    W + s · B A is computed in float32, and rounded to W's type.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    scale, sides = scale_of(_config(adapter)), load_file(adapter / ADAPTER_WEIGHTS)
    for path in base_weights:
        with safe_open(path, framework="pt") as file:
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {"format": "pt"}
        with torch.no_grad():
            for name, weight in tensors.items():
                layer = _PREFIX + name.removesuffix(".weight")
                if (a := sides.get(f"{layer}.lora_A.weight")) is not None:
                    added = sides[f"{layer}.lora_B.weight"].float() @ a.float()
                    tensors[name] = (weight.float() + scale * added).to(weight.dtype)
        save_file(tensors, folder / path.name, metadata=metadata)


def stack(adapter: Path, below: Path) -> None:
    """Make of the adapter in a folder, which was trained on the whole model of the one in ``below``, one of the base of
    both: B · A of the two is [B₁ B₂] · [A₁ A₂], of the sum of their ranks.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = _config(adapter)
    found = [(scale_of(_config(folder)), load_file(folder / ADAPTER_WEIGHTS)) for folder in (below, adapter)]
    ranks = [int(_config(folder)["r"]) for folder in (below, adapter)]
    stacked: dict[str, Tensor] = {}
    for layer in sorted({layer for _, tensors in found for layer in _layers(tensors)}):
        sides: dict[str, list[Tensor]] = {"A": [], "B": []}
        like = next(tensors for _, tensors in found if f"{_PREFIX}{layer}.lora_A.weight" in tensors)
        for (scale, tensors), rank in zip(found, ranks, strict=True):
            for side, factor in (("A", 1.0), ("B", scale)):
                name = f"{_PREFIX}{layer}.lora_{side}.weight"
                if name in tensors:
                    sides[side].append(tensors[name].float() * factor)
                else:  # this one has no adapter there
                    shape = list(like[name].shape)
                    shape[0 if side == "A" else 1] = rank
                    sides[side].append(torch.zeros(shape))
        stacked[f"{_PREFIX}{layer}.lora_A.weight"] = torch.cat(sides["A"], dim=0).contiguous()
        stacked[f"{_PREFIX}{layer}.lora_B.weight"] = torch.cat(sides["B"], dim=1).contiguous()
    # The file may be one name of several: that of a run's best weights stays as it was exported.
    save_file(stacked, aside := adapter / f"{ADAPTER_WEIGHTS}.new", metadata={"format": "pt"})
    aside.replace(adapter / ADAPTER_WEIGHTS)
    config |= {"r": sum(ranks), "lora_alpha": sum(ranks), "use_rslora": False}
    targets = [_config(folder)["target_modules"] for folder in (below, adapter)]
    if all(isinstance(of, list) for of in targets):
        config["target_modules"] = sorted({name for of in targets for name in of})
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def name_base(folder: Path, name: str) -> None:
    """Have an adapter's config name its base so, in place of where it lay."""
    config = _config(folder) | {"base_model_name_or_path": name}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def scale_of(config: dict[str, Any]) -> float:
    """By what B · A is multiplied."""
    rank = float(config["r"])
    return float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        if min(int(config["r"]), 1) < 1:
            raise PolicyInvalid(f"{ADAPTER_CONFIG} has r={config['r']}")
        float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyInvalid(f"{folder / ADAPTER_CONFIG} can't be read: {type(error).__name__}: {error}") from error
    return config


def _layers(tensors: Any) -> Iterator[str]:
    """The layers that have an adapter among tensors by name. Raises PolicyInvalid for any other tensor."""
    for name in tensors:
        layer, _, side = name.removeprefix(_PREFIX).rpartition(".lora_")
        other = {"A.weight": "B", "B.weight": "A"}.get(side)
        if not name.startswith(_PREFIX) or other is None or f"{_PREFIX}{layer}.lora_{other}.weight" not in tensors:
            raise PolicyInvalid(f"{ADAPTER_WEIGHTS} has {name}, which is no A or B of a linear layer, or has no other")
        if side == "A.weight":
            yield layer
