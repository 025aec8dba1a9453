"""What the people of a block did before the experiment, from rows in a lake."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from evaluation.config import ErrorsConfig, FeedbackOutcomeConfig, OutcomeConfig, SessionEndConfig
from evaluation.experiments import looks
from evaluation.experiments.plan import ExperimentPlan
from feedback.events import ANYBODY
from feedback.lake.tables import Lake
from tests.evaluation.experiments.experiment_rows import NOON, asked, plan_of, seen, thumb
from tests.feedback.feedback_rows import interaction, put, reward, said

DAY = 86400.0


def earlier(response: str, user: str | None, *, hours: float = 1.0, **columns: Any) -> dict[str, Any]:
    """A response that a user had before the experiment."""
    at = NOON - timedelta(hours=hours)
    return interaction(response, **({"user": user, "created_at": at, "completed_at": at} | columns))


def liked(number: int, response: str, value: float, *, source: str = ANYBODY, hours: float = 0.9) -> dict[str, Any]:
    return said(f"e{number}", response, "thumb", value=value, source=source, created_at=NOON - timedelta(hours=hours))


def test_of_feedback_it_is_the_mean_of_what_the_blocks_voices_said_before(lake: Lake) -> None:
    put(lake, "interactions", [earlier("a1", "ann"), earlier("a2", "ann"), earlier("b1", "bob"), earlier("c1", "cy")])
    # ann 0.5, bob 0, cy 1 (under a name of her own): 0.5 in the mean. dan is new.
    put(lake, "feedback", [liked(1, "a1", 1.0), liked(2, "a2", 0.0), liked(3, "b1", 0.0)])
    put(lake, "feedback", [liked(4, "c1", 1.0, source="cy's phone"), liked(5, "a1", 0.0, hours=-0.01)])  # too late
    users = {"r1": "ann", "r2": "bob", "r3": "dan", "r4": "eve"}
    put(lake, "interactions", [asked(name, 0, user=user) for name, user in users.items()])
    put(lake, "interactions", [asked("s1", 1, user="cy"), asked("t1", 2, user="dan")])
    put(lake, "feedback", [thumb(i, name, 0, 1.0, ANYBODY) for i, name in enumerate(("r1", "r2", "r3"))])
    put(lake, "feedback", [thumb(7, "s1", 1, 1.0, "cy's phone"), thumb(8, "t1", 2, 1.0, ANYBODY)])
    blocks = seen(lake, plan_of(before_seconds=DAY)).blocks
    assert [block.covariates for block in blocks] == [
        {"feedback": pytest.approx((0.0 - 0.5 + 0.0) / 3)},
        {"feedback": pytest.approx(0.5)},
        {"feedback": None},
    ]


def test_of_all_else_it_is_the_mean_of_the_users_who_came_however_often_and_to_whom(lake: Lake) -> None:
    outcomes = {
        "feedback": FeedbackOutcomeConfig(),
        "errors": ErrorsConfig(),
        "reward": OutcomeConfig(bounds=(-1.0, 1.0)),
        "length": OutcomeConfig(role="guardrail", margin=1.0, bounds=(0.0, 10.0)),
    }
    long = {"response_token_ids": [1] * 50, "logprobs": [-1.0] * 50}
    put(lake, "interactions", [earlier("a1", "ann", status="error"), earlier("a2", "ann", **long), earlier("b", "bob")])
    put(lake, "interactions", [earlier("old", "bob", hours=30, status="error"), earlier("nobody", None)])
    put(lake, "interactions", [earlier("other", "ann", tenant="other")])
    put(lake, "rewards", [reward("a1", 0.5, minute=-50), reward("a1", -0.5, minute=-40), reward("b", 0.1, minute=-40)])
    put(lake, "rewards", [reward("a1", 0.9, minute=1)])  # after the experiment had begun
    put(lake, "interactions", [asked(f"r{i}", 0, user="ann") for i in range(5)])
    put(lake, "interactions", [asked("wrong", 0, user="bob", variant=None), asked("s", 0, user="new"), asked("n", 0)])
    put(lake, "interactions", [asked("t", 1, user="new")])
    found = seen(lake, plan_of(outcomes=outcomes, before_seconds=DAY)).blocks
    errors, rewards, lengths = (0.5, 0.0, 0.0), (-0.5, 0.1), (6.0, 2.0, 2.0)  # ann, bob and the other tenant's ann

    def mean(values: tuple[float, ...]) -> Any:
        return pytest.approx((values[0] + values[1] - 2 * np.mean(values)) / 3)

    assert found[0].covariates == {
        "feedback": None,
        "errors": mean(errors),
        "reward": mean(rewards),
        "length": mean(lengths),
    }
    assert set(found[1].covariates.values()) == {None}


def test_of_the_end_of_sessions_it_is_how_often_the_users_responses_ended_one(lake: Lake) -> None:
    def at(minutes: float) -> dict[str, Any]:
        when = NOON - timedelta(minutes=minutes)
        return {"created_at": when, "completed_at": when}

    put(
        lake,
        "interactions",
        [earlier("a1", "ann", session_id="s", **at(60)), earlier("a2", "ann", session_id="s", **at(59.9))],
    )
    put(
        lake,
        "interactions",
        [earlier("b1", "bob", session_id="t", **at(60)), earlier("b2", "bob", session_id="t", **at(50))],
    )
    put(lake, "interactions", [earlier("c", "bob", session_id="u", **at(0.2))])  # its time was not over
    put(lake, "interactions", [asked("r", 0, user="ann"), asked("s", 1, user="bob")])
    outcomes = {"feedback": FeedbackOutcomeConfig(), "session_end": SessionEndConfig(after_seconds=30.0)}
    found = seen(lake, plan_of(outcomes=outcomes, before_seconds=DAY)).blocks
    assert [block.covariates["session_end"] for block in found] == [-0.25, 0.25]  # ann's 1 of 2, bob's 2 of 2


def test_what_is_kept_of_a_block_stays_and_only_new_ones_are_looked_up(lake: Lake) -> None:
    put(lake, "interactions", [earlier("a1", "ann"), earlier("b1", "bob")])
    put(lake, "feedback", [liked(1, "a1", 1.0), liked(2, "b1", 0.0)])
    put(lake, "interactions", [asked("r", 0, user="ann"), asked("s", 1, user="bob")])
    put(lake, "feedback", [thumb(3, "r", 0, 1.0, ANYBODY), thumb(4, "s", 1, 1.0, ANYBODY)])
    plan = plan_of(before_seconds=DAY)
    first = seen(lake, plan, after_s=163)
    assert [block.covariates for block in first.blocks] == [{"feedback": 0.5}]
    put(lake, "feedback", [liked(5, "a1", 0.0)])  # sealed late
    again = seen(lake, plan, known=first.blocks)
    assert [block.covariates for block in again.blocks] == [{"feedback": 0.5}, {"feedback": 0.0}]


def test_a_look_says_what_it_was_adjusted_by_and_that_it_was_not(lake: Lake) -> None:
    plan = plan_of(before_seconds=DAY)
    rng = np.random.default_rng(0)
    strict = [f"user-{i}" for i in range(20)]
    put(lake, "interactions", [earlier(f"e{i}-{k}", user) for i, user in enumerate(strict) for k in range(5)])
    put(lake, "feedback", [liked(10 * i + k, f"e{i}-{k}", float(i < 10)) for i in range(20) for k in range(5)])
    users = [int(i) for i in rng.integers(0, 20, 400)]
    put(lake, "interactions", [asked(f"r{block}", block, user=strict[i]) for block, i in enumerate(users)])
    thumbs = [float((i < 10) == (rng.random() < 0.9)) for i in users]
    put(
        lake,
        "feedback",
        [thumb(1000 + block, f"r{block}", block, value, ANYBODY) for block, value in enumerate(thumbs)],
    )
    found = seen(lake, plan)
    decision = looks.look(plan, found)
    [said_of_it] = looks.to_json(plan, decision, found)["adjustments"]
    assert said_of_it.startswith("feedback: 400 of 400 rows are compared less what their people did before, which")
    without = looks.look(plan_of(before_seconds=0), seen(lake, plan_of(before_seconds=0))).differences[0]
    [with_it] = decision.differences
    assert with_it.variance_ratio < 0.5
    assert with_it.high - with_it.low < 0.8 * (without.high - without.low)

    new = found.model_copy(update={"blocks": tuple(b.model_copy(update={"covariates": {}}) for b in found.blocks)})
    assert looks.adjustments(plan, looks.look(plan, new)) == [
        "feedback: not adjusted by what was before, as nobody had been there in the 1 days before the experiment"
    ]
    unasked = plan_of(before_seconds=0)
    assert looks.adjustments(unasked, looks.look(unasked, new)) == []


def test_a_plan_and_blocks_from_before_there_were_covariates_decide_as_they_did(lake: Lake) -> None:
    put(lake, "interactions", [asked("r", 0, user="ann")])
    [block] = seen(lake, plan_of(before_seconds=0)).blocks
    assert block.covariates == {}
    old = plan_of().to_json()
    del old["before_s"]
    assert ExperimentPlan.model_validate(old).before_s == 0.0
