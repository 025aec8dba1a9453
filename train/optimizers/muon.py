"""Muon for the matrices of a sharded model, AdamW for all else, in one optimizer.

Muon (Keller Jordan, kellerjordan.github.io/posts/muon) orthogonalises the momentum of a matrix, which takes all of it.
So matrices are gathered, each rank computes the update of one, as ``torch.optim.Muon`` does, and sends it to all, who
apply their slices (as in arXiv 2502.16982, section 2.3). The momentum is sharded as the matrix is. The scale of an
update is that paper's (section 2.2), with which the learning rate and weight decay of AdamW suit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.model.hf_io import as_parameter, own_slice, whole_tensor

MOMENTUM: Final = 0.95
"""As in arXiv 2502.16982."""
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_ITERATIONS: Final = 5


class Muon(torch.optim.Optimizer):
    """Every rank must call ``step``, and has a gradient for the same parameters.

    Args:
        matrices: groups of parameters of two dimensions, each a DTensor, for Muon.
        others: groups for AdamW.
        device: where updates are computed, wherever the parameters are.
    """

    def __init__(
        self,
        matrices: Sequence[dict[str, Any]],
        others: Sequence[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        device: torch.device,
    ) -> None:
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, fused=True) if others else None
        rest = [] if self._adamw is None else self._adamw.param_groups
        super().__init__([*({**group, "momentum": momentum} for group in matrices), *rest], {"lr": lr})
        self._device = device

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if self._adamw is not None:
            self._adamw.param_groups = [group for group in self.param_groups if "momentum" not in group]
            self._adamw.state = self.state
            self._adamw.step()
        matrices = [
            (p, group)
            for group in self.param_groups
            if "momentum" in group
            for p in group["params"]
            if p.grad is not None
        ]
        ranks = torch.distributed.get_world_size()
        for first in range(0, len(matrices), ranks):
            self._step_turn(matrices[first : first + ranks])
        return result

    def _step_turn(self, matrices: Sequence[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        """Of as many matrices as there are ranks, or fewer: each rank computes one."""
        rank, own = torch.distributed.get_rank(), None
        for owner, (p, group) in enumerate(matrices):
            whole = self._direction(p, group["momentum"])
            own = whole if owner == rank else own
        if own is not None:
            own = orthogonalised(own)
        for owner, (p, group) in enumerate(matrices):
            if owner == rank:
                assert own is not None
                update = own
            else:
                update = torch.empty(p.shape, dtype=p.dtype, device=self._device)
            if torch.distributed.get_world_size() > 1:
                torch.distributed.broadcast(update, src=owner)
            assert isinstance(p, DTensor)
            part = p.to_local()
            part.mul_(1 - group["lr"] * group["weight_decay"])
            part.add_(update[own_slice(p)].to(part.device), alpha=-group["lr"])

    def _direction(self, p: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov's, as ``torch.optim.Muon`` has it: whole, on the compute device. Every rank must call it."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        assert isinstance(p, DTensor)
        assert isinstance(p.grad, DTensor)
        gradient, buffer = p.grad.to_local(), state["momentum_buffer"].to_local()
        buffer.lerp_(gradient, 1 - momentum)
        part = gradient.lerp(buffer, momentum).to(self._device)
        return whole_tensor(as_parameter(part, like=p).detach()) if torch.distributed.get_world_size() > 1 else part


def orthogonalised(matrix: Tensor) -> Tensor:
    """The update of a matrix at a learning rate of 1, computed in bfloat16: its singular vectors, at about one length.

    Newton and Schulz's iteration, with Keller Jordan's coefficients, as in ``torch.optim.Muon``, to make one of which
    for each matrix would take a fifth as long as the iteration of a small one.
    """
    a, b, c = _COEFFICIENTS
    x = matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    if is_tall:
        x = x.T
    return x.to(matrix.dtype).mul_(0.2 * math.sqrt(max(matrix.shape))).contiguous()


def orthogonalisation_flops(rows: int, columns: int) -> int:
    """Of a matrix: five iterations, each of X Xᵀ, its square, and their product with X, where X is the wide way round.

    >>> orthogonalisation_flops(3, 2) == 5 * (2 * 2 * 2 * 3 + 2 * 2**3 + 2 * 2 * 2 * 3)
    True
    """
    m, n = min(rows, columns), max(rows, columns)
    return 5 * (4 * m * m * n + 2 * m**3)
