"""What the bench of the loop makes of records: a thumb's way, a cycle's work, intervals and verdicts."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest

from loadtests.bench_loop import (
    Promotion,
    Seen,
    Thumb,
    began_at,
    judged,
    lake_versions,
    parts,
    promotions,
    quantile,
    summary,
    ways,
)


def at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def stage(name: str, started: float, seconds: float, **work: float) -> dict[str, Any]:
    return {"name": name, "started_at": at(started), "seconds": seconds, "work": work}


CYCLE: dict[str, Any] = {
    "number": 3,
    "status": "promoted",
    "candidate": 2,
    "started_at": at(1000),
    "finished_at": at(1030),
    "stages": [
        stage("score", 1000, 2),
        stage("reward-model", 1002, 5, update=1.5, held_out=0.5, publish=0.25),
        stage("train", 1007, 12, generate=1, score=0.5, update=2, reshard=0.25, publish=3),
        stage("evaluate", 1019, 9, incumbent=0, candidate=4, compare=3),
        stage("promote", 1028, 0.125),
        stage("swap", 1028, 1),
    ],
}
SWAP = {"to": 2, "prepare_ms": 700.0, "hold_ms": 50.0}
POLICY = {"version": 2, "created_at": at(1017), "metrics": {"last": {"time": 1015.0}}}


def policy(version: int, began: float, thumbs: set[str]) -> Promotion:
    times = {"stepped": began + 1, "published": began + 2, "verdict": began + 3, "answered": began + 4}
    return Promotion(version, began, **times, seconds=20, work={"a": 10}, not_counted={"b": 4}, thumbs=thumbs)


def test_only_sampling_updating_evaluating_and_copying_count_as_work() -> None:
    work, not_counted = parts(CYCLE, SWAP, publishing=2.0)
    assert work == {
        "reward-model: update": 1.5,
        "train: generate": 1,
        "train: update": 2,
        "train: reshard": 0.25,
        "train: publish": 2.0,
        "evaluate: incumbent": 0,
        "evaluate: candidate": 4,
        "swap: exchange": 0.05,
    }
    assert not_counted["swap: prepare"] == 0.7
    assert not_counted["train: publish, after its manifest"] == 1
    assert not_counted["score"] == 2
    assert not_counted["evaluate: compare"] == 3


def test_all_seconds_of_a_cycle_s_stages_are_in_one_part_or_another() -> None:
    work, not_counted = parts(CYCLE, SWAP, publishing=2.0)
    assert sum((work | not_counted).values()) == pytest.approx(sum(one["seconds"] for one in CYCLE["stages"]))


def test_what_an_earlier_cycle_has_trained_is_no_work_of_the_one_that_takes_it_up() -> None:
    taken_up = CYCLE | {"stages": [stage("train", 900, 0, update=50), *CYCLE["stages"][-3:]]}
    work, not_counted = parts(taken_up, SWAP, publishing=2.0)
    assert not [name for name in work | not_counted if name.startswith("train")]


def test_a_cycle_takes_from_the_end_of_the_one_before_to_its_own() -> None:
    before = [
        CYCLE | {"number": number, "status": "refused", "finished_at": at(end)} for number, end in ((1, 900), (2, 997))
    ]
    [found] = promotions([*before, CYCLE], {2: POLICY}, {2: SWAP}, {2: 1031.0}, {2: {"r"}})
    assert found.seconds == 33
    assert (found.began, found.stepped, found.published, found.verdict, found.answered) == (
        1002,
        1015,
        1017,
        1028,
        1031,
    )


def test_a_cycle_that_waited_for_something_to_do_takes_no_longer_for_that() -> None:
    assert began_at(CYCLE, [CYCLE]) == began_at(CYCLE, [CYCLE | {"number": 2, "finished_at": at(900)}]) == 995


def test_a_reward_that_was_written_before_the_thumb_is_not_the_thumb_s() -> None:
    scored = {"r": [90.0, 104.0, 120.0]}
    assert ways([Thumb("r", 100)], scored, [policy(2, 110, {"r"})])[2][0]["scored"] == 4
    assert ways([Thumb("r", 100)], {"r": [90.0]}, [policy(2, 110, {"r"})]) == {}


def test_a_thumb_s_policy_is_the_first_that_has_it_on_record_not_the_first_that_began_later() -> None:
    promoted = [policy(2, 110, set()), policy(4, 210, {"r"}), policy(5, 310, {"r"})]
    [way] = ways([Thumb("r", 100), Thumb("s", 100)], {"r": [104.0], "s": [104.0]}, promoted)[4]
    assert way == {"scored": 4, "began": 110, "stepped": 111, "published": 112, "verdict": 113, "answered": 114}


def test_a_policy_s_feedback_is_what_its_reward_model_has_read() -> None:
    versions = {"interactions": 9, "feedback": 8, "rewards": 7}
    human = {"model": {"name": "/models/v1"}}
    of_policy = {"lineage": {"lake_versions": versions, "reward": {"human": human}}}
    models = {"/models/v1": {"lake_versions": {"interactions": 4, "feedback": 3, "rewards": 2}}}
    assert lake_versions(of_policy, models) == {"feedback": 3, "rewards": 7}
    for reward in ("module:function", {"human": {"model": None}}):
        alone = {"lineage": {"lake_versions": versions, "reward": reward}}
        assert lake_versions(alone, {}) == {"feedback": 8, "rewards": 7}


def test_a_percentile_s_interval_is_of_policies_not_of_thumbs() -> None:
    """Half of the policies are fast and half are slow: how often either is drawn decides, not how many thumbs."""
    few, many = ([[10.0] * size, [20.0] * size] * 2 for size in (3, 3000))
    assert quantile(few, 50) == quantile(many, 50) == (10.0, 10.0, 20.0)
    assert quantile([[1.0, 2.0, 3.0, 4.0]], 50) == (2.0, 0.0, math.inf)
    assert quantile([[float(i) for i in range(1, 101)]] * 3, 95) == (95.0, 95.0, 95.0)


def test_a_bar_is_judged_by_the_whole_interval() -> None:
    figures = {"a": 1.9, "b": {"p50": 55.0}, "c": 3.0, "d": 0, "e": 1.0}
    figures["intervals"] = {"a": [1.8, 1.95], "b.p50": [50.0, 62.0], "c": [2.5, None], "e": [0.0, None]}
    found = judged(figures, {"a": 2, "b.p50": 60, "c": 2, "d": 0, "e": 2, "missing": 1})
    verdicts = {name: one["verdict"] for name, one in found.items()}
    assert verdicts == {
        "a": "met",
        "b.p50": "undecided",
        "c": "missed",
        "d": "met",
        "e": "undecided",
        "missing": None,
    }


def test_the_figures_say_what_of_a_cycle_is_outside_of_its_stages() -> None:
    promoted = [policy(2, 110, {"r"}), policy(3, 210, {"s"})]
    seen = Seen(thumbs=[Thumb("r", 100), Thumb("s", 200), Thumb("t", 300)])
    found = summary(seen, {"r": [104.0], "s": [206.0], "t": [301.0]}, promoted)
    assert found["cycle_over_work"] == 2.0
    assert found["not_counted_s"] == {"b": 4, "outside of stages": 6}
    assert found["thumb_to_policy_s"] == {"p50": 14, "p95": 14}
    assert (found["thumbs"], found["timed_thumbs"]) == (3, 2)
    assert set(found["intervals"]) == {"cycle_over_work", "thumb_to_policy_s.p50", "thumb_to_policy_s.p95"}
