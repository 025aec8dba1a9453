"""A causal LM's body with a head of one output in place of the projection to the vocabulary: critics, reward models.

It is transformers' sequence-classification model of the policy's architecture with one label, so that what is trained
can be loaded by it. The head is one linear layer without bias, and is computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from feedback.trusted_code import UntrustedCode
from train.batch.packed import PackedBatch
from train.batch.prompt_rows import take_rows
from train.model.fsdp import brings_code, build, outputs_at
from train.model.hf_io import as_parameter
from train.model.tensor_parallel import local

HEAD: Final = "score"
"""Name of the head's module in transformers' sequence-classification models of causal LMs."""

UNSTORED: Final = frozenset((f"{HEAD}.weight",))
"""What a policy's folder has no values for."""


def build_with_scalar_head(policy: Path, **how: Any) -> nn.Module:
    """As ``train.model.fsdp.build``, with the body of ``policy``; the head is zero, unless the folder stores one.

    Zero, because what is predicted before anything was learned is then 0 for everything: neither advantages nor the
    order of responses begin with the noise of a random projection. The head's gradient is not zero, so it leaves that
    point with the first step, and the body follows. With ``lora`` adapters and the head are trained.

    Raises:
        ValueError: transformers has no sequence-classification model of the policy's architecture, or as ``build``.
    """
    model = build(policy, make=with_one_output, unstored=UNSTORED, **how)
    head = head_of(model)
    if head.weight.is_meta:
        home = next(p.device for p in model.parameters() if not p.is_meta)
        like = head.weight
        assert isinstance(like, DTensor)
        zeros = torch.zeros(like.to_local().shape, dtype=like.dtype, device=home)
        torch.utils.swap_tensors(head.weight, as_parameter(zeros, like=like))
    return model


def with_one_output(config: PretrainedConfig) -> PreTrainedModel:
    """transformers' sequence-classification model of the config's architecture, with one label, in float32."""
    config.num_labels = 1
    try:
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(
            config, dtype=torch.float32, trust_remote_code=brings_code(config)
        )
    except UntrustedCode:
        raise
    except ValueError as error:
        raise ValueError(
            f"{type(config).__name__}: transformers has no sequence-classification model of this architecture, which "
            "critics and reward models are made of; choose a policy that has one, or an algorithm without a critic"
        ) from error
    head_of(model)
    return model


def head_of(model: nn.Module) -> nn.Linear:
    """The head of one output.

    Raises:
        ValueError: the model has another kind of head.
    """
    head: Any = getattr(model, HEAD, None)
    if type(head) is not nn.Linear or head.bias is not None or head.out_features != 1:
        raise ValueError(
            f"{type(model).__name__}.{HEAD} is {head}; a linear layer of one output without bias is expected"
        )
    return head


def token_values(model: nn.Module, batch: PackedBatch, *, head: Tensor | None = None) -> Tensor:
    """float32 [T]: the value of the state before each response token, zero at prompt tokens.

    ``head``: float32 [H], in place of the model's own.

    The state before token t is the tokens up to t - 1, so it is the hidden state of t - 1 that the value is read from.
    """
    sampled = batch.response_mask.nonzero().flatten()
    values = outputs_at(model, batch, sampled - 1, lambda _, places: read_by_head(model, places, head))
    return torch.zeros(len(batch.tokens), device=values.device).index_put((sampled.to(values.device),), values).cpu()


def sequence_scores(model: nn.Module, batch: PackedBatch) -> Tensor:
    """float32 [S]: the score of each sequence, read from the hidden state of its last token."""
    return outputs_at(model, batch, batch.cu_seqlens[1:] - 1, lambda _, places: read_by_head(model, places)).cpu()


@contextmanager
def read_by_head(model: nn.Module, places: Tensor, weight: Tensor | None = None) -> Iterator[None]:
    """Within, ``model(…).logits`` is float32 [K]: what the head makes of the hidden states at ``places``, int64 [K].

    ``weight``: float32 [H], in place of the head's.

    FSDP2 sees the model's output only after it was put in place, and while the head's weight is whole.
    """
    head = head_of(model)
    seen: list[Tensor] = []

    def read(hidden: Tensor) -> Tensor:
        picked = take_rows(hidden.flatten(0, -2), places)
        exact = torch.promote_types(picked.dtype, torch.float32)
        row = local(head.weight)[0] if weight is None else weight
        seen.append(torch.mv(picked.to(exact), row.to(picked.device, exact)))
        return hidden.new_zeros(*hidden.shape[:-1], 1)

    def put(_: nn.Module, __: Any, output: Any) -> Any:
        output.logits = seen.pop()
        return output

    hook = model.register_forward_hook(put, prepend=True)
    head.forward = read
    try:
        yield
    finally:
        del head.forward
        hook.remove()
