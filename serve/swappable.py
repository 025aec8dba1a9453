"""Can a policy take another's place in a running engine? Read from files alone, while the engine serves."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any, Final

import numpy as np

from serve.model_folder import safetensors_header
from serve.policies import Policy, PolicyError

FLOATS: Final = ("F64", "F32", "F16", "BF16")
_CHUNK_BYTES: Final = 64 << 20

# Settings of a config.json that don't change what the model computes with given weights.
_COSMETIC: Final = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})


class NotSwappable(PolicyError):
    """A policy can't be loaded into the engine that runs; the text names the file, the setting or the tensor."""


def require_whole(policy: Policy) -> None:
    """Raise NotSwappable naming the first file that is missing or has another size than the manifest says."""
    for name, expected in policy.files.items():
        path = policy.path / name
        if not path.is_file():
            raise NotSwappable(f"policy {policy.version}: {name} is missing")
        if (size := path.stat().st_size) != expected["size"]:
            raise NotSwappable(
                f"policy {policy.version}: {name} has {size} bytes, its manifest says {expected['size']}"
            )


def require_swappable(old: Policy, new: Policy) -> None:
    """Raise NotSwappable unless the two are one architecture with one tokenizer and tensors of the same make."""
    _require_same_config(old, new)
    _require_same_tokenizer(old, new)
    before, after = _tensors(old), _tensors(new)
    if missing := sorted(before.keys() - after.keys()):
        raise NotSwappable(f"policy {new.version} lacks the tensor {missing[0]} ({len(missing)} in all)")
    if surplus := sorted(after.keys() - before.keys()):
        raise NotSwappable(f"policy {new.version} has a surplus tensor {surplus[0]} ({len(surplus)} in all)")
    for name, entry in after.items():
        if entry["shape"] != before[name]["shape"]:
            raise NotSwappable(
                f"policy {new.version}: {name} has shape {entry['shape']}, policy {old.version} has "
                f"{before[name]['shape']}"
            )
        if entry["dtype"] not in FLOATS:
            raise NotSwappable(f"policy {new.version}: {name} is {entry['dtype']}, not one of {', '.join(FLOATS)}")
        if entry["dtype"] != before[name]["dtype"]:
            raise NotSwappable(
                f"policy {new.version}: {name} is {entry['dtype']}, policy {old.version} has {before[name]['dtype']}; "
                "restart to serve it"
            )


def require_finite(policy: Policy) -> None:
    """Raise NotSwappable naming the first tensor that has a NaN or an infinity."""
    for path in policy.weight_files:
        header = safetensors_header(path)
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                for name, entry in header.items():
                    first, last = (start + offset for offset in entry["data_offsets"])
                    if not _finite(mapped, first, last, entry["dtype"]):
                        raise NotSwappable(f"policy {policy.version}: {name} in {path.name} has a NaN or an infinity")


def _finite(mapped: mmap.mmap, first: int, last: int, dtype: str) -> bool:
    # A float is NaN or infinite when all bits of its exponent are set, in every IEEE format and in bfloat16.
    kind, exponent = {
        "F64": (np.uint64, 0x7FF0000000000000),
        "F32": (np.uint32, 0x7F800000),
        "F16": (np.uint16, 0x7C00),
        "BF16": (np.uint16, 0x7F80),
    }[dtype]
    mask = kind(exponent)
    for at in range(first, last, _CHUNK_BYTES):
        bits = np.frombuffer(mapped[at : min(at + _CHUNK_BYTES, last)], dtype=kind)
        if ((bits & mask) == mask).any():
            return False
    return True


def _require_same_config(old: Policy, new: Policy) -> None:
    before, after = (_json(policy.path / "config.json") for policy in (old, new))
    for key in sorted(before.keys() | after.keys()):
        if key not in _COSMETIC and before.get(key) != after.get(key):
            raise NotSwappable(
                f"policy {new.version}: config.json has {key} = {after.get(key)!r}, the running engine was built for "
                f"{before.get(key)!r}; restart the server to serve it"
            )


def _require_same_tokenizer(old: Policy, new: Policy) -> None:
    name = "tokenizer.json"
    if name not in old.files or name not in new.files:
        if (name in old.files) != (name in new.files):
            raise NotSwappable(f"only one of the policies {old.version} and {new.version} has a {name}")
        return
    if old.files[name]["sha256"] == new.files[name]["sha256"]:
        return
    before, after = (_json(policy.path / name) for policy in (old, new))
    for content in (before, after):
        for key in ("truncation", "padding"):  # leftovers of the last call before it was saved
            content.pop(key, None)
    if before != after:
        raise NotSwappable(f"policy {new.version}: {name} differs from policy {old.version}'s; restart to serve it")


def _tensors(policy: Policy) -> dict[str, dict[str, Any]]:
    return {name: entry for path in policy.weight_files for name, entry in safetensors_header(path).items()}


def _json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_bytes())
    return value
