"""Policies that are random adapters of a policy in the store, in peft's format."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from serve.policies.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from serve.policies.folder import safetensors_header
from serve.policies.store import Policy, PolicyStore
from train.run.publish import measure


def make_adapter(base: Policy, folder: Path, *, seed: int, rank: int = 4, size: float = 0.2) -> Path:
    """The files of an adapter of all linear layers of the base's body; its output is scaled by 2."""
    shutil.copytree(base.path, folder, ignore=shutil.ignore_patterns("*.safetensors*", "policy.json", "gate.json"))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path in base.weight_files:
        for name, entry in safetensors_header(path).items():
            if ".layers." in name and len(entry["shape"]) == 2:
                layer, (out, into) = f"base_model.model.{name.removesuffix('.weight')}", entry["shape"]
                tensors[f"{layer}.lora_A.weight"] = size * torch.randn(rank, into, generator=generator)
                tensors[f"{layer}.lora_B.weight"] = size * torch.randn(out, rank, generator=generator)
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    return folder


def publish_adapter(store: PolicyStore, base: Policy, folder: Path, **how: Any) -> Policy:
    """``make_adapter``, as the next version, with numbers for a server's probe."""
    numbers = partial(measure, base, folder.with_name(f"{folder.name}-measured"), None)
    made = make_adapter(base, folder, **how)
    return store.publish(made, parent=base.version, lineage={}, metrics={}, probe=numbers, base=base)
