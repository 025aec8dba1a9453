"""Under which parameters the captured logprobs are those of the whole softmax."""

from __future__ import annotations

import json
from typing import Any

import pytest

from feedback.sampling_parameters import altered_by, other_parameters

WHOLE: dict[str, Any] = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@pytest.mark.parametrize("sampling", [{}, {"top_p": None, "top_k": None, "min_p": None}, {"top_k": -1}])
def test_what_cuts_nothing_off_alters_nothing(sampling: dict[str, Any]):
    assert altered_by(WHOLE | sampling, None) == []
    assert altered_by(WHOLE | sampling, [("answer", "4")]) == []


@pytest.mark.parametrize(
    ("sampling", "names"),
    [
        ({"temperature": 0.0}, ["temperature"]),
        ({"temperature": None}, ["temperature"]),
        ({"top_p": 0.99}, ["top_p"]),
        ({"top_k": 1}, ["top_k"]),
        ({"min_p": 0.01}, ["min_p"]),
        ({"min_p": 0.01, "top_p": 0.5}, ["top_p", "min_p"]),
    ],
)
def test_what_cuts_tokens_off_is_named(sampling: dict[str, Any], names: list[str]):
    assert altered_by(WHOLE | sampling, None) == names


def test_every_other_parameter_but_tokens_that_end_a_response_is_named():
    def metadata(**parameters: Any) -> list[tuple[str, str]]:
        return [("millrace:sampling", json.dumps(parameters))]

    assert altered_by(WHOLE, metadata(stop_token_ids=[3])) == []
    assert altered_by(WHOLE, metadata(stop_token_ids=[3], presence_penalty=0.5, bad_words=["a"])) == [
        "bad_words",
        "presence_penalty",
    ]
    assert other_parameters(metadata(stop_token_ids=[3])) == {"stop_token_ids": [3]}
    assert other_parameters(None) == {}
