"""Tokenizers of models' folders, and what encodes and decodes for them. Imports no torch.

tokenizers 0.23 keeps, in each thread and until that ends, what each BPE tokenizer made of up to 10,000 words, also when
the tokenizer has gone (https://github.com/huggingface/tokenizers/pull/2028): some 3 MiB, measured. A process that read
a tokenizer with each policy, and encoded with it, grew by that much with each. So tokenizers that do the same share one
Rust part. It is a copy: transformers sets options of its own part in calls.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from feedback.trusted_code import trusted

_MOST: Final = 8
_ENCODING: Final = ("__call__", "encode", "_encode_plus")
_parts: Final[OrderedDict[bytes, Any]] = OrderedDict()  # by what they were made from; the last that was asked for last
_part_of: Final[WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()
_lock: Final = threading.Lock()


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a model's folder; in a process that stays, encode by ``rust_part``.

    Raises feedback.trusted_code.UntrustedCode if it comes with code that may not run, and what transformers raises.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted(folder))


def rust_part(tokenizer: Any) -> Any:
    """A ``tokenizers.Tokenizer`` that does what a fast tokenizer does, with neither truncation nor padding.

    None of one that is in Python, in whole or in part. Others have it too: it is for encoding and decoding alone.
    """
    if (own := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return None
    with _lock:
        if tokenizer not in _part_of:
            _part_of[tokenizer] = _made(own)
        return _part_of[tokenizer]


def encodes_in_rust(tokenizer: Any) -> bool:
    """Whether transformers' calls of a tokenizer make what its Rust part makes of a text, and no more of it."""
    from transformers import PreTrainedTokenizerFast

    mine = type(tokenizer)
    return (
        issubclass(mine, PreTrainedTokenizerFast)
        and all(getattr(mine, name) is getattr(PreTrainedTokenizerFast, name) for name in _ENCODING)
        and not tokenizer.split_special_tokens
    )


def _made(own: Any) -> Any:
    from tokenizers import Tokenizer

    try:
        text = own.to_str()
    except Exception:  # noqa: BLE001 - what tokenizers raises of a part in Python
        return None
    key = hashlib.sha256(text.encode()).digest()
    if key not in _parts:
        _parts[key] = Tokenizer.from_str(text)
        _parts[key].no_truncation()  # leftovers of the last call before it was saved
        _parts[key].no_padding()
    _parts.move_to_end(key)
    while len(_parts) > _MOST:
        _parts.popitem(last=False)
    return _parts[key]
