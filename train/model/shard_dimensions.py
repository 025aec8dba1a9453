"""On which dimension FSDP2 shards each weight, so that most of what generation needs is in place already."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from train.model.hf_io import plain_name


def placement_for(model: nn.Module, shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """FSDP2's ``shard_placement_fn``: row-parallel weights on dim 1 where ``shards`` divides it, others on dim 0.

    Tensor parallelism slices the weight of a row-parallel layer, stored [out, in], on dim 1 (Megatron-LM,
    arXiv 1909.08053, section 3). A shard on that dimension lies inside one slice, one on dim 0 crosses all of them.
    Which layers those are is what the model's own tensor-parallel plan calls ``rowwise``; a model without a plan is
    sharded on dim 0 throughout. FSDP2 shards other dimensions than the first only evenly.

    Experts in one parameter are sharded by expert, or each on its rows if there are not as many for each rank: of 8
    experts on 64 ranks, 56 would hold nothing.

    Args:
        model: a Hugging Face model, before ``fully_shard``; with or without wrappers around its layers.
        shards: size of the shard dimension of the FSDP mesh.
    """
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}  # model.layers.*.mlp.down_proj -> rowwise
    rows = [_pattern(name) for name, style in plan.items() if style == "rowwise"]
    chosen = {
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2
        and parameter.shape[1] % (shards * slices_of(parameter)) == 0
        and any(pattern.fullmatch(plain_name(name)) for pattern in rows)
    }
    chosen |= {p for p in model.parameters() if p.ndim == 3 and p.shape[0] % shards and p.shape[1] % shards == 0}
    return lambda parameter: Shard(1) if parameter in chosen else None


def slices_of(parameter: nn.Parameter) -> int:
    """In how many slices tensor parallelism has cut the second dimension, which FSDP then shards each of."""
    return parameter._spec.num_shards_map[1] if isinstance(parameter, DTensor) else 1


def _pattern(layer: str) -> re.Pattern[str]:
    return re.compile(re.escape(layer).replace(r"\*", r"\d+") + r"\.weight")
