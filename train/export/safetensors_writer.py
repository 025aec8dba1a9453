"""A safetensors file that is hashed as it is written, so that nobody has to read it for its hash.

Format: https://huggingface.co/docs/safetensors (8 bytes length, JSON, data).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from feedback.files import write_all
from serve.policies.folder import WrittenFile
from train.model.hf_io import FLOATS

_NAMES: Final = {dtype: name for name, dtype in FLOATS.items()}
_CHUNK: Final = 2**22
"""Bytes that are hashed and then written, while they are in the processor's cache."""


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
    """Write floating-point tensors of the CPU to a new file, durable but for its name.

    Wider types come first, so that each tensor is aligned to its own.

    Raises:
        FileExistsError: there is such a file.
        OSError: the disk refuses.
    """
    ordered = sorted(tensors.items(), key=lambda named: -named[1].itemsize)
    digest = hashlib.sha256()
    with path.open("xb", buffering=0) as file:
        for chunk in _chunks(ordered):
            digest.update(chunk)
            write_all(file.fileno(), chunk)
        os.fsync(file.fileno())
        return WrittenFile.of(os.fstat(file.fileno()), digest.hexdigest())


def _chunks(named: list[tuple[str, Tensor]]) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in named:
        offsets = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        offset = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in named:
        content = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        yield from (content[start : start + _CHUNK] for start in range(0, len(content), _CHUNK))
