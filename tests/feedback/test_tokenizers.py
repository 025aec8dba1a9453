"""Tokenizers of folders: what they share, what they don't, and that those that went leave nothing behind."""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from feedback.scoring.sources.reward_model import encode
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
    assert rust_part(one) is rust_part(other) is rust_part(one)
    assert rust_part(one).encode(TEXT).ids == one.encode(TEXT)


def test_another_tokenizer_shares_nothing(tmp_path: Path) -> None:
    one, other = (
        rust_part(load_tokenizer(make(tmp_path / "one"))),
        rust_part(load_tokenizer(make(tmp_path / "other", [("s", "a"), ("e", "o")]))),
    )
    assert one.encode("says apples").ids == other.encode("says apples").ids
    assert one.encode("eo").ids != other.encode("eo").ids


def test_what_the_file_says_of_cutting_and_padding_does_not_count(tmp_path: Path) -> None:
    whole = load_tokenizer(make(tmp_path / "free")).encode(TEXT)
    cut = rust_part(load_tokenizer(make(tmp_path / "cut", longest=5)))
    assert cut.encode(TEXT).ids == whole
    assert len(whole) > 5
    assert len(cut.encode("is").ids) == 2


def test_what_transformers_sets_of_its_own_part_changes_nothing_for_others(tmp_path: Path) -> None:
    folder = make(tmp_path / "one")
    strict = load_tokenizer(make(tmp_path / "strict", split_special_tokens=True))
    one = load_tokenizer(folder)
    shared, text = rust_part(one), f"{TEXT}<pad>"
    before = shared.encode(text).ids
    assert before[-1] == one.pad_token_id
    strict.encode(text)
    one(text, truncation=True, max_length=3, padding="max_length")
    one.add_tokens(["what"])
    assert shared.encode(text).ids == rust_part(strict).encode(text).ids == before
    assert rust_part(load_tokenizer(folder)).encode(text).ids == before


def test_a_tokenizer_in_python_has_no_such_part(tmp_path: Path) -> None:
    class Words:
        def split(self, _: int, text: Any) -> list[Any]:
            return [text]

        def pre_tokenize(self, text: Any) -> None:
            text.split(self.split)

    tokenizer = load_tokenizer(make(tmp_path))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Words())
    assert rust_part(tokenizer) is None  # it can't be copied
    assert rust_part(object()) is None


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("types", [False, True])
def test_a_reward_model_reads_what_transformers_would_have_it_read(tmp_path: Path, strict: bool, types: bool) -> None:
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}<pad>{% endfor %}"
    tokenizer = load_tokenizer(
        make(tmp_path, chat_template=template, split_special_tokens=strict, model_input_names=names, longest=4)
    )
    for row in (
        {"prompt": "what<pad>", "messages": None, "response": "people say"},
        {"prompt": "what people", "messages": None, "response": ""},
        {"prompt": None, "messages": json.dumps([{"role": "user", "content": "what"}]), "response": "people say<pad>"},
    ):
        if row["messages"] is None:
            expected = tokenizer(row["prompt"], row["response"])
        else:
            said = [*json.loads(row["messages"]), {"role": "assistant", "content": row["response"]}]
            expected = tokenizer.apply_chat_template(said, tokenize=True, return_dict=True)
        assert encode(tokenizer, row) == {name: expected[name] for name in names if name != "attention_mask"}


def test_a_reward_models_tokenizer_that_does_more_than_its_part_in_rust_is_called(tmp_path: Path) -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, text_pair: Any = None, **how: Any) -> Any:
            return super()._encode_plus(text.lower(), text_pair, **how)

    plain = load_tokenizer(make(tmp_path))
    shouting = Shouting(tokenizer_object=plain.backend_tokenizer)
    rows = [{"prompt": text, "messages": None, "response": "so"} for text in ("what", "WHAT")]
    assert encode(shouting, rows[1]) == encode(shouting, rows[0]) == encode(plain, rows[0])


def test_a_text_that_a_reward_models_tokenizer_has_no_tokens_for_is_a_fault_of_the_row(tmp_path: Path) -> None:
    rust = Tokenizer(models.Unigram([("a", -1.0)], unk_id=None))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, chat_template="{{ messages[-1].content }}")
    with pytest.raises(ValueError, match="tokenizer failed"):
        encode(tokenizer, {"prompt": "a", "messages": None, "response": "b"})
    with pytest.raises(ValueError, match="chat template failed"):
        encode(tokenizer, {"prompt": None, "messages": "[]", "response": "b"})


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
