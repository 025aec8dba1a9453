"""The policy that both sides of ``make bench-learn`` start from: ``python -m loadtests.word_policy FOLDER``.

A Qwen3 of 1.4M parameters with a token for each character, trained from scratch on the corpus of ``loadtests.words``;
on one thread, and so the same every time.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from loadtests import words

STEPS: Final = 400
BATCH: Final = 96
LEARNING_RATE: Final = 2e-3
MUON_LEARNING_RATE: Final = 0.005
PAD: Final = "<pad>"
END: Final = "<eos>"
CONTEXT: Final = 64


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(words.TASK_SEED)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    teach(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    characters = sorted({*words.LETTERS, *words.VERBS, " ", ">"})
    vocabulary = {token: i for i, token in enumerate([PAD, END, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template="{{ messages[-1]['content'] }}",
        model_max_length=CONTEXT,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=576,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Supervised training on the corpus, with the loss on answers alone: Muon for the layers' matrices, AdamW else."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    chosen = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01),
        torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    ]
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    corpus = words.corpus()
    for step in range(STEPS):
        share = min(1.0, (step + 1) / 30) * max(0.05, 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        for group, peak in groups:
            group["lr"] = peak * share
        ids, labels = collate(tokenizer, list(itertools.islice(corpus, BATCH)))
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % 50 == 49:
            print(f"policy to start from: step {step + 1}/{STEPS} loss {loss:.3f}", flush=True)


def collate(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and labels, int64 [batch, longest]; under causal attention padding needs no mask."""
    encoded = [(tokenizer(p).input_ids, [*tokenizer(a).input_ids, tokenizer.eos_token_id]) for p, a in pairs]
    width = max(len(p) + len(a) for p, a in encoded)
    ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), width), -100)
    for row, (p, a) in enumerate(encoded):
        ids[row, : len(p) + len(a)] = torch.tensor(p + a)
        labels[row, len(p) : len(p) + len(a)] = torch.tensor(a)
    return ids, labels


if __name__ == "__main__":
    main()
