"""What a run draws from: logged groups that teach something, and every prompt before any comes again."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from train.config import TrainConfig
from train.data import Cycled, TrafficGroups

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def row(prompt: list[int], reward: float | None, **sampling: Any) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt,
        "response_token_ids": [5, 6],
        "logprobs": [-0.1, -0.2],
        "reward": reward,
        "sampling": {**SAMPLING, **sampling},
        "metadata": [],
    }


def test_only_groups_with_different_rewards_are_kept() -> None:
    rows = [row([1], 0.0), row([1], 1.0), row([2], 1.0), row([2], 1.0), row([3], None), row([3], 1.0)]
    traffic = TrafficGroups.of(pa.Table.from_pylist(rows))
    assert [[r.prompt for r in g] for g in traffic.groups] == [[[1], [1]]]


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_rows_sampled_below_full_support_are_refused_and_counted(cut: dict[str, float]) -> None:
    rows = [row([1], 0.0), row([1], 1.0, **cut)]
    traffic = TrafficGroups.of(pa.Table.from_pylist(rows))
    assert traffic.groups == []
    assert traffic.refused == 1


def test_rows_whose_distribution_was_changed_otherwise_are_refused_but_not_for_a_stop_token() -> None:
    rows = [row([1], 0.0), row([1], 1.0), row([2], 0.0), row([2], 1.0)]
    rows[1]["metadata"] = [("millrace:sampling", '{"presence_penalty": 0.5}')]
    rows[3]["metadata"] = [("millrace:sampling", '{"stop_token_ids": [7]}'), ("theirs", "x")]
    schema = pa.Table.from_pylist(rows[:1]).schema
    at = schema.get_field_index("metadata")
    schema = schema.set(at, pa.field("metadata", pa.map_(pa.string(), pa.string())))
    traffic = TrafficGroups.of(pa.Table.from_pylist(rows, schema=schema))
    assert [[r.prompt for r in g] for g in traffic.groups] == [[[2], [2]]]
    assert traffic.refused == 1


def test_every_item_comes_once_before_any_comes_again() -> None:
    cycled = Cycled(list(range(10)), 4, "3")
    drawn = [item for step in range(5) for item in cycled.at(step)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]


def test_a_step_that_wants_more_items_than_there_are_gets_some_again() -> None:
    assert sorted(Cycled([1, 2, 3], 6, "3").at(1)) == [1, 1, 2, 2, 3, 3]
    assert Cycled([], 6, "3").at(1) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 3, "rollout": {"tensor_parallel_size": 2}}, "tensor_parallel_size=2 does not divide train.ranks=3"),
        ({"minibatches": 9, "data": {"prompts_per_step": 8}}, "train.minibatches=9 is more than"),
        ({"rollout": {"staleness": 1}}, "train.rollout.staleness=1 needs generation on a pool of its own"),
        ({"rollout": {"staleness": 2}}, "staleness"),
        ({"checkpoint": {"every_steps": 0}}, "every_steps"),
        ({"stepz": 3}, "stepz"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(settings)
