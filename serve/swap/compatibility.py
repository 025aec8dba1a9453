"""Can a policy take another's place in a running engine? Read from files alone, while the engine serves.

A swap exchanges weights. Whatever else decides what is computed from a request, and when it ends, is read at the
engine's start and stays: architecture, tokenizer, chat templates, tokens that end a response. So a policy that differs
in any of that is refused: served, it would answer otherwise than it did where it was judged.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import textwrap
from pathlib import Path
from typing import Any, Final

import numpy as np

from serve.policies.adapter_files import ADAPTER_CONFIG
from serve.policies.folder import declared_dtype, safetensors_header
from serve.policies.store import Policy, PolicyError

FLOATS: Final = ("F64", "F32", "F16", "BF16")
_CHUNK_BYTES: Final = 64 << 20

_SHOWN: Final = 120  # characters of a value in an error
_REMEDY: Final = (
    "a swap exchanges weights alone: to serve this policy, stop the server, promote the policy, and start the server "
    "again (a fleet: all its replicas)"
)

# Keys that don't change what is computed: by whom, from where and how a file was written, anywhere and by file.
_COSMETIC: Final = frozenset({"_name_or_path", "name_or_path", "_from_model_config", "transformers_version"})
_COSMETIC_OF: Final = {
    "config.json": frozenset({"torch_dtype", "dtype", "use_cache"}),  # the dtype is compared by itself
    "generation_config.json": frozenset({"use_cache"}),
    "tokenizer.json": frozenset({"truncation", "padding"}),  # leftovers of the last call before it was saved
}


class IncompatiblePolicy(PolicyError):
    """A policy can't be loaded into the engine that runs; the text names the file, the setting or the tensor."""


def require_compatible(old: Policy, new: Policy) -> None:
    """Raise IncompatiblePolicy unless the two differ in their weights' values and in nothing else that matters."""
    _require_same_files(old, new)
    if (dtype := declared_dtype(new.path)) != (before_dtype := declared_dtype(old.path)):
        raise IncompatiblePolicy(
            f"policy {new.version} is computed in {dtype}, policy {old.version} in {before_dtype}; {_REMEDY}"
        )
    before, after = _tensors(old), _tensors(new)
    if missing := sorted(before.keys() - after.keys()):
        raise IncompatiblePolicy(f"policy {new.version} lacks the tensor {missing[0]} ({len(missing)} in all)")
    if surplus := sorted(after.keys() - before.keys()):
        raise IncompatiblePolicy(f"policy {new.version} has a surplus tensor {surplus[0]} ({len(surplus)} in all)")
    for name, entry in after.items():
        if entry["shape"] != before[name]["shape"]:
            raise IncompatiblePolicy(
                f"policy {new.version}: {name} has shape {entry['shape']}, policy {old.version} has "
                f"{before[name]['shape']}"
            )
        if entry["dtype"] not in FLOATS:
            raise IncompatiblePolicy(
                f"policy {new.version}: {name} is {entry['dtype']}, not one of {', '.join(FLOATS)}"
            )
        if entry["dtype"] != before[name]["dtype"]:
            raise IncompatiblePolicy(
                f"policy {new.version}: {name} is {entry['dtype']}, policy {old.version} has {before[name]['dtype']}; "
                f"{_REMEDY}"
            )


def require_same_but_weights(old: Policy, new: Policy) -> None:
    """As ``require_compatible``, of two policies whose weights are an adapter of one base, or that base's.

    Their numbers and shapes were compared with the base's when the adapter was published.
    """
    _require_same_files(old, new)


def computes_alike(one: Policy, other: Policy) -> bool:
    """Whether an engine does the same work for a token of both: one config.json, and tensors of one shape and type.

    Raises IncompatiblePolicy for a config.json that is not as the manifest says, or no JSON.
    """
    config = "config.json"
    shapes = [
        {name: (entry["shape"], entry["dtype"]) for name, entry in _tensors(policy).items()} for policy in (one, other)
    ]
    return (
        _content(one, config) == _content(other, config)
        and declared_dtype(one.path) == declared_dtype(other.path)
        and shapes[0] == shapes[1]
    )


def identity(policy: Policy) -> str:
    """A hash of all that an engine reads of a policy at its start, and that other weights don't change.

    Where two policies have the same one, an engine on either may be given the weights of the other. It is stricter than
    ``require_compatible``, and outlives the folder of the policy that an engine was started on.
    """
    files = {
        name: entry["sha256"]
        for name, entry in policy.files.items()
        if not _is_weights(name) and not _is_document(name)
    }
    tensors = {name: [entry["shape"], entry["dtype"]] for name, entry in _tensors(policy).items()}
    return hashlib.sha256(json.dumps([files, tensors], sort_keys=True).encode()).hexdigest()


def require_finite(policy: Policy) -> None:
    """Raise IncompatiblePolicy naming the first tensor that has a NaN or an infinity."""
    for path in policy.weight_files:
        header = safetensors_header(path)
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                for name, entry in header.items():
                    first, last = (start + offset for offset in entry["data_offsets"])
                    if not _finite(mapped, first, last, entry["dtype"]):
                        raise IncompatiblePolicy(
                            f"policy {policy.version}: {name} in {path.name} has a NaN or an infinity"
                        )


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


def _require_same_files(old: Policy, new: Policy) -> None:
    """Compare all that a start reads besides the weights. What is not known not to matter does."""
    for name in sorted(old.files.keys() | new.files.keys()):
        if _is_weights(name) or _is_document(name):
            continue
        for one, other in ((old, new), (new, old)):
            if name not in one.files:
                raise IncompatiblePolicy(f"policy {one.version} has no {name}, policy {other.version} has; {_REMEDY}")
        if old.files[name]["sha256"] == new.files[name]["sha256"]:
            continue
        before, after = (_content(policy, name) for policy in (old, new))
        for key in sorted(before.keys() | after.keys()):
            if key not in before or key not in after or before[key] != after[key]:
                raise IncompatiblePolicy(
                    f"policy {new.version}: {name} has {key} = {_brief(after, key)}, the running engine was started "
                    f"with {_brief(before, key)}; {_REMEDY}"
                )
        if not name.endswith(".json"):
            raise IncompatiblePolicy(f"policy {new.version}: {name} differs from policy {old.version}'s; {_REMEDY}")


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json")) or name == ADAPTER_CONFIG


def _is_document(name: str) -> bool:
    """Whether people alone read it."""
    file = Path(name).name
    if file.endswith(".py"):
        return False
    return file.endswith((".md", ".png", ".jpg")) or file.startswith(("LICENSE", "NOTICE")) or file == ".gitattributes"


def _content(policy: Policy, name: str) -> dict[str, Any]:
    """A JSON file without what only says how it was written; {} of any other file."""
    content = (policy.path / name).read_bytes()
    if (digest := hashlib.sha256(content).hexdigest()) != (expected := policy.files[name]["sha256"]):
        raise IncompatiblePolicy(
            f"policy {policy.version}: {name} has sha256 {digest[:12]}…, its manifest says {expected[:12]}…"
        )
    if not name.endswith(".json"):
        return {}
    try:
        value = json.loads(content)
    except ValueError as error:
        raise IncompatiblePolicy(f"policy {policy.version}: {name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        return {"its content": value}
    cosmetic = _COSMETIC | _COSMETIC_OF.get(name, frozenset())
    value = {key: item for key, item in value.items() if key not in cosmetic}
    ends = value.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if all(isinstance(token, int) for token in ends):  # one token or a list of it, in any order
        value["eos_token_id"] = sorted(set(ends))
    return value


def _brief(content: dict[str, Any], key: str) -> str:
    return textwrap.shorten(repr(content[key]), _SHOWN, placeholder="…") if key in content else "nothing"


def _tensors(policy: Policy) -> dict[str, dict[str, Any]]:
    return {name: entry for path in policy.weight_files for name, entry in safetensors_header(path).items()}
