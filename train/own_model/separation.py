"""Whether a model that is not transformers' own keeps the sequences of a packed batch apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from train.batch.packed import PackedBatch, Rollout
from train.model.attention.packed import IMPLEMENTATION
from train.model.fsdp import token_log_probs
from train.model.scalar_head import head_of, token_values

_TOLERANCE: Final = {torch.float32: 1e-3}
_WIDER: Final = 0.1
"""Of the spread of the outputs, by the type that is computed in. What lies before a sequence moves them by a share
of it that rounding does not come near."""


def policy_outputs(model: nn.Module, batch: PackedBatch) -> Tensor:
    """float32 [T]: the logprobs of the response tokens."""
    return token_log_probs(model, batch)[0]


def scalar_outputs(model: nn.Module, batch: PackedBatch) -> Tensor:
    """float32 [T]: of a model with a scalar head, what some head makes of the states before each response token.

    Its own may be zero, which tells nothing of the body.
    """
    return token_values(model, batch, head=torch.arange(1.0, head_of(model).in_features + 1).cos())


def require_apart(
    model: nn.Module, dtype: torch.dtype, outputs: Callable[[nn.Module, PackedBatch], Tensor] = policy_outputs
) -> None:
    """Raise ValueError if a sequence's outputs depend on what lies before it in a batch. Every rank must call it.

    Most of transformers' models take attention for packed batches from ``train.model.attention``. One that makes its
    own must tell where a sequence begins by ``position_ids``, which start again at 0; Falcon, BLOOM and MPT don't.
    """
    made_as: Any = model.made_as
    if made_as.__module__.startswith("transformers.") and model.config._attn_implementation == IMPLEMENTATION:
        return
    batches = [PackedBatch.pack([rollout]) for rollout in _ROLLOUTS]
    with torch.no_grad():
        together = outputs(model, PackedBatch.pack(_ROLLOUTS))
        alone = torch.cat([outputs(model, batch) for batch in batches])
    if isinstance(model, FSDPModule):
        model.reshard()  # the root stays gathered, and an optimizer would be made of what is gathered
    spread = alone[alone != 0].std()
    difference = float((together - alone).abs().max() / spread)
    if not difference <= _TOLERANCE.get(dtype, _WIDER):
        raise ValueError(
            f"{made_as.__module__}:{made_as.__name__} gives a sequence other outputs where others lie before it in "
            f"a batch (they move by {difference:.2g} of their spread): have its attention see no token before "
            "the last one whose position_ids is 0, or take its attention from transformers' ALL_ATTENTION_FUNCTIONS"
        )


def _rollout(prompt: list[int], response: list[int], group: int) -> Rollout:
    return Rollout(prompt, response, [0.0] * len(response), 0.0, group)


_ROLLOUTS: Final = [
    _rollout([1, 3, 0, 2], [0, 1, 1, 3, 2, 0], 0),
    _rollout([2, 2, 1], [3, 0, 2, 1], 1),
    _rollout([2, 2, 1], [1, 2, 3, 3, 0], 1),
]
"""Tokens that every vocabulary has; two of them share a prompt."""
