from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from feedback.rewards.rules import RuleError, load_rule

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
def picky(batch):
    for text in batch["response"].to_pylist():
        if text == "bad": raise KeyError(text)
    return [1.0] * batch.num_rows
not_a_function = 3
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


def test_only_the_rows_that_a_rule_fails_on_go_without(module):
    values, reasons = load_rule(f"{module}:picky").by_row(batch("four", "bad", "five"))
    assert values == [1.0, None, 1.0]
    assert reasons[0] is reasons[2] is None
    assert "KeyError" in (reasons[1] or "")


def test_an_empty_batch_is_fine(module):
    assert load_rule(f"{module}:lengths").by_row(batch().cast(batch("a").schema)) == ([], [])


def test_values_come_back_as_plain_floats(module):
    [value] = load_rule(f"{module}:as_numpy")(batch("a"))
    assert type(value) is float
    assert not isinstance(value, np.floating)
