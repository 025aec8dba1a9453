"""Prompts as a request's columns have them, by a tokenizer of single characters with a chat template."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}" + TEMPLATE
)
"""As Qwen's: a conversation without a system's message gets the template's own."""


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a character, but for those that a chat template writes."""
    words = ["<pad>", "<eos>", START, END, "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.add_special_tokens([START, END])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)


def turns(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in said]


def text(prompt: str) -> dict[str, Any]:
    """The columns of a request that came as text."""
    return {"prompt": prompt, "prompt_token_ids": make_tokenizer()(prompt).input_ids, "messages": None}


def token_ids(prompt: str) -> dict[str, Any]:
    return {**text(prompt), "prompt": None}


def chat(*said: tuple[str, str]) -> dict[str, Any]:
    """The columns of a request that came as messages: their template's text is the prompt."""
    return {**text(rendered(*said)), "messages": json.dumps(turns(*said))}


def rendered(*said: tuple[str, str]) -> str:
    return str(make_tokenizer().apply_chat_template(turns(*said), tokenize=False, add_generation_prompt=True))
