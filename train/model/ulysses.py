"""Ulysses sequence parallelism (arXiv 2309.14509): ranks share a sequence's tokens, and in attention its heads.

Each rank of a group runs the model on a slice of the packed tokens. Around attention an all-to-all turns its slice of
the tokens with all heads into all tokens with its share of the heads, and back. Slices may differ by a token, so
nothing is padded. Where there are fewer key and value heads than ranks, or they don't divide, each is repeated the
least number of times that lets every rank have the same number of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class Ulysses:
    """The share of this rank in a packed batch of ``tokens`` tokens; made for each forward pass.

    Not a dataclass: FSDP2 takes those apart and builds them anew at each layer.
    """

    def __init__(self, group: ProcessGroup, tokens: int) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.counts = [tokens // self.size + (r < tokens % self.size) for r in range(self.size)]
        start = sum(self.counts[: self.rank])
        self.own = slice(start, start + self.counts[self.rank])
        # A model cannot be run on no tokens, so a rank without any runs it on one that goes nowhere.
        self.run = self.own if self.counts[self.rank] else slice(0, 1)

    def heads_for_tokens(self, *tensors: Tensor) -> list[Tensor]:
        """[own tokens, heads, D] of query, key and value → [all tokens, own heads, D] of each, in one exchange."""
        per_rank = []
        for x in tensors:
            heads, x = x.shape[1], x[: self.counts[self.rank]]
            times = self.size // math.gcd(heads, self.size)
            if times > 1:
                x = x.repeat_interleave(times, 1)
            per_rank.append(x.unflatten(1, (self.size, -1)))
        widths = [x.shape[2] * x.shape[3] for x in per_rank]
        sent = torch.cat([x.flatten(2) for x in per_rank], -1).transpose(0, 1).flatten(0, 1)
        received = _AllToAll.apply(sent, [self.counts[self.rank]] * self.size, self.counts, self.group)
        return [
            part.unflatten(1, (-1, x.shape[-1])) for part, x in zip(received.split(widths, -1), per_rank, strict=True)
        ]

    def tokens_for_heads(self, x: Tensor) -> Tensor:
        """[all tokens, own heads, D] → [own tokens, all heads, D]."""
        received = _AllToAll.apply(x.flatten(1), self.counts, [self.counts[self.rank]] * self.size, self.group)
        by_rank = received.unflatten(0, (self.size, -1)).unflatten(-1, (-1, x.shape[-1]))
        out = by_rank.transpose(0, 1).flatten(1, 2)
        # The row of zeros must hang on the exchange, or this rank would be missing from it in the backward pass.
        return out if len(out) else out.new_zeros(1, *out.shape[1:]) + out.sum()

    def own_heads(self, x: Tensor) -> Tensor:
        """[heads] → this rank's."""
        return x.unflatten(0, (self.size, -1))[self.rank]

    def everywhere(self, x: Tensor, counts: list[int]) -> Tensor:
        """[own rows, …] → [all rows, …], given how many rows each rank has.

        Backward, what all ranks of the group ask of a row is added up: the loss is the sum of the losses of all ranks,
        whether they are of the same tokens or not.
        """
        return _AllGather.apply(x, counts, self.group)


def sequence_parallel_group(model: nn.Module) -> ProcessGroup | None:
    """The ranks that share ``model``'s sequences with this one, itself included; None if it has them alone."""
    return getattr(model, "sequence_parallel_group", None)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        torch.distributed.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out = grad.new_empty(sum(ctx.sent), *grad.shape[1:])
        torch.distributed.all_to_all_single(out, grad.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return out, None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        longest = max(counts)
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: len(x)] = x
        gathered = x.new_empty(longest * len(counts), *x.shape[1:])
        torch.distributed.all_gather_single(gathered, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(gathered.split(longest), counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        total = grad.contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total.split(ctx.counts)[ctx.group.rank()], None, None
