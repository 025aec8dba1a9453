"""The reward model: real transformers models with random weights and tokenizers of their own, made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from feedback_rows import interaction, put
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from feedback.config import HumanConfig, ModelConfig, ScoringConfig
from feedback.scoring.run import score
from feedback.scoring.sources.reward_model import RewardModel, RewardModelError, files_digest, token_batches
from serve.policies.store import record_erasure

TEXTS = ["two and two is four", "four", "I think that it might be four and not five", "five!", ""]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """A BERT with two labels that reads pairs; its tokenizer is trained here."""
    folder = tmp_path_factory.mktemp("bert")
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words.train_from_iterator(TEXTS * 5, trainers.WordPieceTrainer(vocab_size=90, special_tokens=special))
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=40,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=words.get_vocab_size(),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.5,
        num_labels=2,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    """A Qwen3 with one label and a chat template, without a padding token."""
    folder = tmp_path_factory.mktemp("qwen")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*alphabet, "<eos>"])}, merges=[]))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=characters,
        eos_token="<eos>",
        chat_template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}",
    ).save_pretrained(folder)
    torch.manual_seed(1)
    Qwen3ForSequenceClassification(decoder_config(num_labels=1)).save_pretrained(folder)
    return folder


def decoder_config(**more: Any) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.5,
        pad_token_id=None,
        **more,
    )


def rows(texts: list[str], prompt: str | None = "two and two", messages: Any = None) -> pa.Table:
    count = len(texts)
    return pa.table(
        {
            "prompt": pa.array([prompt] * count, pa.string()),
            "messages": pa.array([None if messages is None else json.dumps(messages)] * count, pa.string()),
            "response": pa.array(texts, pa.string()),
        }
    )


def settings(folder: Path, **more: Any) -> ModelConfig:
    return ModelConfig(name=str(folder), device="cpu", **more)


@torch.no_grad()
def plain(folder: Path, *text: str) -> torch.Tensor:
    """The logits of one input by itself."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return network(**tokenizer(*text, return_tensors="pt")).logits[0]


@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_rewards_of_pairs_are_those_of_a_plain_forward_pass_whatever_the_batches(encoder, batch_tokens):
    model = RewardModel(settings(encoder, label=1, activation="softmax", batch_tokens=batch_tokens))
    values, reasons = model.by_row(rows(TEXTS))
    assert reasons == [None] * len(TEXTS)
    assert values == [pytest.approx(plain(encoder, "two and two", t).softmax(-1)[1].item(), abs=1e-5) for t in TEXTS]


def test_rewards_of_chats_go_by_the_template_and_need_no_padding_token(decoder):
    messages = [{"role": "user", "content": "two and two?"}]
    values, reasons = RewardModel(settings(decoder)).by_row(rows(TEXTS, None, messages))
    assert reasons == [None] * len(TEXTS)
    told = [f"user: two and two?<eos>assistant: {text}<eos>" for text in TEXTS]
    assert values == [pytest.approx(plain(decoder, text).sigmoid()[0].item(), abs=1e-5) for text in told]
    assert len(set(values)) == len(TEXTS)
    [raw], _ = RewardModel(settings(decoder, activation="none")).by_row(rows(["four"], "two and two"))
    assert raw == pytest.approx(plain(decoder, "two and two", "four")[0].item(), abs=1e-4)


def test_what_the_model_can_not_read_is_missing_with_the_reason_and_the_rest_is_scored(encoder):
    model = RewardModel(settings(encoder, max_length=12))
    table = pa.concat_tables([rows(["four", "four " * 30]), rows(["four"], None)])
    values, reasons = model.by_row(table)
    assert values[0] is not None
    assert values[1:] == [None, None]
    assert reasons == [None, "36 tokens, more than the 12 that the model reads", "the prompt has no text"]
    _, reasons = RewardModel(settings(encoder)).by_row(rows(["four " * 60]))
    assert reasons == ["66 tokens, more than the 40 that the model reads"]


def test_rows_that_the_model_fails_on_go_without_and_the_others_do_not(encoder, monkeypatch):
    model = RewardModel(settings(encoder))
    values, _ = model.by_row(rows(TEXTS))
    forward = model._model.forward

    def short_of_memory(input_ids: torch.Tensor, **more: Any) -> Any:
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("out of memory")
        if input_ids.shape[1] > 12:
            raise torch.OutOfMemoryError("out of memory even so")
        return forward(input_ids=input_ids, **more)

    monkeypatch.setattr(model._model, "forward", short_of_memory)
    again, reasons = model.by_row(rows(TEXTS))
    assert again == [pytest.approx(v, abs=1e-6) if i != 2 else None for i, v in enumerate(values)]
    assert reasons[2] == "the model failed: OutOfMemoryError: out of memory even so"


def test_a_model_that_runs_on_nothing_stops_the_run_before_it_writes(encoder, lake, monkeypatch):
    put(lake, "interactions", [interaction("a")])

    def broken(self: Any, **_: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(BertForSequenceClassification, "forward", broken)
    with pytest.raises(RewardModelError, match="can't be run on cpu: no kernel image"):
        score(lake, ScoringConfig(model=settings(encoder)))
    assert lake.counts()["rewards"] == 0


def test_a_model_is_a_component_beside_the_others_and_its_files_are_part_of_the_scorer(encoder, lake, tmp_path):
    put(lake, "interactions", [interaction("a", response="four"), interaction("b", response="four " * 99)])
    config = ScoringConfig(human=HumanConfig(weight=0), model=settings(encoder))
    result = score(lake, config)
    assert (result.scored, result.missing, result.components) == (2, 1, {"model": 1})
    assert result.scorer.startswith("model@")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in encoder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert score(lake, config.model_copy(update={"model": settings(copy)})).scored == 0, "the same files elsewhere"
    before = files_digest(copy)
    (copy / "tokenizer.json").write_bytes((copy / "tokenizer.json").read_bytes() + b"\n")
    assert files_digest(copy) != before
    assert score(lake, config.model_copy(update={"model": settings(copy)})).scored == 2


def test_an_erasure_on_record_makes_no_other_scorer_of_a_reward_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = files_digest(tmp_path)
    record_erasure(tmp_path, certainty="yes", why="test")
    assert files_digest(tmp_path) == before
    (tmp_path / "training.json").write_text("{}")
    assert files_digest(tmp_path) != before


def test_a_model_that_can_not_be_used_is_named(encoder, decoder, tmp_path):
    with pytest.raises(RewardModelError, match=r"no config\.json"):
        RewardModel(settings(tmp_path))
    with pytest.raises(RewardModelError, match="2 labels, counted from 0; there is no label 2"):
        RewardModel(settings(encoder, label=2)).by_row(rows(["a"]))
    Qwen3ForCausalLM(decoder_config()).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(decoder).save_pretrained(tmp_path)
    with pytest.raises(RewardModelError, match=r"no weights for score\.weight"):
        RewardModel(settings(tmp_path)).by_row(rows(["a"]))
    with pytest.raises(RewardModelError, match="is no folder"):
        RewardModel(ModelConfig(name="not/a/name"))


@given(lengths=st.dictionaries(st.integers(0, 50), st.integers(1, 60), max_size=30), budget=st.integers(1, 200))
def test_batches_hold_every_row_once_and_keep_to_the_budget(lengths, budget):
    batches = list(token_batches(lengths, ModelConfig(name="m", batch_tokens=budget)))
    assert sorted(row for batch in batches for row in batch) == sorted(lengths)
    for batch in batches:
        assert len(batch) == 1 or max(lengths[row] for row in batch) * len(batch) <= budget
