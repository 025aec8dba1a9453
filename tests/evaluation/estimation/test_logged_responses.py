"""Which rows of a lake can be used, and the reason of every other."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from evaluation.estimation.logged_responses import LoggedTraffic, read_logged
from feedback.config import LakeConfig
from feedback.lake.erasure_registry import register
from feedback.lake.tables import Lake, LakeError
from feedback.schema import IMPORTED
from tests.feedback.feedback_rows import NOON, interaction, put, reward

SAMPLING = {"temperature": 0.75, "max_tokens": 8, "n": 1, "stop": []}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    return lake


def read(lake: Lake, *rows: dict[str, Any], unrewarded: tuple[str, ...] = (), **options: Any) -> LoggedTraffic:
    put(lake, "interactions", list(rows))
    put(lake, "rewards", [reward(r["response_id"], 0.5) for r in rows if r["response_id"] not in unrewarded])
    return read_logged(lake, 1, **{"limit": 100} | options)


def test_a_response_is_read_with_all_that_an_estimate_takes_of_it(lake: Lake):
    stops = {"millrace:sampling": json.dumps({"stop_token_ids": [5]})}
    row = interaction("a", sampling=SAMPLING | {"stop": ["."]}, metadata=stops, user="ann", logprobs=[-0.25, -0.5])
    found = read(lake, row)
    (one,) = found.responses
    assert (found.considered, found.rewarded, found.left_out) == (1, 1, {})
    assert (one.response_id, one.log_prob, one.reward, one.temperature) == ("a", -0.75, 0.5, 0.75)
    assert (one.prompt_token_ids, one.response_token_ids) == ([2, 4, 2], [4, 0])
    assert one.sampling == {"temperature": 0.75, "max_tokens": 8, "stop": ["."], "stop_token_ids": [5]}
    assert one.cluster == ("user", "default", "ann")


def other(name: str, value: Any) -> dict[str, Any]:
    return {"metadata": {"millrace:sampling": json.dumps({name: value})}}


def spans(*versions: int | None) -> dict[str, Any]:
    return {"policy_spans": [{"start": i, "policy_version": version} for i, version in enumerate(versions)]}


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"sampling": SAMPLING | {"temperature": 0.0}}, "greedy"),
        ({"sampling": SAMPLING | {"top_p": 0.9}}, "sampled with top_p"),
        ({"sampling": SAMPLING | {"top_k": 20, "min_p": 0.1}}, "sampled with top_k and min_p"),
        (other("repetition_penalty", 1.1), "sampled with repetition_penalty"),
        (other("structured_outputs", {"json": {}}), "sampled with structured_outputs"),
        ({"logprobs": None}, "without the logprobs of their tokens"),
        ({"logprobs": [-0.25]}, "without the logprobs of their tokens"),
        ({"logprobs": [-0.25, float("nan")]}, "without the logprobs of their tokens"),
        ({"response_token_ids": None, "logprobs": None}, "without tokens"),
        (spans(2), "of policy 2"),
        (spans(1, 2), "of several policies in one response"),
        (spans(), "of an unknown policy"),
        (spans(None), "of an unknown policy"),
        ({"status": "aborted"}, "cut off: the client left, or the server stopped"),
        ({"status": "error"}, "that failed"),
        ({"status": IMPORTED}, "imported"),
    ],
)
def test_a_response_for_which_the_ratio_is_undefined_is_left_out_and_counted_with_the_reason(
    columns: dict[str, Any], reason: str, lake: Lake
):
    found = read(lake, interaction("a"), interaction("b", **columns), interaction("c", **columns))
    assert [one.response_id for one in found.responses] == ["a"]
    assert (found.left_out, found.considered) == ({reason: 2}, 3)


def test_what_takes_nothing_off_the_softmax_is_used(lake: Lake):
    neutral = SAMPLING | {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert len(read(lake, interaction("a", sampling=neutral), interaction("b", metadata=None)).responses) == 2


def test_a_response_without_a_reward_is_left_out_for_that_only_if_it_could_be_used_else(lake: Lake):
    greedy = interaction("b", sampling=SAMPLING | {"temperature": 0.0})
    found = read(lake, interaction("a"), greedy, interaction("c"), unrewarded=("b", "c"))
    assert found.left_out == {"greedy": 1, "without a reward": 1}
    assert (found.considered, found.rewarded, len(found.responses)) == (3, 1, 1)


def test_the_newest_are_looked_at_and_none_that_are_older_than_since(lake: Lake):
    rows = [interaction(f"{i}", created_at=NOON + timedelta(minutes=i)) for i in range(5)]
    found = read(lake, *rows, limit=2)
    assert [one.response_id for one in found.responses] == ["4", "3"]
    assert found.considered == 2
    since = read_logged(lake, 1, since=NOON + timedelta(minutes=2), limit=100)
    assert [one.response_id for one in since.responses] == ["4", "3", "2"]


def test_a_cluster_is_a_user_of_a_tenant_else_a_session_else_a_request(lake: Lake):
    found = read(
        lake,
        interaction("a", user="ann", session_id="s"),
        interaction("b", user="ann", tenant="other"),
        interaction("c", session_id="s"),
        interaction("d", request_id="q"),
    )
    assert {one.response_id: one.cluster for one in found.responses} == {
        "a": ("user", "default", "ann"),
        "b": ("user", "other", "ann"),
        "c": ("session", "default", "s"),
        "d": ("request", "default", "q"),
    }


def test_what_is_left_out_later_adds_to_the_counts(lake: Lake):
    found = read(lake, interaction("a"), interaction("b"), interaction("c"))
    assert found.without(set(), "learned") is found
    fewer = found.without({"a"}, "learned").without({"b"}, "learned")
    assert ([one.response_id for one in fewer.responses], fewer.left_out) == (["c"], {"learned": 2})


def test_no_lake_and_no_limit_are_errors(tmp_path: Path, lake: Lake):
    with pytest.raises(LakeError, match="no lake at"):
        read_logged(Lake(str(tmp_path / "none"), LakeConfig()), 1, limit=1)
    with pytest.raises(ValueError, match=r"limit \(0\) must be at least 1"):
        read_logged(lake, 1, limit=0)


def test_what_an_erasure_that_has_not_gone_through_means_is_left_out(lake: Lake):
    rows = [interaction("a", user="ann"), interaction("b", user="bob")]
    assert len(read(lake, *rows).responses) == 2
    register(lake, "user", ["bob"], NOON, lake.versions())
    found = read_logged(lake, 1, limit=100)
    assert ([one.response_id for one in found.responses], found.left_out) == (["a"], {"being erased": 1})
