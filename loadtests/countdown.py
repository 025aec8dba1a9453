"""A model whose responses are as long as real ones are spread: log-normally, the longest about 20 times the median.

It is a Qwen3 of full size whose layers add nothing, and never will: what follows depends on the last token alone. The
prompt's last token draws how long the response will be, and from then on each token counts down, in one of two
variants, an even token or an odd one, with equal chances: so there is something to learn that has next to no influence
on lengths.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Final

from loadtests.tiny_model import save_tokenizer

MOST: Final = 22
"""Tokens that a response has at most, as multiples of the median that is aimed at; a run of 2000 has one of 20."""
_LOGIT: Final = 25.0
"""Of what follows, over the others, which overlap a little with it."""
_OWN: Final = 16
"""Dimensions that the prompt's last token has to itself."""


def make_countdown(
    folder: Path, *, median: int, sigma: float, hidden: int, layers: int, heads: int, prompts: int = 64
) -> Path:
    """Make the model, and beside it ``prompts.json``: a list of lists of token ids.

    Args:
        median: of the lengths, in tokens, without the end token.
        sigma: of their logarithms.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    longest, random_ids = MOST * median, random.Random(0)
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    counts = [f"{variant}{left}" for left in range(1, longest + 1) for variant in "EO"]
    vocabulary = save_tokenizer(folder, [*letters, *counts])
    first = 2 + len(letters)  # even
    start = 2  # the letter a
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=hidden // heads,
            max_position_embeddings=longest + 64,
            tie_word_embeddings=False,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=None,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            for idle in (layer.self_attn.v_proj, layer.self_attn.o_proj, *layer.mlp.children()):
                if isinstance(idle, torch.nn.Linear):  # as all of them are zero, none of them ever learns
                    idle.weight.zero_()
        embedding = model.model.embed_tokens.weight
        embedding.copy_(torch.randint(2, (vocabulary, hidden)) * 2.0 - 1)
        embedding[:, :_OWN] = 0
        embedding[start] = 0
        embedding[start, :_OWN] = math.sqrt(hidden / _OWN)
        head = model.lm_head.weight
        head.zero_()
        for left in range(1, longest + 1):
            now = [first + 2 * (left - 1), first + 2 * (left - 1) + 1]
            after = [token - 2 for token in now] if left > 1 else [1]
            for token in after:
                head[token] += _LOGIT / hidden * embedding[now].sum(0)
        own = embedding[start] / hidden
        head += -_LOGIT * own
        for left in range(1, longest + 1):
            density = -math.log(left) - (math.log(left / median) / sigma) ** 2 / 2
            head[[first + 2 * (left - 1), first + 2 * (left - 1) + 1]] += (_LOGIT + density) * own
    model.save_pretrained(folder)
    asked = [[random_ids.randrange(3, first) for _ in range(15)] + [start] for _ in range(prompts)]
    (folder / "prompts.json").write_text(json.dumps(asked))
    return folder
