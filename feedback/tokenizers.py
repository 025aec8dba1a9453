"""Tokenizers of models' folders; those that make the same tokens of a text share one Rust part. Imports no torch.

tokenizers 0.23 keeps, in each thread and until that ends, what each BPE tokenizer made of up to 10,000 words, also when
the tokenizer has gone (https://github.com/huggingface/tokenizers/pull/2028): some 3 MiB, measured. A process that
reads a tokenizer with each policy would grow by that much with each.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

from feedback.trusted_code import trusted

_MOST: Final = 8
_shared: Final[OrderedDict[bytes, Any]] = OrderedDict()  # the one that was asked for last stands last
_lock: Final = threading.Lock()


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a model's folder.

    Raises feedback.trusted_code.UntrustedCode if it comes with code that may not run, and what transformers raises.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted(folder))
    if (rust := rust_part(tokenizer)) is not None:
        tokenizer._tokenizer = rust
    return tokenizer


def rust_part(tokenizer: Any) -> Any:
    """The Rust part of a fast tokenizer, without truncation or padding, to encode and decode with; None of another.

    Others have it too: it may not be changed.
    """
    if (own := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return None
    from tokenizers import Tokenizer

    with _lock:
        if any(own is one for one in _shared.values()):
            return own
        text = own.to_str()
        key = hashlib.sha256(text.encode()).digest()
        if key not in _shared:
            _shared[key] = Tokenizer.from_str(text)
            _shared[key].no_truncation()  # leftovers of the last call before it was saved
            _shared[key].no_padding()
        _shared.move_to_end(key)
        while len(_shared) > _MOST:
            _shared.popitem(last=False)
        return _shared[key]
