"""The process groups that weights go over: a pool's own, or one that joins a pool that trains to one that generates.

Two pools share no process, and torch.distributed has one world a process. So the group that joins them is made of bare
backends: gloo for what lies on the CPU, NCCL for what lies on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore


class Group(Protocol):
    """The ranks that weights go between, as ``Exchange`` uses them; every rank must call alike.

    Raises RuntimeError (of torch.distributed) where a rank has gone, or does not come in time.
    """

    rank: int
    ranks: int
    device: torch.device
    """Where what it sends and receives lies."""

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Any:
        """Start to send each rank its elements of ``sent``, in order of rank; the answer has ``wait``."""
        ...

    def sum(self, tensor: Tensor) -> None:
        """Have a tensor of the CPU added up over the ranks, in place."""
        ...

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """What each rank has, by rank."""
        ...


class OwnPool:
    """The ranks of this process's pool, which train and generate."""

    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.ranks = torch.distributed.get_world_size()
        self.device = _device()

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Any:
        return torch.distributed.all_to_all_single(
            received, sent, list(receive_counts), list(send_counts), async_op=True
        )

    def sum(self, tensor: Tensor) -> None:
        torch.distributed.all_reduce(tensor)

    def gather_bytes(self, own: bytes) -> list[bytes]:
        every: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(every, own)
        return every


class JoinedPools:
    """The ranks of a pool that trains, and after them those of one that generates.

    Args:
        store: the meeting point, or a client of it.
        rank: in the group.
        name: of the group, where several meet at one store.
        timeout_s: of each message; on a GPU of each that is not of data.
    """

    def __init__(self, store: TCPStore, rank: int, ranks: int, timeout_s: float, name: str = "pools") -> None:
        timeout = timedelta(seconds=timeout_s)
        self.rank, self.ranks, self.device = rank, ranks, _device()
        self._control = ProcessGroupGloo(PrefixStore(f"{name} control", store), rank, ranks, timeout)
        self._data: Any = self._control
        if self.device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._data = ProcessGroupNCCL(PrefixStore(f"{name} data", store), rank, ranks, options)

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Any:
        return self._data.alltoall_base(received, sent, list(receive_counts), list(send_counts))

    def sum(self, tensor: Tensor) -> None:
        self._control.allreduce([tensor]).wait()

    def gather_bytes(self, own: bytes) -> list[bytes]:
        return [self.broadcast_bytes(own, source) for source in range(self.ranks)]

    def broadcast(self, tensor: Tensor) -> None:
        """Send rank 0's tensor, which lies on ``device``, to all."""
        self._data.broadcast(tensor, 0).wait()

    def broadcast_bytes(self, own: bytes, source: int = 0) -> bytes:
        """What rank ``source`` has."""
        length = torch.tensor([len(own)])
        self._control.broadcast(length, source).wait()
        text = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == source:
            text = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        self._control.broadcast(text, source).wait()
        return text.numpy().tobytes()


class WeightStream:
    """Whole tensors from one rank to all others, for ``train.rollout.reshard: gather`` where pools are separate.

    They come to the sender one at a time, and go to all receivers in one broadcast a bucket, so that beside the models
    the sender holds one tensor and two buckets, and a receiver one bucket, or the largest tensor where that is more.
    One end of it: rank 0 of ``group`` sends, the others receive. All make one, and then call alike.
    """

    def __init__(self, group: JoinedPools) -> None:
        self._group = group

    def send(self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int) -> None:
        """Send named tensors as ``dtype``, whatever theirs is."""
        waiting: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in tensors:
            waiting.append((name, tensor.detach().to(self._group.device, dtype)))
            size += waiting[-1][1].nbytes
            if size >= bucket_bytes:
                self._send_bucket(waiting, dtype)
                waiting, size = [], 0
        if waiting:
            self._send_bucket(waiting, dtype)
        self._send_header({})

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), in the order they were sent in. The tensors of a bucket share memory."""
        while header := json.loads(self._group.broadcast_bytes(b"")):
            shapes: dict[str, list[int]] = header["shapes"]
            sizes = [torch.Size(shape).numel() for shape in shapes.values()]
            flat = torch.empty(sum(sizes), dtype=getattr(torch, header["dtype"]), device=self._group.device)
            self._group.broadcast(flat)
            for (name, shape), part in zip(shapes.items(), flat.split(sizes), strict=True):
                yield name, part.view(shape)

    def _send_bucket(self, named: list[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        self._send_header({"dtype": str(dtype).removeprefix("torch."), "shapes": {n: list(t.shape) for n, t in named}})
        self._group.broadcast(torch.cat([t.reshape(-1) for _, t in named]))

    def _send_header(self, header: dict[str, Any]) -> None:
        self._group.broadcast_bytes(json.dumps(header).encode())


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
