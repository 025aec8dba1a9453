"""Safetensors files in memory, as tensors. Format: https://huggingface.co/docs/safetensors."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from serve.policies.folder import fingerprint, safetensors_header

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The dtypes of weights that can be swapped."""


class ChangedOnDisk(RuntimeError):
    """A file is not the one that was verified any more; the text names it."""


class MappedFile:
    """One safetensors file in memory, copy-on-write: nothing that is done to its tensors reaches the disk."""

    def __init__(self, path: Path, expected: list[int]) -> None:
        """``expected``: the file's ``fingerprint`` from before it was verified. Raises ChangedOnDisk."""
        self.path = path
        self._expected = expected
        self.header = safetensors_header(path)
        with path.open("rb") as file:
            self._start = 8 + int.from_bytes(file.read(8), "little")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.require_unchanged()

    def require_unchanged(self) -> None:
        """Raise ChangedOnDisk if the file was written to since it was verified, or another lies in its place."""
        if fingerprint(self.path) != self._expected:
            raise ChangedOnDisk(f"{self.path} was changed after it was verified: publish the policy anew")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in file order, views of the mapping."""
        for name, entry in sorted(self.header.items(), key=lambda item: item[1]["data_offsets"][0]):
            shape = entry["shape"]
            count = 1
            for size in shape:
                count *= size
            dtype = DTYPES[entry["dtype"]]
            if count == 0:
                yield name, torch.empty(shape, dtype=dtype)
                continue
            offset = self._start + entry["data_offsets"][0]
            yield name, torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)
