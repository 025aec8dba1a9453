"""Which requests of a lake are drawn, and the reason of every other."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from evaluation.estimation.training_reads import TrainingRead
from evaluation.shadow.requests import (
    ANOTHER,
    LEARNED,
    MEDIA,
    Draw,
    draw_requests,
    is_drawn,
    read_requests,
    sampling_of,
)
from evaluation.suites.held_out import HeldOut
from feedback.config import LakeConfig
from feedback.lake.erasure_registry import register
from feedback.lake.tables import Lake
from feedback.schema import IMPORTED
from tests.feedback.feedback_rows import NOON, interaction, put

SEED = "5eed"
LIKE = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.125, "max_tokens": 8, "n": 1, "seed": 3, "stop": ["."]}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    return lake


def drawn(lake: Lake, **options: Any) -> Draw:
    known: dict[str, Any] = {"seed": SEED, "policy": 1, "share": 1.0, "since": NOON - timedelta(days=1)}
    known |= {"longest": None, "reads": [], "answered": set(), "units": set()}
    return draw_requests(lake, **known | options)


def ids(found: Draw) -> list[str]:
    return [one.response_id for one in found.waiting]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"status": "aborted"}, "cut off: the client left, or the server stopped"),
        ({"status": "error"}, "that failed"),
        ({"status": "redacted", "prompt_token_ids": [], "response_token_ids": []}, "redacted"),
        ({"status": IMPORTED, "response_token_ids": []}, "imported"),
        ({"prompt_token_ids": []}, "without tokens"),
        ({"policy_spans": []}, "of an unknown policy"),
        ({"policy_spans": [{"start": 0, "policy_version": v} for v in (1, 2)]}, "of several policies in one response"),
        ({"policy_spans": [{"start": 0, "policy_version": 2}]}, "of policy 2"),
        ({"messages": json.dumps([{"role": "user", "content": [{"image_url": {"url": "data:"}}]}])}, MEDIA),
        (
            {"messages": json.dumps([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}])},
            MEDIA,
        ),
        ({"metadata": {"millrace:sampling": '{"dance": 1}'}}, "sampled with dance, which can't be repeated"),
        ({"sampling": LIKE | {"max_tokens": 30}}, "longer than the candidate's context"),
    ],
)
def test_what_can_not_be_answered_again_is_counted_by_its_reason(
    columns: dict[str, Any], reason: str, lake: Lake
) -> None:
    put(lake, "interactions", [interaction("good"), interaction("bad", **columns)])
    found = drawn(lake, longest=32)
    assert (ids(found), found.left_out, found.considered, found.taken) == (["good"], {reason: 1}, 2, 2)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": 'what is {"image_url": 1}?'}],
        [{"role": "user", "content": [{"type": "text", "text": '"image": yes'}, "and"]}],
        [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "get", "arguments": '{"image": 1}'}}]},
            {"role": "tool", "content": "rain", "tool_call_id": "1"},
        ],
    ],
)
def test_texts_and_calls_of_tools_are_answered_again_whatever_they_say(messages: list[Any], lake: Lake) -> None:
    put(lake, "interactions", [interaction("a", messages=json.dumps(messages), prompt=None)])
    assert (ids(drawn(lake)), drawn(lake).left_out) == (["a"], {})


def test_a_share_is_drawn_by_hash_the_same_each_time_and_a_larger_one_adds(lake: Lake) -> None:
    put(lake, "interactions", [interaction(f"r{i}") for i in range(400)])
    few, more = drawn(lake, share=0.1), drawn(lake, share=0.3)
    assert drawn(lake, share=0.1).waiting == few.waiting
    assert set(ids(few)) < set(ids(more))
    assert (few.considered, 20 <= few.taken <= 60, 90 <= more.taken <= 150) == (400, True, True)
    assert all(is_drawn(one.draw, 0.1) for one in few.waiting)
    assert not any(is_drawn(one.draw, 0.1) for one in more.waiting if one not in few.waiting)
    assert set(ids(drawn(lake, share=0.1, seed="other"))) != set(ids(few))


def test_of_each_user_else_session_else_request_one_counts_and_of_each_tenant_s(lake: Lake) -> None:
    rows = [
        *(interaction(f"ann{i}", user="ann", session_id=f"s{i}") for i in range(5)),
        *(interaction(f"other{i}", user="ann", tenant="other") for i in range(2)),
        *(interaction(f"session{i}", session_id="s0") for i in range(3)),
        *(interaction(f"choice{i}", request_id="q") for i in range(2)),
        interaction("alone"),
    ]
    put(lake, "interactions", rows)
    found = drawn(lake)
    assert sorted(one.rstrip("0123456789") for one in ids(found)) == ["alone", "ann", "choice", "other", "session"]
    assert found.left_out == {ANOTHER: 13 - 5}
    later = drawn(lake, answered={found.waiting[0].response_id}, units={found.waiting[0].unit})
    assert set(ids(later)) == set(ids(found)) - {found.waiting[0].response_id}


def test_the_oldest_comes_first_and_none_that_is_older_than_the_shadow_takes_them(lake: Lake) -> None:
    put(lake, "interactions", [interaction(f"{i}", created_at=NOON + timedelta(minutes=5 - i)) for i in range(5)])
    found = drawn(lake, since=NOON + timedelta(minutes=3))
    assert (ids(found), found.considered) == (["2", "1", "0"], 3)


def test_what_was_there_when_the_candidate_was_trained_is_left_out_whatever_its_time_says(lake: Lake) -> None:
    put(lake, "interactions", [interaction("seen", created_at=NOON + timedelta(hours=1))])
    read = TrainingRead(lake.versions()["interactions"], NOON, HeldOut(share=0.5))
    put(lake, "interactions", [interaction("new")])
    found = drawn(lake, reads=[read])
    assert (ids(found), found.left_out) == (["new"], {LEARNED: 1})
    unknown = TrainingRead(None, NOON + timedelta(minutes=30), HeldOut())
    assert ids(drawn(lake, reads=[unknown])) == ["seen"]  # the order of times is all that is left


def test_what_an_erasure_that_has_not_gone_through_means_is_neither_drawn_nor_read(lake: Lake) -> None:
    put(lake, "interactions", [interaction("a", user="ann"), interaction("b", user="bob")])
    register(lake, "user", ["bob"], NOON, lake.versions())
    found = drawn(lake)
    assert (ids(found), found.left_out) == (["a"], {"being erased": 1})
    assert read_requests(lake, ["a", "b", "gone"]).column("response_id").to_pylist() == ["a"]


def test_a_request_is_sampled_as_it_was_with_all_that_is_recorded_of_it(lake: Lake) -> None:
    other = {"stop_token_ids": [5], "logit_bias": {"7": 2.5}, "min_tokens": 2, "structured_outputs": {"regex": "a+"}}
    put(lake, "interactions", [interaction("a", sampling=LIKE, metadata={"millrace:sampling": json.dumps(other)})])
    (row,) = read_requests(lake, ["a"]).to_pylist()
    assert sampling_of(row, "0" * 32) == {
        **{"temperature": 0.5, "top_p": pytest.approx(0.9), "top_k": 5, "min_p": 0.125, "max_tokens": 8, "seed": 3},
        **{"stop": ["."], "stop_token_ids": [5], "logit_bias": {7: 2.5}, "min_tokens": 2},
        "structured_outputs": {"regex": "a+"},
    }
    plain = {"temperature": 1.0, "max_tokens": 8, "n": 1, "stop": []}
    put(lake, "interactions", [interaction("b", sampling=plain)])
    (row,) = read_requests(lake, ["b"]).to_pylist()
    unset = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": None}
    assert sampling_of(row, "000000ff" + "0" * 24) == {"temperature": 1.0, "max_tokens": 8, "seed": 255, **unset}


def test_no_traffic_draws_nothing(lake: Lake) -> None:
    assert drawn(lake) == Draw((), 0, 0, {})
