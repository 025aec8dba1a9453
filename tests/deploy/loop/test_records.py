"""What a cycle's record says of its stages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from deploy.loop.records import Stage
from train.observe.progress import seconds_by_part


@pytest.mark.parametrize(
    ("name", "result", "work"),
    [
        ("train", {"work": {"generate": 2.0, "wait": 3.0}, "seconds": 9.0}, {"generate": 2.0}),
        (
            "evaluate",
            {"seconds": {"start": 15.0, "candidate": 4.0, "compare": 1.0}},
            {"candidate": 4.0, "compare": 1.0},
        ),
        ("score", {"seconds": 1.0}, {}),
        ("swap", {"seconds": 1.0, "replica": "replica-0"}, {}),
        ("train", None, {}),
    ],
)
def test_the_work_of_a_stage_has_no_starts_and_no_waits(
    name: str, result: dict[str, Any] | None, work: dict[str, float]
) -> None:
    assert Stage(name=name, started_at=datetime.now(UTC), result=result).work == work


def test_parts_that_only_some_steps_have_are_summed_too() -> None:
    history = [{"seconds": 3.0, "seconds_update": 2.0}, {"seconds": 5.0, "seconds_update": 1.0, "seconds_reshard": 4.0}]
    assert seconds_by_part(history) == {"update": 3.0, "reshard": 4.0}
