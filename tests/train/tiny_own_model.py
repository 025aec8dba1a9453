"""A small model of a user's own, as the text of a module: an embedding, attention over the sequence, an output layer.

The same text is a module of the user's (``train.model.class``), or comes with a model's folder (``auto_map``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

SOURCE = """
import torch
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class TinyConfig(PretrainedConfig):
    model_type = "users_tiny"

    def __init__(
        self, vocab_size=67, hidden_size=32, num_hidden_layers=2, sharpness=1.0, max_position_embeddings=64, **rest
    ):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.sharpness, self.max_position_embeddings = sharpness, max_position_embeddings
        super().__init__(**rest)


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.mix, self.out = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)

    def forward(self, x, allowed, sharpness):
        scores = (self.mix(x) @ x.transpose(1, 2)) * sharpness / x.shape[-1] ** 0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return x + torch.tanh(self.out(scores.softmax(-1) @ x))


class TinyLM(PreTrainedModel, GenerationMixin):
    config_class = TinyConfig
    _no_split_modules = ["Layer"]

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **rest):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, position_ids=None, **rest):
        return CausalLMOutput(logits=self.head(self.hidden(input_ids, attention_mask, position_ids)))

    def hidden(self, input_ids, attention_mask, position_ids):
        length = input_ids.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[None]
        if position_ids is not None:  # of several sequences in a row
            number = (position_ids == 0).cumsum(-1)
            allowed = allowed & (number[:, :, None] == number[:, None, :])
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, :].bool()
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, allowed, self.config.sharpness)
        return x


class TinyScorer(TinyLM):
    def __init__(self, config):
        super().__init__(config)
        del self.head
        self.score = nn.Linear(config.hidden_size, 1, bias=False)

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, attention_mask=None, position_ids=None, **rest):
        return CausalLMOutput(logits=self.score(self.hidden(input_ids, attention_mask, position_ids)))
"""
CROSSING = SOURCE.replace("if position_ids is not None:", "if False:")
"""The same, but for sequences that lie in one row, of which each sees those before it."""


def put_tiny_model(folder: Path, *, module: str | None = None) -> None:
    """Such a model in place of the one in a folder, with its tokens; ``module``: the code comes with it, so named."""
    import importlib

    import torch

    tokenizer = AutoTokenizer.from_pretrained(folder)
    path = folder.parent / "made_by"
    path.mkdir(exist_ok=True)
    (path / "tiny_model_of_tests.py").write_text(SOURCE)
    sys.path.insert(0, str(path))
    try:
        made_by: Any = importlib.import_module("tiny_model_of_tests")
    finally:
        sys.path.remove(str(path))
    torch.manual_seed(1)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    made_by.TinyLM(made_by.TinyConfig(vocab_size=len(tokenizer), **ends)).save_pretrained(folder)
    if module is not None:
        (folder / f"{module}.py").write_text(SOURCE)
        config = json.loads((folder / "config.json").read_text())
        classes = {"AutoConfig": "TinyConfig", "AutoModelForCausalLM": "TinyLM"}
        classes["AutoModelForSequenceClassification"] = "TinyScorer"
        config["auto_map"] = {name: f"{module}.{of}" for name, of in classes.items()}
        (folder / "config.json").write_text(json.dumps(config))
