"""What benchmarks say of a figure that one turn measured."""

from __future__ import annotations

import json

from loadtests.paired import ratio


def test_the_interval_of_one_turn_is_open_and_valid_json() -> None:
    found = ratio([2.0], [1.0])
    assert json.dumps(found.interval(), allow_nan=False) == "[0.0, null]"
    assert found.judge("at least", 1.0) == "undecided"
    assert ratio([2.0, 2.0], [1.0, 1.0]).interval() == [2.0, 2.0]
