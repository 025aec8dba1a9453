"""Tensors whose memory is given back for a while: their bytes wait in the host's.

It is their storages that are emptied and filled again, as FSDP does with parameters that it has gathered: every tensor
stays the object that it is, with its views and whoever holds it, and nothing has to know. On a CPU, where the two
memories are one, all of it works alike and saves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Parked:
    """A set of tensors, here or away. Nothing may read them while they are away.

    The host's memory is kept for the next time: on a GPU's machine it is pinned, which takes long.
    """

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._spare: defaultdict[int, list[Tensor]] = defaultdict(list)

    @property
    def away(self) -> bool:
        return bool(self._away)

    @property
    def bytes(self) -> int:
        """That are away."""
        return sum(len(host) for _, host in self._away)

    def park(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Send away what of the tensors is on ``device``; a storage that several share goes once. They are away then.

        What is away already stays so.
        """
        for storage in _storages(tensors, device):
            host = self._host_memory(storage)
            host.copy_(_bytes_of(storage), non_blocking=device.type == "cuda")
            self._away.append((storage, host))
        if device.type == "cuda":
            torch.cuda.synchronize()
        for storage, _ in self._away:
            storage.resize_(0)

    def restore(self) -> None:
        """Have all of them here again, with the values that they had."""
        for storage, host in self._away:
            storage.resize_(len(host))
            _bytes_of(storage).copy_(host, non_blocking=storage.device.type == "cuda")
            self._spare[len(host)].append(host)
        if any(storage.device.type == "cuda" for storage, _ in self._away):
            torch.cuda.synchronize()  # before the host's memory is written to again
        self._away.clear()

    def forget(self) -> None:
        """Give back the host's memory; what is away is lost."""
        self._away.clear()
        self._spare.clear()

    def _host_memory(self, storage: torch.UntypedStorage) -> Tensor:
        size = storage.nbytes()
        if spare := self._spare[size]:
            return spare.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")


def _storages(tensors: Iterable[Tensor], device: torch.device) -> Iterator[torch.UntypedStorage]:
    seen: set[int] = set()
    for tensor in tensors:
        for part in _plain(tensor):
            storage = part.untyped_storage()
            if storage.device.type != device.type or not storage.nbytes() or storage.data_ptr() in seen:
                continue
            if not storage.resizable():
                raise RuntimeError(f"a tensor of {storage.nbytes()} bytes has memory that is not torch's own to free")
            seen.add(storage.data_ptr())
            yield storage


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own that one consists of: of a DTensor its shard, of 8-bit moments their codes
    and scales."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        if isinstance(inner := getattr(tensor, name), Tensor):  # and no mesh
            yield from _plain(inner)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
