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
from evaluation.statistics import experiment as statistics
from evaluation.statistics.experiment import Rows, decide
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


def test_a_block_has_the_scores_of_what_has_feedback_and_of_all_that_the_same_users_were_answered(lake: Lake) -> None:
    put(lake, "interactions", [asked(f"a{i}", 0, user="ann") for i in range(3)] + [asked("b", 0, user="bob")])
    put(lake, "interactions", [asked("c", 0, user="cy", status="error"), asked("d", 0, user="dan")])
    scores = {"a0": 0.9, "a1": 0.6, "a2": 0.3, "b": 1.7, "d": None}  # one is beyond 1, one has no value
    put(lake, "rewards", [scored(name, 0, score) for name, score in scores.items()])
    put(lake, "rewards", [scored("b", 0, 0.0, second=1.0), scored("a0", 0, 0.1, second=5000.0)])  # before; too late
    put(lake, "feedback", [thumb(1, "a0", 0, 1.0, ANYBODY), thumb(2, "a1", 0, 0.0, ANYBODY)])
    put(lake, "feedback", [thumb(3, "b", 0, 1.0, ANYBODY)])
    [block] = seen(lake, predicted()).blocks
    assert block.values["feedback"] == 0.75
    expected, labelled = np.mean([0.6, 1.0]), np.mean([0.75, 1.0])
    assert block.predictions["feedback"] == pytest.approx((expected, labelled))
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
            rows.append(asked(name, block, user="ann"))
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


def test_where_every_response_has_feedback_there_is_nothing_to_correct(lake: Lake) -> None:
    rows = [asked(f"h{i}", 0, user="heavy") for i in range(6)] + [asked("l", 0, user="light")]
    put(lake, "interactions", rows)
    put(lake, "rewards", [scored(f"h{i}", 0, 0.2) for i in range(6)] + [scored("l", 0, 1.0)])
    put(lake, "feedback", [thumb(i, row["response_id"], 0, 1.0, "rater") for i, row in enumerate(rows)])
    [block] = seen(lake, predicted()).blocks
    assert block.predictions["feedback"] == pytest.approx((2.2 / 7, 2.2 / 7))


def test_scores_are_weighted_as_feedback_is(lake: Lake) -> None:
    """Against a plain loop: of users, sessions and requests alone, whose feedback names a source or doesn't."""
    rng = np.random.default_rng(3)
    rows, rewards, thumbs, expected = [], [], [], []
    for block in range(12):
        whose = [("ann", "s1"), ("ann", "s2"), ("bob", None), (None, "s1"), (None, "s3"), (None, None)]
        mine = [(f"r{block}-{i}", *whose[rng.integers(len(whose))], rng.random()) for i in range(20)]
        votes = {name: ["rater", "bob", ANYBODY][rng.integers(3)] for name, *_ in mine if rng.random() < 0.3}
        groups: dict[Any, list[float]] = {}
        for name, user, session, score in mine:
            key = ("user", user) if user else ("session", session) if session else ("alone", name)
            groups.setdefault(key, []).append(score)
        voices: dict[str, list[tuple[float, float]]] = {}
        for name, user, session, score in mine:
            if name in votes:
                voice = (user or ANYBODY) if votes[name] == ANYBODY else votes[name]
                key = ("user", user) if user else ("session", session) if session else ("alone", name)
                voices.setdefault(voice, []).append((float(np.mean(groups[key])), score))
        expected.append(np.mean([np.mean(pairs, axis=0) for pairs in voices.values()], axis=0))
        rows += [asked(name, block, user=user, session_id=session) for name, user, session, _ in mine]
        rewards += [scored(name, block, score) for name, *_, score in mine]
        thumbs += [thumb(100 * block + i, name, block, 1.0, source) for i, (name, source) in enumerate(votes.items())]
    put(lake, "interactions", rows)
    put(lake, "rewards", rewards)
    put(lake, "feedback", thumbs)
    found = [block.predictions["feedback"] for block in seen(lake, predicted()).blocks]
    assert found == [pytest.approx(tuple(pair)) for pair in expected]


@pytest.mark.parametrize("voices", ["one that reads two responses", "users", "users who name themselves otherwise"])
@pytest.mark.parametrize("fooled", ["light", "heavy"])
def test_a_score_that_is_fooled_does_not_commit_a_policy_that_people_like_less(voices: str, fooled: str) -> None:
    """Blocks weighted as above. The candidate is liked 2 points less by everybody, and its score is fooled by 30 points
    on the answers to users who ask once, or to the one who asks twelve times. A thumb falls on any response alike."""
    committed, biases = 0, []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        rows = [_block(rng, candidate, voices, fooled) for candidate in rng.random(900) < 0.5]
        arm, y, expected, labelled = (np.array(column, float) for column in zip(*rows, strict=True))
        found = decide(
            Rows(arm.astype(bool), np.full(len(arm), 0.5), {"feedback": y}, predictions={"feedback": expected},
                 labelled_predictions={"feedback": labelled}),
            [statistics.Outcome("feedback", predicted=True)],
            statistics.Plan(),
        )  # fmt: skip
        committed += found.decision == "commit"
        gap = (expected - labelled)[~np.isnan(y)]
        biases.append([gap[arm[~np.isnan(y)] == of].mean() for of in (0, 1)])
    assert committed == 0
    error = np.std(biases, axis=0, ddof=1) / np.sqrt(len(biases))
    assert (np.abs(np.mean(biases, axis=0)) < 5 * error + 0.002).all()


def _block(rng: np.random.Generator, candidate: bool, voices: str, fooled: str) -> tuple[bool, float, float, float]:
    sizes = [12, 1, 1, 1, 1] if voices.startswith("one") else [12, *[1] * 12]
    user = np.repeat(np.arange(len(sizes)), sizes)
    liked = rng.random(len(user)) < 0.5 - 0.02 * candidate
    score = np.where(liked, 0.7, 0.1) + 0.3 * (candidate & ((user > 0) == (fooled == "light")))
    known = np.arange(len(user)) if voices.endswith("otherwise") else user  # no user in the request
    of_user = np.array([score[known == one].mean() for one in known])
    if voices.startswith("one"):
        read = rng.choice(len(user), 2, replace=False)
        return candidate, float(liked[read].mean()), float(of_user[read].mean()), float(score[read].mean())
    thumbs = rng.random(len(user)) < 0.1
    columns = np.stack([liked, of_user, score])
    means = [columns[:, thumbs & (user == one)].mean(axis=1) for one in np.unique(user[thumbs])]
    return (candidate, *(np.mean(means, axis=0) if means else np.full(3, np.nan)))  # type: ignore[return-value]


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
