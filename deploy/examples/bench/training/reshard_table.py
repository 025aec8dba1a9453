"""What resharding moves for well-known models on many ranks, computed by the plan's own arithmetic: no rank is started.

``python -m deploy.examples.bench.training.reshard_table`` prints the table in train/README.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from train.model.mesh import shard_order
from train.weight_sync.plan import Needed, elements_received
from train.weight_sync.slices import Box, Held, shards_of

RANKS = (8, 16, 32, 64, 128, 256, 512)
BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Decoder:
    """Shapes of a Llama or Qwen3 decoder: what its public ``config.json`` says."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    query_key_norm: bool = False
    tied: bool = False
    """Whether the output head is the embedding."""


LLAMA_3_8B = Decoder("Llama-3-8B", 4096, 14336, 32, 32, 8, 128, 128256)
LLAMA_3_70B = Decoder("Llama-3-70B", 8192, 28672, 80, 64, 8, 128, 128256)
QWEN3_32B = Decoder("Qwen3-32B", 5120, 25600, 64, 64, 8, 128, 151936, query_key_norm=True)

MODELS = ((LLAMA_3_8B, 2), (LLAMA_3_70B, 8), (QWEN3_32B, 4))
"""With the tensor-parallel size that each generates with."""


def main() -> None:
    """Print the table, as Markdown."""
    print("| model | weights | t | N | a rank receives | excess | DS-Chat | HybridFlow-V | HybridFlow |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model, t in MODELS:
        for ranks in RANKS:
            print(row(model, t, ranks))


def row(model: Decoder, t: int, ranks: int) -> str:
    whole = BYTES * elements(model)
    received = BYTES * max(elements_received(placed(model, ranks, t), slices(model, ranks, t)))
    excess = (received - hybridflow(whole, ranks, t)) / whole
    others = (all_gather(whole, ranks), all_gather(whole, ranks), hybridflow(whole, ranks, t))
    cells = [
        model.name,
        f"{whole / 1e9:.1f} GB",
        str(t),
        str(ranks),
        f"{received / 1e9:.3f} GB",
        f"{excess:.5f}",
        *(f"{n / 1e9:.3f} GB" for n in others),
    ]
    return "| " + " | ".join(cells) + " |"


# HybridFlow, arXiv 2409.19256, Table 2: bytes that each rank receives between training and generation, of a model of M
# bytes trained with t·p·d ranks and generated with t_g·p_g. Under FSDP the N ranks are what t·p are there.


def all_gather(whole: float, ranks: int) -> float:
    """DS-Chat over all ranks, (tpd − 1)/(tpd) · M; HybridFlow-V over those of a training replica, (tp − 1)/(tp) · M."""
    return (ranks - 1) / ranks * whole


def hybridflow(whole: float, model_parallel: int, generation_parallel: int) -> float:
    """All-gather within micro data-parallel groups: (tp − t_g p_g)/(t_g p_g tp) · M."""
    return (model_parallel - generation_parallel) / (generation_parallel * model_parallel) * whole


# ------------------------------------------------------------------------------------ where tensors are, and who needs


def shapes(model: Decoder) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name in a checkpoint, shape, how vLLM cuts it): "rows", "columns", "vocabulary", "kv" or "whole"."""
    h, q, kv, i = model.hidden, model.heads * model.head, model.kv_heads * model.head, model.intermediate
    yield "model.embed_tokens.weight", (model.vocabulary, h), "vocabulary"
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "self_attn.q_proj.weight", (q, h), "rows"
        yield prefix + "self_attn.k_proj.weight", (kv, h), "kv"
        yield prefix + "self_attn.v_proj.weight", (kv, h), "kv"
        yield prefix + "self_attn.o_proj.weight", (h, q), "columns"
        if model.query_key_norm:
            yield prefix + "self_attn.q_norm.weight", (model.head,), "whole"
            yield prefix + "self_attn.k_norm.weight", (model.head,), "whole"
        yield prefix + "mlp.gate_proj.weight", (i, h), "rows"
        yield prefix + "mlp.up_proj.weight", (i, h), "rows"
        yield prefix + "mlp.down_proj.weight", (h, i), "columns"
        yield prefix + "input_layernorm.weight", (h,), "whole"
        yield prefix + "post_attention_layernorm.weight", (h,), "whole"
    yield "model.norm.weight", (h,), "whole"
    if not model.tied:
        yield "lm_head.weight", (model.vocabulary, h), "vocabulary"


def elements(model: Decoder) -> int:
    return sum(math.prod(shape) for _, shape, _ in shapes(model))


def placed(model: Decoder, ranks: int, t: int, training: int = 1) -> dict[str, Held]:
    """Where FSDP2 puts the tensors, as ``train.model.shard_dimensions`` and ``train.model.mesh`` have it.

    ``training``: ranks that share each layer in training; they must divide the heads of keys and values.
    """
    order = shard_order(ranks, tensor_parallel_size=t, tensor_parallel=training)[0]
    grid = np.reshape(order, (training, -1))  # [slices, chunks of a slice]
    known: dict[tuple[tuple[int, ...], int | None, int], Held] = {}
    held = {}
    for name, shape, cut in shapes(model):
        chunks = 1 if cut == "columns" and shape[1] % ranks == 0 else 0
        key = (shape, {"whole": None, "columns": 1}.get(cut, 0), chunks)
        if key not in known:
            known[key] = shards_of(shape, grid, key[1:])
        held[name] = known[key]
    return held


def slices(model: Decoder, ranks: int, t: int) -> Needed:
    """The slices that vLLM's loaders read; train/weight_sync/loader_tracing.py traces the real ones."""
    kinds = [
        {name: box for name, shape, cut in shapes(model) if (box := _slices(model, shape, cut, k, t))} for k in range(t)
    ]
    return Needed(tuple(kinds), tuple(rank % t for rank in range(ranks)))


def _slices(model: Decoder, shape: tuple[int, ...], cut: str, k: int, t: int) -> tuple[Box, ...]:
    """The slice of tensor-parallel rank ``k`` of ``t``; none where it would be empty."""
    whole = tuple((0, n) for n in shape)
    if cut == "whole":
        return (whole,)
    if cut == "columns":
        width = shape[1] // t
        return ((whole[0], (k * width, (k + 1) * width)),)
    if cut == "kv":  # fewer heads than ranks: neighbours hold the same one
        copies = max(1, t // model.kv_heads)
        size, k = max(1, model.kv_heads // t) * model.head, k // copies
    elif cut == "vocabulary":  # padded to a multiple of 64
        size = -(-shape[0] // 64) * 64 // t
    else:
        size = shape[0] // t
    start, stop = min(k * size, shape[0]), min((k + 1) * size, shape[0])
    return (((start, stop), *whole[1:]),) if start < stop else ()


if __name__ == "__main__":
    main()
