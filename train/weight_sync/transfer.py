"""Weights from a pool that trains to a pool that generates, where no process is in both.

The sender and all receivers are in a process group of their own, beside those of the two pools. Tensors come to the
sender whole, one at a time, and go to all receivers in one broadcast a bucket, so that beside the models the sender
holds one tensor and two buckets, and a receiver one bucket, or the largest tensor where that is more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore


class WeightStream:
    """One end of the stream: rank 0 of ``ranks`` sends, the others receive. All make one, and then call alike.

    Args:
        store: the meeting point, or a client of it.
        timeout_s: of each message; on a GPU of each message header.

    Raises:
        RuntimeError: (of torch.distributed) an end did not come, or went away.
    """

    def __init__(self, store: TCPStore, rank: int, ranks: int, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._control = ProcessGroupGloo(PrefixStore("control", store), rank, ranks, timeout)
        self._data: Any = self._control
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._data = ProcessGroupNCCL(PrefixStore("data", store), rank, ranks, options)
            self._device = torch.device("cuda", torch.cuda.current_device())

    def send(self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int) -> None:
        """Send named tensors as ``dtype``, whatever theirs is."""
        waiting: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in tensors:
            waiting.append((name, tensor.detach().to(self._device, dtype)))
            size += waiting[-1][1].nbytes
            if size >= bucket_bytes:
                self._send_bucket(waiting, dtype)
                waiting, size = [], 0
        if waiting:
            self._send_bucket(waiting, dtype)
        self._send_header({})

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), in the order they were sent in. The tensors of a bucket share memory."""
        while header := self._receive_header():
            shapes: dict[str, list[int]] = header["shapes"]
            sizes = [torch.Size(shape).numel() for shape in shapes.values()]
            flat = torch.empty(sum(sizes), dtype=getattr(torch, header["dtype"]), device=self._device)
            self._data.broadcast(flat, 0).wait()
            for (name, shape), part in zip(shapes.items(), flat.split(sizes), strict=True):
                yield name, part.view(shape)

    def _send_bucket(self, named: list[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        self._send_header({"dtype": str(dtype).removeprefix("torch."), "shapes": {n: list(t.shape) for n, t in named}})
        self._data.broadcast(torch.cat([t.reshape(-1) for _, t in named]), 0).wait()

    def _send_header(self, header: dict[str, Any]) -> None:
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        self._control.broadcast(torch.tensor([len(text)]), 0).wait()
        self._control.broadcast(text, 0).wait()

    def _receive_header(self) -> dict[str, Any]:
        length = torch.zeros(1, dtype=torch.int64)
        self._control.broadcast(length, 0).wait()
        text = torch.empty(int(length), dtype=torch.uint8)
        self._control.broadcast(text, 0).wait()
        header: dict[str, Any] = json.loads(text.numpy().tobytes())
        return header
