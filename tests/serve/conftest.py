"""Tiny random policies, and one real server on a real vLLM engine for the whole session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from serve.policies import PolicyStore

CONTEXT = 256


def make_model_folder(folder: Path, seed: int, *, hidden: int = 64, layers: int = 2, tied: bool = True) -> Path:
    """A random Qwen3 in float32 with a byte tokenizer; large weights, so that two seeds differ visibly."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        chat_template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:",
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocabulary),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            initializer_range=0.15,
            tie_word_embeddings=tied,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def reference_logprobs(
    folder: Path, prompt: list[int], response: list[int], *, temperature: float = 1.0, start: int = 0
) -> list[float]:
    """Logprobs by transformers, in float32, of the response tokens from ``start`` on."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(torch.tensor([prompt + response])).logits[0] / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    at = len(prompt) - 1
    return [logprobs[at + i, token].item() for i, token in enumerate(response) if i >= start]


MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three model folders of one architecture with different weights."""
    root = tmp_path_factory.mktemp("models")
    return [make_model_folder(root / f"m{seed}", seed) for seed in (1, 2, 3)]


@pytest.fixture
def store(tmp_path: Path) -> PolicyStore:
    """An empty policy store."""
    return PolicyStore(tmp_path / "policies")
