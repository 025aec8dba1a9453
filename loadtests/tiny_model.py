"""A random model small enough to start in seconds: for tests in which its answers don't matter."""

from __future__ import annotations

from pathlib import Path

CONTEXT = 256


def make_model_folder(
    folder: Path,
    seed: int,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    intermediate: int | None = None,
    tied: bool = True,
    eos: bool = True,
    printable: bool = False,
    letters: str = "",
    context: int = CONTEXT,
) -> Path:
    """A random Qwen3 in float32 with a byte tokenizer; large weights, so that two seeds differ visibly.

    ``eos`` False: no token ends a response. ``letters``: every token but two is one of these;
    ``printable``: a printable ASCII character.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if printable:
        letters = "".join(chr(c) for c in range(33, 127))
    alphabet = list(letters) or sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = save_tokenizer(folder, alphabet, eos=eos)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=intermediate or 2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=hidden // heads,
            max_position_embeddings=context,
            initializer_range=0.15,
            tie_word_embeddings=tied,
            eos_token_id=1 if eos else None,
            pad_token_id=0,
            bos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, tokens: list[str], *, eos: bool = True) -> int:
    """A chat tokenizer of these tokens, as byte-level BPE writes them, after padding and end; how many it has.

    ``eos`` False: the end is a token as others are.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *tokens])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>" if eos else None,
        clean_up_tokenization_spaces=False,
        chat_template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:",
    ).save_pretrained(folder)
    return len(vocabulary)
