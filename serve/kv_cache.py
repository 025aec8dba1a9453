"""How long a context an engine gets, and how much memory for its KV cache, from the model and the machine.

One rule for the server, for training's rollouts and for evaluation. Imports neither torch nor vLLM, so that commands
can tell before anything starts.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeGuard

import psutil

from serve.gpus import smallest_gpu
from serve.policies.folder import compute_dtype

SERVER_SHARE: Final = 0.10
BATCH_SHARE: Final = 0.05
"""Shares of a machine's memory that a KV cache takes where no size is set: a server's, and those of training and of
evaluation. Small, because a loop on one machine holds four copies of the weights or more beside them."""

GPU_BATCH_SHARE: Final = 0.30
"""Of a GPU's memory, for an engine of evaluation: it has its device for itself, or others sleep."""

MIB: Final = 2**20
_BUFFERS: Final = 1.1  # times weights and KV cache
_BLOCK: Final = 128  # tokens, of vLLM's largest usual block: a context is whole blocks of the cache
_LEAST: Final = 16 * MIB
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_STRETCHING: Final = ("linear", "dynamic", "yarn")
_TWO_FACTORS: Final = ("longrope", "su")
_CONTEXT_NAMES: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


class ContextRefused(ValueError):
    """A context does not fit into the KV cache, or is not the model's; the text has the sizes and the settings."""


@dataclass(frozen=True)
class KVCache:
    """What vLLM is started with: ``max_model_len`` in tokens, and its KV cache in bytes per device.

    ``max_model_len``: -1 leaves it to vLLM, which fits it into the cache. ``size``: None leaves it to vLLM.
    ``full_context``: the model's own, if this is less.
    """

    max_model_len: int
    size: int | None
    full_context: int | None = None

    @property
    def context(self) -> dict[str, int | None]:
        """What decides the context: its tokens, or where vLLM finds them by the cache, the cache's size as well."""
        of_cache = {"kv_cache_bytes": self.size} if self.max_model_len < 0 else {}
        return {"max_model_len": self.max_model_len, **of_cache}

    def cut(self, section: str) -> str | None:
        """One line that says how the context was cut, if it was. ``section``: of the settings that say otherwise."""
        if self.full_context is None or self.size is None:
            return None
        return (
            f"prompt and response have {self.max_model_len} tokens together, of the model's {self.full_context}: so "
            f"many fit into {self.size // MIB} MiB of KV cache (set {section}.kv_cache_bytes for more, or "
            f"{section}.max_model_len to choose it)"
        )


def fit(
    policy: Path,
    *,
    dtype: str,
    max_model_len: int | None,
    kv_cache_bytes: int | None,
    max_num_seqs: int,
    share: float,
    section: str,
    devices: int = 1,
    memory: int | None = None,
) -> KVCache:
    """Work out what is not set (None) of a context and a KV cache for the policy in a folder.

    ``dtype``: the engine's setting; ``devices``: that one copy is split over; ``share``: of the ``memory`` that each of
    them has (bytes; None: its part of this machine's); ``section``: of the settings, for errors.

    Raises ContextRefused, PolicyInvalid.
    """
    memory = memory or machine_memory() // devices
    config = json.loads((policy / "config.json").read_text())
    full, token_bytes = full_context(config), _bytes_per_token(config, _BYTES[compute_dtype(policy, dtype)], devices)
    if full is None or token_bytes is None:  # a model of another kind: vLLM finds the context that fits
        size = kv_cache_bytes or int(share * memory)
        return KVCache(max_model_len or -1, size)
    if max_model_len is not None and max_model_len > full:
        original = any(_rope_type(part) in _TWO_FACTORS for part in _sections(config))
        raise ContextRefused(
            f"{section}.max_model_len={max_model_len} is more than the {full} tokens of context of the model in "
            f"{policy}{' (with longrope: the original one)' if original else ''}: use at most {full}"
        )
    block = _BLOCK * token_bytes
    if kv_cache_bytes is None:
        # What max_num_seqs responses of the whole context take is the most that is ever used.
        useful = (_blocks(max_model_len or full) * max_num_seqs + 1) * block
        size = min(useful, int(share * memory))
        if max_model_len is not None:
            size = max(size, (_blocks(max_model_len) + 1) * block)
        size = max(size, 2 * block, _LEAST)
    else:
        size = kv_cache_bytes
    fitting = max(0, size // block - 1) * _BLOCK  # vLLM keeps one block of a cache for itself
    if max_model_len is not None:
        if max_model_len > fitting:
            raise ContextRefused(
                f"{section}.max_model_len={max_model_len} takes {(_blocks(max_model_len) + 1) * block} bytes of KV "
                f"cache, and {section}.kv_cache_bytes={size}: set one of them otherwise, or leave one out"
            )
        return KVCache(max_model_len, size)
    if fitting >= full:
        return KVCache(full, size)
    if fitting == 0:
        raise ContextRefused(f"{section}.kv_cache_bytes={size} holds no {_BLOCK} tokens: set at least {2 * block}")
    return KVCache(fitting, size, full)


class EngineSettings(Protocol):
    """The settings of an engine that decide about its context: the server's, and evaluation's."""

    @property
    def dtype(self) -> str: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def kv_cache_bytes(self) -> int | None: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def tensor_parallel_size(self) -> int: ...


def fit_engine(
    config: EngineSettings, policy: Path, *, section: str, share: float, memory: int | None = None
) -> KVCache:
    """``fit`` by the settings of an engine."""
    return fit(
        policy,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        kv_cache_bytes=config.kv_cache_bytes,
        max_num_seqs=config.max_num_seqs,
        share=share,
        section=section,
        devices=config.tensor_parallel_size,
        memory=memory,
    )


def fit_batch_engine(config: EngineSettings, policy: Path, *, section: str) -> KVCache:
    """``fit_engine`` of an evaluation's engine: by the memory of the smallest GPU, or without one by the machine's."""
    if (gpu := smallest_gpu()) is None:
        return fit_engine(config, policy, section=section, share=BATCH_SHARE)
    return fit_engine(config, policy, section=section, share=GPU_BATCH_SHARE, memory=gpu.total_bytes)


def device_share(engine: int, kv_cache: int, device: int) -> float:
    """The share of a device's memory that must be free for an engine on it, beside what others hold there.

    vLLM refuses to start if less is, and its default is 92 %, however small the KV cache. ``engine``: bytes of its
    weights; ``kv_cache`` and ``device`` are bytes, too.
    """
    return min(1.0, _BUFFERS * (engine + kv_cache) / device)


def full_context(config: dict[str, Any]) -> int | None:
    """The tokens of context that a model has by its config.json; None if it doesn't say."""
    for section in _sections(config):
        for name in _CONTEXT_NAMES:
            if _is_count(section.get(name)):
                return _stretched(section, section[name])
    return None


def token_bytes(policy: Path, dtype: str, devices: int = 1) -> int | None:
    """Bytes that a token of the policy in a folder takes in a KV cache; None for models whose caches are of another
    kind. ``dtype``: the engine's setting; ``devices``: that one copy is split over, on each of them."""
    config = json.loads((policy / "config.json").read_text())
    return _bytes_per_token(config, _BYTES[compute_dtype(policy, dtype)], devices)


def machine_memory() -> int:
    """Bytes of memory of this machine, or of its container if that has less."""
    limit = container_memory()
    total = psutil.virtual_memory().total
    return total if limit is None else min(total, limit)


def available_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that can still be had: of this machine, or of its container if that has less left.

    ``group``: the folder of its control group.
    """
    available = psutil.virtual_memory().available
    try:
        bound = (group / "memory.max").read_text().strip()
        if bound != "max":
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))
            available = min(available, max(0, int(bound) - used))
    except (OSError, ValueError):
        pass  # no such control group: the machine's own number stands
    return available


def container_memory() -> int | None:
    """The container's own bound on memory, bytes; None if there is none."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


def swap_memory(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this machine may swap to, or its container if that has less. ``groups``: of control groups."""
    total = psutil.swap_memory().total
    with suppress(OSError, ValueError):
        total = min(total, int((groups / "memory.swap.max").read_text()))
    with suppress(OSError, ValueError):  # version 1 bounds memory and swap together
        one = groups / "memory"
        both, memory = (int((one / f"memory.{name}_in_bytes").read_text()) for name in ("memsw.limit", "limit"))
        total = min(total, max(0, both - memory) if both < 2**60 else total)
    return total


def _bytes_per_token(config: dict[str, Any], itemsize: int, devices: int) -> int | None:
    """Of a token's keys and values in all layers; as if every layer looked at all tokens, so rather too many.

    None for models whose caches are of another kind.
    """
    section = next((part for part in _sections(config) if _is_count(part.get("num_hidden_layers"))), {})
    layers, heads = section.get("num_hidden_layers"), section.get("num_attention_heads")
    if not _is_count(layers) or not _is_count(heads) or _is_count(section.get("kv_lora_rank")):
        return None
    key_value_heads = section.get("num_key_value_heads") or heads
    head_size = section.get("head_dim") or section.get("hidden_size", 0) // heads
    if not _is_count(key_value_heads) or not _is_count(head_size):
        return None
    return 2 * layers * max(1, key_value_heads // devices) * head_size * itemsize


def _stretched(section: dict[str, Any], context: int) -> int:
    """``context`` as rotary embeddings are scaled to a longer one; for the types whose config.json has the shorter.

    With longrope it is the original one. Beyond it there are other factors, which vLLM takes for every token once the
    context may be longer, and transformers for the passes alone in which a sequence is.
    """
    scaling, original = _rope(section), "original_max_position_embeddings"
    if _rope_type(section) in _TWO_FACTORS:
        return int(scaling.get(original) or section.get(original) or context)
    if _rope_type(section) not in _STRETCHING:
        return context
    return int((scaling.get(original) or context) * float(scaling.get("factor") or 1))


def _rope(section: dict[str, Any]) -> dict[str, Any]:
    found = section.get("rope_parameters") or section.get("rope_scaling")
    return found if isinstance(found, dict) else {}


def _rope_type(section: dict[str, Any]) -> Any:
    return _rope(section).get("rope_type", _rope(section).get("type"))


def _blocks(tokens: int) -> int:
    return -(-tokens // _BLOCK)


def _sections(config: dict[str, Any]) -> list[dict[str, Any]]:
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
