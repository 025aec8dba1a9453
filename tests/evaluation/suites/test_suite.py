"""Suites and scoring, without an engine."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from evaluation.config import EvaluationConfig
from evaluation.evaluate import load_scorer, score, scorer_batch, scorer_name
from evaluation.suites.suite import Suite, SuiteError
from feedback.scoring.sources.rules import RuleError


def write(folder: Path, *lines: str) -> Path:
    path = folder / "suite.jsonl"
    path.write_text("\n".join(lines))
    return path


def answers(responses: list[str]) -> pa.Table:
    ids = pa.array([[1]] * len(responses), pa.list_(pa.int32()))
    return pa.table({"response": responses, "response_token_ids": ids})


def test_items_keep_their_order_and_blank_lines_are_left_out(tmp_path: Path):
    suite = Suite.load(write(tmp_path, '{"id": "b", "prompt": "1+1="}', "", '{"id": "a", "prompt": ""}'))
    assert [item.id for item in suite.items] == ["b", "a"]


def test_the_hash_is_that_of_the_content(tmp_path: Path):
    first = Suite.load(write(tmp_path, '{"id": "a", "prompt": "x"}'))
    second = Suite.load(write(tmp_path, '{"id": "a", "prompt": "y"}'))
    assert first.sha256 != second.sha256


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "line 2 is not JSON"),
        ("[1]", "line 2: .*valid dictionary"),
        ('{"prompt": "x"}', "line 2: id: Field required"),
        ('{"id": "b"}', "line 2: .*exactly one of prompt and messages"),
        ('{"id": "b", "prompt": "x", "messages": [{"role": "user"}]}', "line 2: .*exactly one of prompt and messages"),
        ('{"id": "b", "messages": []}', "line 2: messages: List should have at least 1 item"),
        ('{"id": "b", "prompt": "x", "anwser": "1"}', "line 2: anwser: Extra inputs are not permitted"),
        ('{"id": "b", "prompt": "x", "answer": 3}', "line 2: answer: Input should be a valid string"),
        ('{"id": "a", "prompt": "x"}', "line 2: id 'a' is that of line 1 too"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str):
    with pytest.raises(SuiteError, match=words):
        Suite.load(write(tmp_path, '{"id": "a", "prompt": "x"}', line))


def test_a_suite_that_is_missing_or_empty_is_named(tmp_path: Path):
    with pytest.raises(SuiteError, match=r"gone.jsonl can't be read: No such file"):
        Suite.load(tmp_path / "gone.jsonl")
    with pytest.raises(SuiteError, match="has no item"):
        Suite.load(write(tmp_path, ""))


@pytest.fixture
def pair(tmp_path: Path) -> Suite:
    return Suite.load(
        write(
            tmp_path,
            '{"id": "a", "prompt": "1+1=", "answer": "2", "metadata": {"kind": "sum"}}',
            '{"id": "b", "messages": [{"role": "user", "content": "hi"}]}',
        )
    )


def test_a_scorer_sees_the_columns_of_a_rule_with_the_answer_in_metadata(pair: Suite):
    batch = scorer_batch(pair, answers(["2", "ho"])).to_pylist()
    assert batch[0] == {
        "prompt": "1+1=", "messages": None, "response": "2", "response_token_ids": [1],
        "metadata": [("kind", "sum"), ("answer", "2")],
    }  # fmt: skip
    assert batch[1]["prompt"] is None
    assert batch[1]["messages"] == '[{"role": "user", "content": "hi"}]'


def test_an_item_without_a_score_is_nan_and_never_zero(pair: Suite):
    scores = score(pair, answers(["2", "ho"]), load_scorer(EvaluationConfig()))
    assert scores[0] == 1.0
    assert scores[1] != scores[1]


def test_a_scorer_that_gives_the_wrong_number_of_scores_or_no_number_is_named(pair: Suite):
    def short(batch: pa.Table) -> list[float | None]:
        return [1.0]

    def broken(batch: pa.Table) -> list[float | None]:
        return [1.0, float("nan")]

    with pytest.raises(ValueError, match="short returned 1 scores for 2 responses"):
        score(pair, answers(["2", "ho"]), short)
    with pytest.raises(ValueError, match="broken scored item 'b' nan"):
        score(pair, answers(["2", "ho"]), broken)


def test_a_scorer_named_in_config_is_loaded_as_a_rule_and_recorded_with_its_hash(pair: Suite, tmp_path, monkeypatch):
    source = "def long(batch): return [float(len(text)) for text in batch['response'].to_pylist()]"
    (tmp_path / "scorer_to_test.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    scorer = load_scorer(EvaluationConfig(scorer="scorer_to_test:long"))
    assert score(pair, answers(["2", "ho"]), scorer).tolist() == [1.0, 2.0]
    assert scorer_name(scorer).startswith("scorer_to_test:long@")
    with pytest.raises(RuleError, match="nowhere"):
        load_scorer(EvaluationConfig(scorer="scorer_to_test:nowhere"))


def test_a_ready_rule_scores_by_its_name_if_it_needs_no_settings(pair: Suite):
    scorer = load_scorer(EvaluationConfig(scorer="numeric_equality"))
    assert score(pair, answers(["it is 2.0", "ho"]), scorer)[0] == 1.0
    assert scorer_name(scorer).startswith("numeric_equality@")
    for name in ("regex", "exactmatch"):
        with pytest.raises(RuleError, match=name):
            load_scorer(EvaluationConfig(scorer=name))
