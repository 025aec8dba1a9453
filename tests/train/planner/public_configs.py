"""config.json of public models, as they stand on huggingface.co, without what says nothing of sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2": (124_439_808, {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "torch_dtype": "bfloat16",
        },
    ),
    "Llama-3-8B": (
        8_030_261_248,
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "torch_dtype": "bfloat16",
        },
    ),
    "gemma-2-2b": (
        2_614_341_888,
        {
            "model_type": "gemma2",
            "head_dim": 256,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "vocab_size": 256000,
        },
    ),
    "Qwen2.5-7B": (
        7_615_616_512,
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 152064,
        },
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        {
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 151936,
        },
    ),
}
"""Name -> (parameters, as safetensors' own index counts them there; the config)."""


def write(name: str, folder: Path, **other: Any) -> Path:
    """A config.json alone, with ``other`` values."""
    file = folder / "config.json"
    file.write_text(json.dumps({**CONFIGS[name][1], **other}))
    return file
