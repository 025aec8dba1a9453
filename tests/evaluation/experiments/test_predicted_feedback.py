"""Feedback that is corrected by the scores of all responses, from rows in a lake."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from deploy.config.root import Settings
from evaluation.config import FeedbackOutcomeConfig
from evaluation.experiments import looks
from evaluation.experiments.plan import ExperimentPlan
from feedback.events import ANYBODY
from feedback.lake.tables import Lake
from tests.evaluation.experiments.experiment_rows import NOON, asked, plan_of, seen, thumb
from tests.feedback.feedback_rows import put, reward

PREDICTED = {"feedback": FeedbackOutcomeConfig(predicted_by="model")}


def predicted(**changed: Any) -> ExperimentPlan:
    return plan_of(outcomes=PREDICTED, before_seconds=0, **changed)


def scored(response: str, block: int, score: float | None, *, second: float = 3.0, **columns: Any) -> dict[str, Any]:
    """A row of rewards with a score of the component ``model``; None: it has no value."""
    at = NOON + timedelta(seconds=60 * block + second)
    parts = {"components": {"human": 1.0}, "missing": {"model": "too long"}}
    if score is not None:
        parts = {"components": {"human": 1.0, "model": score}, "missing": {}}
    return reward(response, 0.9, scored_at=at, **(parts | columns))


def test_a_block_has_the_scores_of_all_users_and_of_those_with_feedback(lake: Lake) -> None:
    put(lake, "interactions", [asked(f"a{i}", 0, user="ann") for i in range(3)] + [asked("b", 0, user="bob")])
    put(lake, "interactions", [asked("c", 0, user="cy", status="error"), asked("d", 0, user="dan")])
    scores = {"a0": 0.9, "a1": 0.6, "a2": 0.3, "b": 1.7, "d": None}  # one is beyond 1, one has no value
    put(lake, "rewards", [scored(name, 0, score) for name, score in scores.items()])
    put(lake, "rewards", [scored("b", 0, 0.0, second=1.0), scored("a0", 0, 0.1, second=5000.0)])  # before; too late
    put(lake, "feedback", [thumb(1, "a0", 0, 1.0, ANYBODY), thumb(2, "a1", 0, 0.0, ANYBODY)])
    put(lake, "feedback", [thumb(3, "b", 0, 1.0, ANYBODY)])
    [block] = seen(lake, predicted()).blocks
    assert block.values["feedback"] == 0.75
    everybody, labelled = np.mean([0.6, 1.0, 0.0, 0.5]), np.mean([0.75, 1.0])
    assert block.predictions["feedback"] == pytest.approx((everybody, labelled))
    assert [one.predictions for one in seen(lake, plan_of(before_seconds=0)).blocks] == [{}]


@pytest.mark.parametrize("lacks", ["a score", "one in time", "the component", "feedback"])
def test_a_block_of_which_a_response_was_not_scored_has_none(lake: Lake, lacks: str) -> None:
    put(lake, "interactions", [asked("r", 0), asked("s", 0)])
    put(lake, "rewards", [scored("r", 0, 0.5)])
    if lacks == "one in time":
        put(lake, "rewards", [scored("s", 0, 0.5, second=5000.0)])
    if lacks == "the component":
        put(lake, "rewards", [scored("s", 0, 0.5, components={"other": 1.0})])
    if lacks == "feedback":
        put(lake, "rewards", [scored("s", 0, 0.5)])
    else:
        put(lake, "feedback", [thumb(1, "r", 0, 1.0, "ann")])
    plan = predicted()
    found = seen(lake, plan)
    assert [block.predictions for block in found.blocks] == [{"feedback": None}]
    said = looks.to_json(plan, looks.look(plan, found), found)["adjustments"]
    assert bool(said) == (lacks != "feedback")
    if said:
        assert said[0].startswith("feedback: not corrected by the scores of model, as no row had one of every")


def test_scores_of_all_narrow_what_few_thumbs_leave_open(lake: Lake) -> None:
    rng = np.random.default_rng(1)
    rows, rewards, thumbs = [], [], []
    for block in range(400):
        for i in range(10):
            name, good = f"r{block}-{i}", rng.random() < 0.5
            rows.append(asked(name, block))
            rewards.append(scored(name, block, 0.8 if good else 0.3))
            if i == 0:
                thumbs.append(thumb(block, name, block, float(rng.random() < (0.95 if good else 0.05)), "ann"))
    put(lake, "interactions", rows)
    put(lake, "rewards", rewards)
    put(lake, "feedback", thumbs)
    plan, plain = predicted(), plan_of(before_seconds=0)
    found = seen(lake, plan)
    [powered], [alone] = looks.look(plan, found).differences, looks.look(plain, seen(lake, plain)).differences
    assert powered.high - powered.low < 0.8 * (alone.high - alone.low)
    assert powered.low < 0 < powered.high
    [said] = looks.adjustments(plan, looks.look(plan, found))
    assert said.startswith("feedback: 400 of 400 rows are corrected by the scores that model gave, which leaves ")


def test_only_a_component_that_there_is_can_predict_and_not_the_feedback_itself() -> None:
    def settings(name: str, **scoring: Any) -> Settings:
        predicted_by = {"experiment": {"outcomes": {"feedback": {"predicted_by": name}}}}
        return Settings.model_validate({"evaluation": predicted_by, "feedback": {"scoring": scoring}})

    with pytest.raises(ValidationError, match="human is the feedback itself"):
        settings("human")
    with pytest.raises(
        ValidationError, match=r"predicted_by=model: scoring has no such component \(.* there are: none\)"
    ):
        settings("model")
    with pytest.raises(ValidationError, match="there are: none"):  # what has no weight is not scored
        settings("short", rules={"short": {"sql": "len(response) < 9", "weight": 0}})
    made = settings("short", rules={"short": {"sql": "len(response) < 9"}})
    assert made.evaluation.experiment.outcomes.feedback is not None
