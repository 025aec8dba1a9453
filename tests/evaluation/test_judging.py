"""Judges and reward models score answers, asked at a real HTTP endpoint and by a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import SecretStr, ValidationError

from evaluation.config import EvaluationConfig
from evaluation.judging import Judging, JudgingError, Sources
from feedback.config import ClassifierConfig, JudgeConfig
from feedback.schema import INTERACTIONS
from feedback.scoring.sources.comparison import parse_verdict
from feedback.scoring.sources.reward_model import files_digest
from feedback.scoring.sources.rules import COLUMNS
from tests.feedback.judge_server import Answer, Asked, judge_server, says

KEY = "sk-very-secret"


def answers(*responses: str) -> pa.Table:
    """One answer to each of "ask 0", "ask 1" …; the second is to a chat."""
    rows = [
        {
            "prompt": None if i == 1 else f"ask {i}",
            "messages": json.dumps([{"role": "user", "content": "ask 1"}]) if i == 1 else None,
            "response": response,
            "response_token_ids": [1],
            "metadata": [],
        }
        for i, response in enumerate(responses)
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema([(name, INTERACTIONS.field(name).type) for name in COLUMNS]))


def sources(url: str, folder: Path, **changes: Any) -> Sources:
    settings = {"url": url, "model": "m", "rubric": "Rate {response} to {prompt}", "cache": str(folder / "judge")}
    quick = {"backoff_s": 0.01, "attempts": 2, "timeout_s": 5, "api_key": SecretStr(KEY)}
    return Sources(judge=JudgeConfig.model_validate(settings | quick | changes))


def of(scorer: str, **settings: Any) -> EvaluationConfig:
    return EvaluationConfig.model_validate({"scorer": scorer} | settings)


def rates_by_length(asked: Asked, _: int) -> Answer:
    """The rubric's answer is between "Rate " and " to": as many points as it has letters."""
    return says(json.dumps({"score": len(asked.text.split("Rate ")[1].split(" to ")[0])}))


def longer(asked: Asked) -> str:
    """The letter of the longer of the two answers."""
    first, second = asked.text.split("Answer A:\n")[1].split("\n\nAnswer B:\n")
    second = second.split("\n\nSay which")[0]
    return "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"


def prefers_longer(asked: Asked, _: int) -> Answer:
    return says(json.dumps({"better": longer(asked)}))


def test_a_judge_scores_each_answer_alone_and_is_not_asked_again(tmp_path: Path) -> None:
    with judge_server(rates_by_length) as server:
        judging = Judging(of("judge"), sources(server.url, tmp_path))
        judged = judging(answers("abcde", "a", "ab"), answers("abc", "a", ""))
        assert judged.candidate.tolist() == [0.5, 0.1, 0.2]
        assert judged.incumbent.tolist() == [0.3, 0.1, 0.0]
        assert (judged.missing, judged.consistency) == ({}, None)
        assert len(server.asked) == 5  # of six answers two are the same to the same prompt
        assert server.asked[0].headers["Authorization"] == f"Bearer {KEY}"
        again = Judging(of("judge"), sources(server.url, tmp_path))(answers("abcde", "a", "ab"), answers("x", "a", ""))
        assert again.candidate.tolist() == [0.5, 0.1, 0.2]
        assert len(server.asked) == 6
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes()
    assert KEY not in json.dumps(judging.details) + judging.name


def test_a_judge_compares_in_both_orders_and_equal_texts_are_a_tie_unasked(tmp_path: Path) -> None:
    with judge_server(prefers_longer) as server:
        judging = Judging(of("pairwise"), sources(server.url, tmp_path))
        judged = judging(answers("longer", "a", "same", "xy"), answers("short", "bcd", "same", "yx"))
        assert judged.candidate.tolist() == [1.0, 0.0, 0.5, 0.5]
        assert judged.incumbent.tolist() == [0.0, 1.0, 0.5, 0.5]
        assert judged.consistency == 1.0
        assert len(server.asked) == 6
        assert len(server.about("ask 1")) == 2  # the chat's text is in the question
        assert judging(answers("longer", "a", "same", "xy"), answers("short", "bcd", "same", "yx")).consistency == 1.0
        assert len(server.asked) == 6
    request = server.asked[0].body
    assert request["response_format"]["json_schema"]["schema"]["properties"]["better"]["enum"] == ["A", "B", "tie"]


def test_a_judge_that_looks_at_the_place_alone_finds_nothing_and_is_reported(tmp_path: Path) -> None:
    """It says A, but for one pair, whose longer answer it prefers in both orders: 1 of 4 pairs is judged alike."""

    def first(asked: Asked, _: int) -> Answer:
        return says("[[A]]" if "ask 0" not in asked.text else f"[[{longer(asked)}]]")

    with judge_server(first) as server:
        judged = Judging(of("pairwise"), sources(server.url, tmp_path))(
            answers("longer", "a", "b", "c"), answers("short", "d", "e", "f")
        )
    assert judged.candidate.tolist() == [1.0, 0.5, 0.5, 0.5]
    assert judged.consistency == 0.25


@pytest.mark.parametrize("scorer", ["judge", "pairwise"])
def test_what_a_judge_can_not_say_is_missing_with_its_reason(scorer: str, tmp_path: Path) -> None:
    def partly(asked: Asked, _: int) -> Answer:
        if "nonsense" in asked.text:
            return says("As a language model I like both.")
        if "broken" in asked.text:
            return Answer(status=503, body={"error": "overloaded"})
        return says('{"score": 5}' if scorer == "judge" else '{"better": "B"}')

    with judge_server(partly) as server:
        judged = Judging(of(scorer), sources(server.url, tmp_path))(
            answers("fine", "nonsense", "broken"), answers("well", "good", "right")
        )
        asked = len(server.asked)
    assert np.isnan(judged.candidate).tolist() == [False, True, True]
    assert len(judged.missing) == 2
    nonsense, broken = sorted(judged.missing, key=lambda why: "503" in why)
    assert "in the judge's answer 'As a language model I like both.'" in nonsense
    assert "HTTP 503: overloaded (2 attempts)" in broken
    assert asked <= 12


@pytest.mark.parametrize("scorer", ["judge", "pairwise"])
def test_a_judge_that_is_down_leaves_every_item_without_a_score(scorer: str, tmp_path: Path) -> None:
    judged = Judging(of(scorer), sources("http://127.0.0.1:9/v1", tmp_path))(answers("a", "b"), answers("c", "d"))
    assert np.isnan(judged.candidate).all()
    assert np.isnan(judged.incumbent).all()
    assert all("ConnectError" in why for why in judged.missing)


def test_a_slow_judge_costs_no_more_than_its_deadline(tmp_path: Path) -> None:
    slow = {"deadline_s": 0.5, "timeout_s": 0.2, "attempts": 50}
    with judge_server(lambda _asked, _n: Answer(wait=1.0)) as server:
        judged = Judging(of("judge"), sources(server.url, tmp_path, **slow))(answers("a", "b"), answers("c", "d"))
    assert np.isnan(judged.candidate).all()
    assert all("no answer within" in why or "not asked within" in why for why in judged.missing)


@pytest.mark.parametrize(
    ("content", "verdict"),
    [
        ('{"better": "A"}', 0.0),
        ('{"better": "b"}', 1.0),
        ('Thinking … {"better": "A"} no: {"better": "tie"}', 0.5),
        ("On balance [[B]]", 1.0),
        ("[[A]], or rather [[B]]", 1.0),
        (" A.\n", 0.0),
        ("Tie", 0.5),
        ("A better answer can't be found", None),
        ('{"better": "C"}', None),
        ('{"better": 1}', None),
        ("", None),
    ],
)
def test_a_verdict_is_read_where_there_is_one_and_nowhere_else(content: str, verdict: float | None) -> None:
    assert parse_verdict(content) == verdict


def test_all_that_decides_a_score_is_in_the_scorers_name(tmp_path: Path) -> None:
    def name(scorer: str, *, comparison: str | None = None, **judge: Any) -> str:
        config = of(scorer) if comparison is None else of(scorer, comparison=comparison)
        return Judging(config, sources("http://127.0.0.1:9/v1", tmp_path, **judge)).name

    assert name("judge") == name("judge", api_key=SecretStr("another"), concurrency=2, weight=0)
    alone = {name("judge"), name("judge", model="n"), name("judge", rubric="{response}?"), name("judge", high=5)}
    pairs = {name("pairwise"), name("pairwise", model="n"), name("pairwise", comparison="{prompt}{first}{second}")}
    assert (len(alone), len(pairs)) == (4, 3)
    assert {one.partition("@")[0] for one in alone} == {"judge"}
    assert {one.partition("@")[0] for one in pairs} == {"pairwise"}
    assert name("pairwise") == name("pairwise", rubric="{response}?")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with one label, which reads bytes and has weights of chance."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

    folder = tmp_path_factory.mktemp("reward-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*alphabet, "<eos>"])}, merges=[]))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>", chat_template=template).save_pretrained(
        folder
    )
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(
        **sizes, vocab_size=257, num_key_value_heads=1, head_dim=8, max_position_embeddings=32, num_labels=1
    )
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_a_reward_model_scores_what_transformers_computes_and_its_version_is_on_record(model: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    judging = Judging(of("reward_model"), Sources(reward_model=ClassifierConfig(name=str(model)), version=7))
    judged = judging(answers("abc", "de"), answers("f", "too long to be read: " + "x" * 40))
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForSequenceClassification.from_pretrained(model)
    network.config.pad_token_id = 0
    with torch.no_grad():
        logit = network(torch.tensor([tokenizer("ask 0", "abc")["input_ids"]])).logits[0, 0]
    assert judged.candidate[0] == pytest.approx(float(logit.sigmoid()), abs=1e-4)
    assert np.isnan(judged.incumbent).tolist() == [False, True]
    ((why, count),) = judged.missing.items()
    assert (count, "more than the 32 that the model reads" in why) == (1, True)
    assert judging.details == {"model": str(model), "version": 7}
    assert judging.name.startswith("reward_model@")
    assert files_digest(model) in json.dumps(judging.source.identity)


def test_without_a_judge_or_a_reward_model_the_setting_is_named() -> None:
    for scorer in ("judge", "pairwise"):
        with pytest.raises(JudgingError, match=rf"evaluation\.scorer={scorer}: feedback\.scoring\.judge is not set"):
            Judging(of(scorer), Sources())
    with pytest.raises(JudgingError, match=r"there is no reward model to score by \(train it: millrace train"):
        Judging(of("reward_model"), Sources(none_yet="train it: millrace train --reward-model --held-out"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scorer": "judge", "gate": {"metric": "accuracy"}}, "gate.metric=accuracy .*scorer=judge can't say"),
        ({"scorer": "pairwise", "gate": {"metric": "accuracy"}}, "gate.metric=accuracy .*scorer=pairwise can't say"),
        ({"scorer": "reward_model", "gate": {"metric": "accuracy"}}, "scorer=reward_model can't say"),
        ({"comparison": "{first} or what?"}, r"a comparison needs \{second\}"),
        ({"holdout": 1.0}, "less than 1"),
        ({"holdout": -0.1}, "greater than or equal to 0"),
    ],
)
def test_settings_that_can_not_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        EvaluationConfig.model_validate(settings)
