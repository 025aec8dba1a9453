from __future__ import annotations

import json
import math
import re
import sys
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np
import pyarrow as pa
import pytest
from feedback_rows import interaction, put
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from feedback.config import HumanConfig, RuleConfig, ScoringConfig
from feedback.processes.signals import StopSignal
from feedback.scoring.run import score
from feedback.scoring.scorer import Source, columns_of, guarded
from feedback.scoring.sources.rules import (
    FunctionRule,
    Reasons,
    RuleError,
    Values,
    configured,
    load_rule,
)

SOURCE = """
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

def lengths(batch): return [float(len(text)) for text in batch["response"].to_pylist()]
def as_numpy(batch): return np.ones(batch.num_rows, dtype=np.float32)
def as_arrow(batch): return pc.cast(pc.equal(batch["response"], "four"), pa.float64())
def as_bools(batch): return np.array([text == "four" for text in batch["response"].to_pylist()])
def some(batch): return [None if text == "skip" else 1 for text in batch["response"].to_pylist()]
def short(batch): return [1.0]
def nan(batch): return [float("nan")] * batch.num_rows
def words(batch): return ["good"] * batch.num_rows
def nothing(batch): return None
def huge(batch): return [1e200] * batch.num_rows
def leaves(batch): raise SystemExit(3)
def picky(batch):
    for text in batch["response"].to_pylist():
        if text == "bad": raise KeyError(text)
    return [1.0] * batch.num_rows
not_a_function = 3
"""

HOSTILE = """
import json

class Odd(float):
    def __float__(self): raise ZeroDivisionError("odd")

def texts(batch): return batch["response"].to_pylist()
def large(batch): return [10**400 if text == "bad" else 1 for text in texts(batch)]
def later(batch): return (1 / (text != "bad") for text in texts(batch))
def odd(batch): return [Odd() if text == "bad" else 1 for text in texts(batch)]
def half(batch):
    if "bad" in texts(batch): raise ValueError(json.loads('"\\\\ud800"'))
    return [1] * len(batch)
def deep(batch): return [len(json.loads("[" * 100_000 if text == "bad" else "[1]")) for text in texts(batch)]
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("rules")
    (folder / "rules_to_test.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield "rules_to_test"


def batch(*texts: str) -> pa.Table:
    return pa.table({"prompt": ["p"] * len(texts), "response": list(texts)})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lengths", [4.0, 4.0]),
        ("as_numpy", [1.0, 1.0]),
        ("as_arrow", [1.0, 0.0]),
        ("as_bools", [1.0, 0.0]),
        ("some", [1.0, None]),
    ],
)
def test_a_rule_may_return_lists_numpy_and_arrow(module, name, values):
    assert load_rule(f"{module}:{name}")(batch("four", "skip")) == values


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("short", "returned 1 values for 2 rows"),
        ("nan", "returned nan for row 0"),
        ("words", "returned 'good' for row 0"),
        ("nothing", "returned NoneType"),
        ("huge", "returned 1e.200 for row 0; a reward lies within"),
        ("leaves", "failed: SystemExit: 3"),
        ("picky", "failed: KeyError: 'bad'"),
    ],
)
def test_what_is_no_reward_is_an_error_that_names_the_function(module, name, says):
    with pytest.raises(RuleError, match=f"{module}:{name} {says}"):
        load_rule(f"{module}:{name}")(batch("four", "bad"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere_to_be_found:rule", "can't be imported"),
        ("rules_to_test:missing", "has no function 'missing'"),
        ("rules_to_test:not_a_function", "has no function"),
        ("rules_to_test", "module:name"),
        ("builtins:len", "no source file"),
    ],
)
def test_a_rule_that_can_not_be_loaded_says_why(module, name, says):
    with pytest.raises(RuleError, match=says):
        load_rule(name)


@pytest.mark.parametrize(
    ("text", "says"), [("x = undefined", "NameError"), ("def", "SyntaxError"), ("raise SystemExit(3)", "SystemExit: 3")]
)
def test_a_module_that_fails_while_it_is_imported_is_a_rule_that_can_not_be_loaded(tmp_path, monkeypatch, text, says):
    (tmp_path / "failing_rule.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuleError, match=f"rule failing_rule:f: module 'failing_rule' failed: {says}"):
        load_rule("failing_rule:f")


def test_another_function_of_the_same_file_is_another_rule(module):
    lengths, numpy = (load_rule(f"{module}:{name}").digest for name in ("lengths", "as_numpy"))
    assert lengths != numpy
    assert lengths == load_rule(f"{module}:lengths").digest


def test_only_the_rows_that_a_rule_fails_on_go_without(module):
    values, reasons = load_rule(f"{module}:picky").by_row(batch("four", "bad", "five"))
    assert values == [1.0, None, 1.0]
    assert reasons[0] is reasons[2] is None
    assert "KeyError" in (reasons[1] or "")


def test_no_value_of_a_function_and_no_error_of_it_ends_a_run(tmp_path, monkeypatch, lake):
    (tmp_path / "hostile_rules.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("large", "later", "odd", "half", "deep")
    put(lake, "interactions", [interaction("good", response="good"), interaction("bad", response="bad")])
    rules = {name: RuleConfig(function=f"hostile_rules:{name}") for name in names}
    result = score(lake, ScoringConfig(human=HumanConfig(weight=0), rules=rules))
    assert result.components == dict.fromkeys(sorted(names), 1)
    assert {name: sum(why.values()) for name, why in result.reasons.items()} == dict.fromkeys(names, 1)
    assert "\ufffd" in str(result.reasons["half"]) or "?" in str(result.reasons["half"])


def test_one_row_that_a_source_fails_on_goes_without_and_a_source_that_is_unusable_says_so():
    def by_row(table: pa.Table) -> tuple[Values, Reasons]:
        texts = table["response"].to_pylist()
        if "useless" in texts:
            raise RuleError("no source")
        if "bad" in texts:
            raise RecursionError("too deep")
        return [1.0] * len(texts), [None] * len(texts)

    ask = guarded("mine", by_row, RuleError)
    values, reasons = ask(batch("a", "b", "bad", "c", "d"))
    assert values == [1.0, 1.0, None, 1.0, 1.0]
    assert reasons == [None, None, "mine failed: RecursionError: too deep", None, None]
    with pytest.raises(RuleError, match="no source"):
        ask(batch("a", "useless"))


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError("none left")])
def test_what_the_machine_lacks_is_no_reason_of_a_response(error: Exception) -> None:
    def by_row(table: pa.Table) -> tuple[Values, Reasons]:
        raise error

    with pytest.raises(type(error)):
        guarded("mine", by_row)(batch("a", "b"))


def test_a_batch_that_is_too_large_for_a_device_is_halved() -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch's."""

    def by_row(table: pa.Table) -> tuple[Values, Reasons]:
        if table.num_rows > 1:
            raise OutOfMemoryError
        return [1.0], [None]

    assert guarded("mine", by_row)(batch("a", "b", "c")) == ([1.0] * 3, [None] * 3)


@pytest.mark.parametrize("ends", [True, False])
def test_a_signal_to_stop_is_no_failure_of_a_rule_and_a_rules_own_exit_is(ends: bool) -> None:
    def rewards(table: pa.Table) -> list[float]:
        raise StopSignal(143) if ends else SystemExit(3)

    rule = FunctionRule("mine", rewards, "digest")
    if ends:
        with pytest.raises(StopSignal):
            rule.by_row(batch("a", "b"))
    else:
        assert rule.by_row(batch("a")) == ([None], ["rule mine failed: SystemExit: 3"])


def test_one_value_for_many_rows_is_no_reward_for_any_of_them(module):
    values, reasons = load_rule(f"{module}:short").by_row(batch("four", "five"))
    assert values == [None, None]
    assert all("returned 1 values for 2 rows" in (reason or "") for reason in reasons)


def test_a_number_beyond_measure_is_no_reward_by_sql_either():
    values, reasons = configured("rule", RuleConfig(sql="1e308")).by_row(responses("1"))
    assert values == [None]
    assert reasons[0]


def test_a_sql_rules_columns_are_found_whatever_their_case():
    rule = configured("shout", RuleConfig(sql="contains(RESPONSE, 'a')"))
    assert columns_of([Source("shout", 1.0, None, rule=rule)]) == ["response"]


def test_an_empty_batch_is_fine(module):
    assert load_rule(f"{module}:lengths").by_row(batch().cast(batch("a").schema)) == ([], [])


def test_values_come_back_as_plain_floats(module):
    [value] = load_rule(f"{module}:as_numpy")(batch("a"))
    assert type(value) is float
    assert not isinstance(value, np.floating)


def responses(*texts: str, answers: list[str | None] | None = None, tokens: list[list[int]] | None = None) -> pa.Table:
    metadata = [[] if a is None else [("answer", a)] for a in answers or [None] * len(texts)]
    return pa.table(
        {
            "prompt": pa.array(["p"] * len(texts), pa.string()),
            "messages": pa.nulls(len(texts), pa.string()),
            "response": pa.array(texts, pa.string()),
            "response_token_ids": pa.array(tokens or [[1, 2]] * len(texts), pa.list_(pa.int32())),
            "metadata": pa.array(metadata, pa.map_(pa.string(), pa.string())),
        }
    )


def ready(kind: str, **parameters: Any) -> Any:
    return configured("rule", RuleConfig(ready=kind, **parameters))


spaced = st.text(st.sampled_from([*"ab", *(chr(c) for c in range(0x3001) if chr(c).isspace())]), max_size=6)


@settings(max_examples=15, deadline=None)
@given(pairs=st.lists(st.tuples(spaced, spaced), min_size=1, max_size=40))
def test_exact_match_is_equality_after_pythons_strip(pairs):
    values = ready("exact_match")(responses(*(r for r, _ in pairs), answers=[a for _, a in pairs]))
    assert values == [float(r.strip() == a.strip()) for r, a in pairs]


def test_a_response_without_a_reference_is_missing_with_the_reason_and_not_wrong():
    rule = ready("exact_match", reference="gold")
    values, reasons = rule.by_row(responses("four", answers=["four"]))
    assert (values, reasons) == ([None], ["no 'gold' in the response's metadata"])
    values, reasons = ready("numeric_equality").by_row(responses("4", "4", answers=["many", None]))
    assert values == [None, None]
    assert reasons == ["'answer' in the response's metadata holds no number", "no 'answer' in the response's metadata"]


@pytest.mark.parametrize(
    ("response", "reference", "equal"),
    [
        ("The answer is 1,234.50.", "1234.5", True),
        ("so 3 + 4 = 7", "7", True),
        ("7 apples and 2 pears", "7", False),
        ("7-3", "3", True),
        ("= -3", "-3", True),
        ("it is −3", "-3", True),
        ("gpt-4", "4", True),
        ("x5", "5", False),
        ("5 km", "5", True),
        ("1.5e3", "1500", True),
        (".5", "0.5", True),
        ("0.30000000000000004", "0.3", True),
        ("1000000", "1000001", False),
        ("no idea", "0", False),
        ("1e999", "1", False),
        ("1,23", "23", True),
    ],
)
def test_numeric_equality_compares_the_last_numbers(response, reference, equal):
    assert ready("numeric_equality")(responses(response, answers=[reference])) == [float(equal)]


@settings(max_examples=15, deadline=None)
@given(
    number=st.floats(allow_nan=False, allow_infinity=False, width=32),
    off=st.floats(-2, 2),
    tolerance=st.sampled_from([0.0, 1e-6, 0.1, 1.0]),
)
def test_numeric_equality_keeps_to_its_tolerance(number, off, tolerance):
    other = number + off * tolerance * max(1.0, abs(number))
    [value] = ready("numeric_equality", tolerance=tolerance)(responses(repr(other), answers=[repr(number)]))
    assert value == float(abs(other - number) <= tolerance * max(1.0, abs(number)))


@settings(max_examples=15, deadline=None)
@given(
    texts=st.lists(st.text(st.sampled_from("ab1\n' "), max_size=8), min_size=1, max_size=20),
    pattern=st.sampled_from(["a+b", "^a", "b$", "'", r"\d\s", "(?i)AB"]),
)
def test_a_pattern_is_searched_for_anywhere(pattern, texts):
    def found(text: str) -> bool:
        # RE2's $ is the end of the text alone.
        return re.search(re.sub(r"\$$", r"\\Z", pattern), text) is not None

    assert ready("regex", pattern=pattern)(responses(*texts)) == [float(found(text)) for text in texts]


def test_json_schema_takes_json_that_meets_the_schema_and_nothing_else():
    schema = {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/n"}},
        "required": ["n"],
        "$defs": {"n": {"minimum": 1}},
    }
    texts = ['{"n": 1}', ' {"n": 2}\n', '{"n": 0}', "{}", "n", "", '{"n": NaN}', "[" * 100_000]
    assert ready("json_schema", json_schema=schema)(responses(*texts)) == [1, 1, 0, 0, 0, 0, 0, 0]
    jsonschema.validate(json.loads(texts[0]), schema)


@pytest.fixture
def usual_recursion_limit():
    """Python's own; a library that another test imported may have raised it for the process."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_recursion_limit")
def test_json_that_can_not_be_held_against_its_schema_is_missing_and_ends_no_run_in_training_either():
    deep = {"items": {"$ref": "#"}, "multipleOf": 0.5}
    texts = ["[" * 300 + "]" * 300, "9" * 400, "[1, [2]]"]
    assert configured("rule", RuleConfig(ready="json_schema", json_schema=deep))(responses(*texts)) == [None, None, 1.0]


def test_no_text_makes_a_schemas_pattern_search_for_ever():
    hard = "a" * 5000 + "!"
    schema = {
        "properties": {"name": {"pattern": "^(a+)+$"}},
        "patternProperties": {"^(b+)+$": {"type": "integer"}},
        "additionalProperties": {"type": "boolean"},
    }
    rule = configured("rule", RuleConfig(ready="json_schema", json_schema=schema))
    texts = [
        {"name": hard},
        {"name": "aa"},
        {"name": "\ud800"},
        {"b" * 5000 + "!": 1},
        {"bb": 1},
        {"bb": "x"},
        {"c": True},
        {"c": 1},
    ]
    values, _ = rule.by_row(responses(*(json.dumps(text) for text in texts)))
    assert values == [0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"anyOf": [{"pattern": "(?=a)b"}]}, r"rule rule: the schema's pattern '\(\?=a\)b'"),
        ({"patternProperties": {"(a)\\1": {}}}, "the schema's pattern"),
        ({"patternProperties": {"a": {}}, "unevaluatedProperties": False}, "unevaluatedProperties beside"),
    ],
)
def test_a_schema_whose_patterns_can_not_be_searched_in_bounded_time_is_refused_with_the_rules_name(schema, says):
    with pytest.raises(RuleError, match=says):
        configured("rule", RuleConfig(ready="json_schema", json_schema=schema))


def test_a_schema_that_refers_elsewhere_is_never_fetched_and_its_rows_are_missing():
    rule = ready("json_schema", json_schema={"$ref": "http://127.0.0.1:9/schema.json"})
    values, reasons = rule.by_row(responses("1"))
    assert values == [None]
    assert "Unresolvable" in (reasons[0] or "")


def test_length_penalty_falls_in_a_straight_line_from_target_to_max():
    tokens = [[0] * n for n in (0, 10, 15, 20, 30)]
    rule = ready("length_penalty", target_tokens=10, max_tokens=20)
    assert rule(responses(*"abcde", tokens=tokens)) == [1.0, 1.0, 0.5, 0.0, 0.0]


@settings(max_examples=15, deadline=None)
@given(tokens=st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=10), n=st.integers(1, 6))
def test_repetition_penalty_is_the_share_of_distinct_ngrams(tokens, n):
    def share(row: list[int]) -> Fraction:
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        return Fraction(len(set(grams)), len(grams)) if grams else Fraction(1)

    values = ready("repetition_penalty", ngram=n)(responses(*["x"] * len(tokens), tokens=tokens))
    assert values == [pytest.approx(float(share(row))) for row in tokens]


def test_a_sql_expression_gives_numbers_booleans_or_nothing():
    rule = configured(
        "rule", RuleConfig(sql="CASE WHEN response = 'skip' THEN NULL ELSE length(response) / 2 END -- half")
    )
    assert rule(responses("four", "skip")) == [2.0, None]
    assert configured("rule", RuleConfig(sql="response LIKE 'f%'"))(responses("four", "five", "six")) == [1.0, 1.0, 0.0]
    assert configured("rule", RuleConfig(sql="metadata['answer'] = response"))(responses("a", answers=["a"])) == [1.0]


def test_rows_that_a_sql_expression_fails_on_go_without_and_the_others_do_not():
    values, reasons = configured("rule", RuleConfig(sql="response::INTEGER")).by_row(responses("1", "one", "1e400"))
    assert values == [1.0, None, None]
    assert reasons[0] is None
    assert "failed" in (reasons[1] or "")
    assert configured("rule", RuleConfig(sql="1 / len(response_token_ids)::DOUBLE - 1e308 * 1e308 * 0"))(
        responses("a")
    ) == [None]


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("avg(length(response))", "aggregates"),
        ("row_number() OVER ()", "window"),
        ("random()", "volatile"),
        ("response", "'response' is of type varchar"),
        ("nowhere + 1", "nowhere"),
        ("tenant = 'x'", "tenant"),
        ("1) FROM responses; SELECT (1", "not one SQL expression"),
        ("1 +", "syntax error"),
    ],
)
def test_a_sql_expression_that_can_not_work_is_refused_with_its_name(sql, says):
    with pytest.raises(RuleError, match=f"rule mine: .*{re.escape(says)}"):
        configured("mine", RuleConfig(sql=sql))


def test_a_pattern_that_re2_can_not_run_is_refused_with_its_name():
    with pytest.raises(RuleError, match=r"rule mine: .*perl operator"):
        configured("mine", RuleConfig(ready="regex", pattern="(?=a)"))


def test_a_rule_takes_tables_that_lack_columns(module):
    assert configured("rule", RuleConfig(sql="length(response)"))(batch("four")) == [4.0]
    assert ready("exact_match")(batch("four")) == [None]


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({}, "exactly one of function, sql and ready"),
        ({"sql": "1", "ready": "regex"}, "not sql and ready"),
        ({"function": "no colon"}, "module:name"),
        ({"ready": "exactmatch"}, "exact_match"),
        ({"ready": "regex"}, "needs 'pattern'"),
        ({"ready": "regex", "pattern": "("}, "no regular expression"),
        ({"ready": "exact_match", "pattern": "a"}, "takes no 'pattern'"),
        ({"sql": "1", "reference": "a"}, "a rule by sql takes no 'reference'"),
        ({"ready": "json_schema", "json_schema": {"type": "thing"}}, "no JSON Schema"),
        ({"ready": "length_penalty", "target_tokens": 9, "max_tokens": 9}, "must be less than"),
        ({"ready": "length_penalty", "max_tokens": 9}, "needs 'target_tokens'"),
        ({"ready": "repetition_penalty", "ngram": 0}, "greater than or equal to 1"),
        ({"sql": "1", "weight": -1}, "greater than or equal to 0"),
        ({"sql": "1", "weight": math.inf}, "finite"),
    ],
)
def test_a_rules_settings_that_can_not_work_are_refused(rule, says):
    with pytest.raises(ValidationError, match=re.escape(says)):
        RuleConfig(**rule)


@pytest.mark.parametrize("name", ["human", "model", "judge", "Exact", "a.b", "", "1st"])
def test_a_rule_can_not_have_the_name_of_another_source_or_one_that_can_not_be_written(name):
    with pytest.raises(ValidationError, match="rule"):
        ScoringConfig(rules={name: RuleConfig(sql="1")})
