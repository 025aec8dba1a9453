"""Tiny real policies: a random Qwen3 with a tokenizer of single characters, published in a policy store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evaluation.config import EngineConfig, EvaluationConfig, GateConfig, SamplingConfig
from evaluation.suites.suite import Suite
from serve.policies.store import Policy, PolicyStore

MIB = 1024 * 1024


def write_policy(folder: Path, seed: int, layers: int = 2) -> None:
    """A random Qwen3 in float32 that can say digits, letters, signs and the end."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    characters = ["<pad>", "<eos>", *"0123456789+-= abcdefghijklmnopqrstuvwxyz:"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}=",
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.15,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Policy]:
    """Three policies: 1 and 2 differ, 3 has the weights of 1."""
    store = PolicyStore(tmp_path_factory.mktemp("store"))
    for seed in (1, 2, 1):
        store.publish(lambda folder, seed=seed: write_policy(folder, seed), parent=None, lineage={}, metrics={})
    return [store.get(version) for version in store.versions()]


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """Sixty sums, one of them as a chat."""
    path = tmp_path_factory.mktemp("suite") / "sums.jsonl"
    items: list[dict[str, object]] = [
        {"id": f"sum-{a}-{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(6)
    ]
    items[7] = {"id": "chat", "messages": [{"role": "user", "content": "1+2"}], "answer": "3"}
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return Suite.load(path)


@pytest.fixture(scope="session")
def config() -> EvaluationConfig:
    return EvaluationConfig(
        max_tokens=6,
        sampling=SamplingConfig(source="greedy"),
        resamples=500,
        kl_samples=2,
        best_of=4,
        engine=EngineConfig(dtype="float32", max_num_seqs=64, max_batched_tokens=512, kv_cache_bytes=8 * MIB),
        gate=GateConfig(metric="accuracy"),
    )
