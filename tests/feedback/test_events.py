from __future__ import annotations

import pytest
from pydantic import ValidationError

from feedback.events import FeedbackIn
from feedback.rows import check_row

GOOD = [
    {"kind": "thumb", "value": 1},
    {"kind": "thumb", "value": 0, "text": "not what I asked"},
    {"kind": "rating", "value": 4, "name": "stars"},
    {"kind": "preference", "rejected_response_id": "b"},
    {"kind": "correction", "text": "five"},
    {"kind": "comment", "text": "nice"},
    {"kind": "metric", "name": "clicked", "value": True},
]
BAD = [
    ({"kind": "thumb"}, "'value'"),
    ({"kind": "thumb", "value": 0.5}, "0.5"),
    ({"kind": "thumb", "value": 1, "rejected_response_id": "b"}, "'rejected_response_id'"),
    ({"kind": "rating"}, "'value'"),
    ({"kind": "rating", "value": float("nan")}, "finite"),
    ({"kind": "preference"}, "'rejected_response_id'"),
    ({"kind": "preference", "rejected_response_id": "a"}, "different"),
    ({"kind": "correction"}, "'text'"),
    ({"kind": "comment", "text": ""}, "text"),
    ({"kind": "comment", "text": "\ud800"}, "text"),
    ({"kind": "metric", "value": 3}, "'name'"),
    ({"kind": "metric", "name": "clicked"}, "'value'"),
    ({"kind": "applause"}, "kind"),
    ({"kind": "thumb", "value": 1, "colour": "red"}, "colour"),
    ({"kind": "thumb", "value": 1, "feedback_id": "with space"}, "feedback_id"),
]


@pytest.mark.parametrize("body", GOOD)
def test_good_feedback_becomes_a_row_of_the_table(body):
    row = FeedbackIn(response_id="a", **body).to_row("tenant-1")
    check_row("feedback", row)
    assert row["tenant"] == "tenant-1"
    assert row["source"] == "user"
    assert row["feedback_id"]


@pytest.mark.parametrize(("body", "says"), BAD)
def test_bad_feedback_is_refused_with_what_is_wrong(body, says):
    with pytest.raises(ValidationError, match=says):
        FeedbackIn(response_id="a", **body)


def test_a_given_id_is_kept_and_a_missing_one_is_made():
    assert FeedbackIn(response_id="a", kind="thumb", value=1, feedback_id="mine").to_row("t")["feedback_id"] == "mine"
    body = FeedbackIn(response_id="a", kind="thumb", value=1)
    assert body.to_row("t")["feedback_id"] != body.to_row("t")["feedback_id"]
