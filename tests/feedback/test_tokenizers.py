"""Tokenizers of folders: what they share, what they don't, and that those that went leave nothing behind."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from feedback.tokenizers import load_tokenizer, rust_part

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
TEXT: Final = "what people say of it"


def make(folder: Path, merges: list[tuple[str, str]] | None = None, *, longest: int | None = None, **of: Any) -> Path:
    """A folder with a BPE tokenizer of letters and these merges."""
    pairs = merges or [("s", "a")]
    words = ["<pad>", "Ġ", *LETTERS, *("".join(pair) for pair in pairs)]
    rust = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=pairs))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    if longest is not None:
        rust.enable_truncation(longest)
        rust.enable_padding(length=longest)
    PreTrainedTokenizerFast(tokenizer_object=rust, pad_token=AddedToken("<pad>"), **of).save_pretrained(folder)
    return folder


def test_folders_whose_tokenizers_do_the_same_share_the_part_that_does_it(tmp_path: Path) -> None:
    one = load_tokenizer(make(tmp_path / "one"))
    other = load_tokenizer(make(tmp_path / "other", chat_template="{{ messages[0].content }}"))
    assert one.backend_tokenizer is other.backend_tokenizer
    assert rust_part(one) is one.backend_tokenizer
    assert (one.chat_template, other.chat_template) == (None, "{{ messages[0].content }}")


def test_another_tokenizer_shares_nothing(tmp_path: Path) -> None:
    one, other = (
        load_tokenizer(make(tmp_path / "one")),
        load_tokenizer(make(tmp_path / "other", [("s", "a"), ("e", "o")])),
    )
    assert one.backend_tokenizer is not other.backend_tokenizer
    assert one.encode("says apples") == other.encode("says apples")
    assert one.encode("eo") != other.encode("eo")


def test_what_the_file_says_of_cutting_and_padding_does_not_count(tmp_path: Path) -> None:
    free, cut = load_tokenizer(make(tmp_path / "free")), load_tokenizer(make(tmp_path / "cut", longest=5))
    whole = free.encode(TEXT)
    assert len(whole) > 5
    assert cut.encode(TEXT) == rust_part(cut).encode(TEXT).ids == whole
    assert cut.encode("is") == rust_part(cut).encode("is").ids == free.encode("is")


def test_a_tokenizer_in_python_has_no_such_part() -> None:
    assert rust_part(object()) is None


class _Allocated(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33, see malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcdefg", "uordblks", "fordblks", "keepcost")]


def allocated() -> float:
    """MiB that this process has of the C library."""
    gc.collect()
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("not glibc")
    library.mallinfo2.restype = _Allocated
    return float(library.mallinfo2().uordblks) / 2**20


def test_those_that_went_leave_no_cache_behind(tmp_path: Path) -> None:
    def read(number: int) -> None:
        tokenizer = load_tokenizer(folder)
        for i in range(2000):
            tokenizer.encode(word(i))
            rust_part(tokenizer).encode(word(i + number))

    def word(number: int) -> str:
        return "".join(LETTERS[number // 26**place % 26] for place in range(12))

    folder = make(tmp_path)
    for number in range(2):
        read(number)
    before = allocated()
    for number in range(10):
        read(number)
    assert allocated() - before < 2
