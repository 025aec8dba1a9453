"""Models with random weights that are made in milliseconds, and a batch to train them on."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from train.batch.packed import PackedBatch, Rollout
from train.model.mesh import batch_parts

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def qwen3() -> Any:
    """Tied embeddings, grouped-query attention."""
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True))


def llama() -> Any:
    """Stored in bfloat16, an output layer of its own."""
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).bfloat16()


def gpt_neox() -> Any:
    """Stores its output layer under another name than transformers gives it."""
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES))


def mixture() -> Any:
    """Stores each expert; transformers puts them together."""
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_key_value_heads=2, head_dim=8, **experts))


def gpt2() -> Any:
    """Stored in bfloat16, its layers as [in, out]."""
    sizes = {"vocab_size": 67, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).bfloat16()


def some_batch() -> PackedBatch:
    """Twelve responses in three groups, of uneven lengths, with all that an update needs."""
    from train.algorithms import load  # the rest of this module is imported where there is torch alone
    from train.config.training import TrainConfig

    generator = torch.Generator().manual_seed(4)

    def some(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    rollouts = []
    for i in range(12):
        lengths = some(1, 9, 2)
        behaviour = (-3 - torch.rand(lengths[1], generator=generator)).tolist()
        rollouts.append(Rollout(some(1, 60, lengths[0]), some(1, 60, lengths[1]), behaviour, float(i % 3), i // 4))
    batch = PackedBatch.pack(rollouts)
    old = batch.behaviour_log_probs + 0.1 * torch.rand(len(batch.tokens), generator=generator) * batch.response_mask
    algorithm = load(TrainConfig().algorithm)
    return batch.with_(old_log_probs=old, ref_log_probs=old - 0.1, advantages=algorithm.advantages(batch))


def whole(tensor: Any) -> torch.Tensor:
    """The values of a tensor or a DTensor; every rank must call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def own_part(batch: PackedBatch, **sizes: int) -> torch.Tensor:
    """The sequences that dispatch gives to this rank, with meshes of these sizes: who shares them has the same."""
    parts = batch_parts(torch.distributed.get_world_size(), **sizes)
    return batch.balanced(max(parts) + 1)[parts[torch.distributed.get_rank()]]


def plain_log_probs(model: Any, batch: PackedBatch) -> torch.Tensor:
    """[T]: logprobs of the response tokens by transformers' own forward pass, one sequence at a time, with gradient."""
    found = []
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.tokens[start:end]
        log_probs = model(tokens[None]).logits[0, :-1].float().log_softmax(-1)
        found.append(torch.cat([torch.zeros(1), log_probs.gather(1, tokens[1:, None])[:, 0]]))
    return torch.cat(found) * batch.response_mask
