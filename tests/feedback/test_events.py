from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from feedback.config import FeedbackConfig, KindsConfig, MetricConfig, RatingConfig
from feedback.events import FeedbackError, FeedbackIn
from feedback.journal.codec import check_row

KINDS = KindsConfig(
    ratings={"stars": RatingConfig(low=1, high=5), "percent": RatingConfig(low=0, high=100)},
    metrics={
        "clicked": MetricConfig(type="boolean"),
        "seconds": MetricConfig(low=0, high=60, direction="lower"),
    },
)

GOOD = [
    ({"kind": "thumb", "value": 1}, None, 1.0),
    ({"kind": "thumb", "value": True}, None, 1.0),
    ({"kind": "thumb", "value": 0, "text": "not what I asked"}, None, 0.0),
    ({"kind": "thumb", "value": False}, None, 0.0),
    ({"kind": "rating", "value": 4, "name": "stars"}, "stars", 4.0),
    ({"kind": "rating", "value": 4.5}, "stars", 4.5),
    ({"kind": "rating", "value": 0, "name": "percent"}, "percent", 0.0),
    ({"kind": "preference", "rejected_response_id": "b"}, None, None),
    ({"kind": "correction", "text": "five"}, None, None),
    ({"kind": "comment", "text": "nice"}, None, None),
    ({"kind": "metric", "name": "clicked", "value": True}, "clicked", 1.0),
    ({"kind": "metric", "name": "clicked", "value": 0}, "clicked", 0.0),
    ({"kind": "metric", "name": "seconds", "value": 60}, "seconds", 60.0),
    ({"kind": "metric", "name": "seconds", "value": -0.0}, "seconds", 0.0),
]
BAD = [
    ({"kind": "thumb"}, "value", "'thumb' needs 'value'"),
    ({"kind": "thumb", "value": 0.5}, "value", "got 0.5"),
    ({"kind": "thumb", "value": 1, "rejected_response_id": "b"}, "rejected_response_id", "takes no"),
    ({"kind": "thumb", "value": 1, "name": "stars"}, "name", "takes no 'name'"),
    ({"kind": "rating"}, "value", "needs 'value'"),
    ({"kind": "preference"}, "rejected_response_id", "needs"),
    ({"kind": "preference", "rejected_response_id": "a"}, "rejected_response_id", "different responses, both are a"),
    ({"kind": "correction"}, "text", "needs 'text'"),
    ({"kind": "correction", "text": "five", "value": 1}, "value", "takes no"),
    ({"kind": "comment", "text": ""}, "text", "at least 1"),
    ({"kind": "comment", "text": "\ud800"}, "text", "unicode"),
    ({"kind": "comment", "text": "x" * 100_001}, "text", "at most 100000"),
    ({"kind": "metric", "value": 3}, "name", "needs 'name'"),
    ({"kind": "metric", "name": "clicked"}, "value", "needs 'value'"),
    ({"kind": "applause"}, "kind", "'thumb'"),
    ({"kind": "thumb", "value": 1, "colour": "red"}, "colour", "not permitted"),
    ({"kind": "thumb", "value": 1, "feedback_id": "with space"}, "feedback_id", "pattern"),
    ({"kind": "thumb", "value": 1, "feedback_id": "x" * 201}, "feedback_id", "at most 200"),
]
UNDECLARED = [
    ({"kind": "rating", "value": 6}, "value", "'stars' goes from 1 to 5, got 6"),
    ({"kind": "rating", "value": 0.999}, "value", "got 0.999"),
    ({"kind": "rating", "value": True}, "value", "takes a number from 1 to 5, got true"),
    (
        {"kind": "rating", "value": 3, "name": "moons"},
        "name",
        r"no rating scale 'moons'; .* percent .*, stars \(from 1",
    ),
    ({"kind": "metric", "value": 3, "name": "length"}, "name", r"no metric 'length'; .*clicked \(boolean\), seconds"),
    ({"kind": "metric", "value": 0.5, "name": "clicked"}, "value", "true or false .* got 0.5"),
    ({"kind": "metric", "value": 61, "name": "seconds"}, "value", "from 0 to 60, got 61"),
    ({"kind": "metric", "value": False, "name": "seconds"}, "value", "takes a number .* got false"),
]


@pytest.mark.parametrize(("body", "name", "value"), GOOD)
def test_good_feedback_becomes_a_row_of_the_table(body, name, value):
    row = FeedbackIn.model_validate_json(json.dumps({"response_id": "a", **body})).to_row("tenant-1", KINDS)
    check_row("feedback", row)
    assert row["tenant"] == "tenant-1"
    assert row["source"] == "user"
    assert row["feedback_id"]
    assert (row["name"], row["value"]) == (name, value)
    assert str(row["value"]) == str(value)  # 0 is not -0, 1 is not True


@pytest.mark.parametrize(("body", "field", "says"), BAD)
def test_bad_feedback_is_refused_with_the_field_and_what_is_wrong(body, field, says):
    with pytest.raises(ValidationError) as refused:
        FeedbackIn(response_id="a", **body)
    (error,) = [error for error in refused.value.errors() if error["loc"] == (field,)]
    assert says in error["msg"]


@pytest.mark.parametrize("value", ["1", "true", "", [1], {"up": 1}, float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("kind", ["thumb", "rating", "metric"])
def test_a_value_is_a_finite_number_or_a_boolean_and_never_a_text(kind, value):
    body = {"response_id": "a", "kind": kind, "value": value, **({"name": "seconds"} if kind == "metric" else {})}
    with pytest.raises(ValidationError) as refused:
        FeedbackIn.model_validate_json(json.dumps(body))
    assert [error["loc"] for error in refused.value.errors()] == [("value",)]


def test_all_wrong_fields_are_named_at_once():
    with pytest.raises(ValidationError) as refused:
        FeedbackIn(response_id="a", kind="comment", value=1, name="stars")
    assert {error["loc"] for error in refused.value.errors()} == {("text",), ("value",), ("name",)}


@pytest.mark.parametrize(("body", "field", "says"), UNDECLARED)
def test_what_is_not_declared_is_refused_with_what_is(body, field, says):
    with pytest.raises(FeedbackError, match=says) as refused:
        FeedbackIn(response_id="a", **body).to_row("t", KINDS)
    assert refused.value.field == field


def test_a_rating_without_a_name_is_on_the_only_scale_or_on_stars():
    rating = FeedbackIn(response_id="a", kind="rating", value=3)
    ten = RatingConfig(low=0, high=10)
    assert rating.to_row("t")["name"] == "stars"
    assert rating.to_row("t", KindsConfig(ratings={"ten": ten}))["name"] == "ten"
    assert rating.to_row("t", KindsConfig(ratings={"ten": ten, "stars": ten}))["name"] == "stars"
    with pytest.raises(FeedbackError, match=r"must name its scale.*hundred.*ten"):
        rating.to_row("t", KindsConfig(ratings={"ten": ten, "hundred": RatingConfig(low=0, high=100)}))
    with pytest.raises(FeedbackError, match="no rating scale is declared"):
        rating.to_row("t", KindsConfig(ratings={}))


def test_without_a_declared_metric_every_metric_is_refused():
    with pytest.raises(FeedbackError, match="no metric is declared"):
        FeedbackIn(response_id="a", kind="metric", name="clicked", value=1).to_row("t")


def test_a_callers_id_is_kept_and_a_missing_one_is_generated():
    assert FeedbackIn(response_id="a", kind="thumb", value=1, feedback_id="mine").to_row("t")["feedback_id"] == "mine"
    body = FeedbackIn(response_id="a", kind="thumb", value=1)
    assert body.to_row("t")["feedback_id"] != body.to_row("t")["feedback_id"]


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        ({"ratings": {"a": {"low": 1, "high": 1}}}, r"low \(1\) must be less than high \(1\)"),
        ({"ratings": {"a": {"low": 0, "high": float("inf")}}}, "finite"),
        ({"ratings": {"a": {"low": -1.7e308, "high": 1.7e308}}}, "too far"),
        ({"ratings": {"a": {"low": 0}}}, "high"),
        ({"ratings": {"with space": {"low": 0, "high": 1}}}, "pattern"),
        ({"metrics": {"": {}}}, "at least 1"),
        ({"metrics": {"m": {"low": 2}}}, r"low \(2\) must be less than high \(1\)"),
        ({"metrics": {"m": {"type": "boolean", "high": 5}}}, "a boolean goes from 0 to 1, not from 0 to 5"),
        ({"metrics": {"m": {"type": "text"}}}, "'number' or 'boolean'"),
        ({"metrics": {"m": {"direction": "up"}}}, "'higher' or 'lower'"),
        ({"metrics": {"m": {"unit": "s"}}}, "not permitted"),
    ],
)
def test_a_bad_declaration_is_refused_when_the_settings_are_read(kinds, says):
    with pytest.raises(ValidationError, match=says):
        FeedbackConfig.model_validate({"kinds": kinds})


@given(st.data())
def test_whatever_is_inside_a_range_is_taken_as_it_is_and_the_rest_refused(data):
    finite = st.floats(-1e9, 1e9)
    low, high = sorted(data.draw(st.tuples(finite, finite).filter(lambda pair: pair[0] != pair[1])))
    value = data.draw(finite | st.sampled_from([low, high]))
    kinds = KindsConfig(metrics={"m": MetricConfig(low=low, high=high)})
    body = FeedbackIn(response_id="a", kind="metric", name="m", value=value)
    if low <= value <= high:
        assert body.to_row("t", kinds)["value"] == value
    else:
        with pytest.raises(FeedbackError):
            body.to_row("t", kinds)
