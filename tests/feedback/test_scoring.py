from __future__ import annotations

import random
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from feedback_rows import NOON, interaction, put, thumb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feedback import scoring
from feedback.config import HumanConfig, LakeConfig, RulesConfig, ScoringConfig
from feedback.lake import Lake, LakeConflictError
from feedback.rewards.rules import RuleError
from feedback.scoring import score

RULE = '''
def exact(batch):
    """1 if the response is the answer in its metadata, else 0."""
    answers = [dict(metadata or ()).get("answer") for metadata in batch["metadata"].to_pylist()]
    responses = batch["response"].to_pylist()
    if "explode" in responses:
        raise ValueError("exploded")
    return [None if a is None else float(a == r) for a, r in zip(answers, responses, strict=True)]
'''
HUMAN = ScoringConfig()


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> ScoringConfig:
    """Human votes with weight 1, an exact-match rule with weight 3."""
    folder = tmp_path_factory.mktemp("rules")
    (folder / "exact_for_scoring.py").write_text(RULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield ScoringConfig(rules=RulesConfig(function="exact_for_scoring:exact", weight=3.0))


def rewards(lake: Lake, view: str = "current_rewards") -> list[dict[str, Any]]:
    with lake.connect() as connection:
        rows = connection.sql(f"SELECT * FROM {view} ORDER BY response_id, scored_at").to_arrow_table().to_pylist()
    return [row | {"components": dict(row["components"]), "missing": dict(row["missing"])} for row in rows]


def by_id(lake: Lake) -> dict[str, dict[str, Any]]:
    return {row["response_id"]: row for row in rewards(lake)}


def test_the_reward_is_the_weighted_mean_of_the_components_that_are_there(lake, both):
    put(
        lake,
        "interactions",
        [
            interaction("both"),
            interaction("only-rule", response="five"),
            interaction("only-human", metadata={}),
            interaction("neither", metadata={}),
        ],
    )
    put(lake, "feedback", [thumb("both", 0), thumb("only-human", 1)])
    result = score(lake, both)
    assert (result.scored, result.missing) == (4, 1)
    found = by_id(lake)
    assert found["both"]["reward"] == pytest.approx(3 / 4)
    assert found["both"]["components"] == {"human": 0.0, "rules": 1.0}
    assert found["only-rule"]["reward"] == 0.0
    assert found["only-rule"]["missing"] == {"human": "no vote"}
    assert found["only-human"]["reward"] == 1.0
    assert found["only-human"]["missing"] == {"rules": "the rule gave none"}
    assert found["neither"]["reward"] is None
    assert found["neither"]["components"] == {}
    assert set(found["neither"]["missing"]) == {"human", "rules"}
    assert all(row["scorer"] == result.scorer for row in found.values())


def test_the_latest_vote_of_each_source_counts_and_other_tenants_and_kinds_do_not(lake):
    put(lake, "interactions", [interaction("a")])
    votes = [
        thumb("a", 1, source="ann", created_at=NOON),
        thumb("a", 0, source="ann", created_at=NOON + timedelta(seconds=1)),
        thumb("a", 1, source="ben", created_at=NOON),
        thumb("a", 1, source="eve", created_at=NOON + timedelta(seconds=9)) | {"tenant": "another"},
        thumb("a", 1, source="rater") | {"kind": "rating", "value": 5.0},
    ]
    random.Random(1).shuffle(votes)
    put(lake, "feedback", votes)
    score(lake, HUMAN)
    assert by_id(lake)["a"]["reward"] == pytest.approx(0.5)


def test_only_complete_responses_are_scored(lake):
    put(lake, "interactions", [interaction("a", status="aborted"), interaction("b", status="error"), interaction("c")])
    put(lake, "feedback", [thumb("a", 1), thumb("b", 1), thumb("c", 1), thumb("nobody", 1)])
    assert score(lake, HUMAN).scored == 1
    assert list(by_id(lake)) == ["c"]


def test_a_second_run_has_nothing_to_do_and_a_third_scores_only_what_is_new(lake, both):
    put(lake, "interactions", [interaction(f"r{i}") for i in range(10)])
    assert score(lake, both).scored == 10
    idle = score(lake, both)
    assert (idle.scored, idle.versions["rewards"]) == (0, 1)
    put(lake, "interactions", [interaction("new")])
    assert score(lake, both).scored == 1
    assert len(rewards(lake, "rewards")) == 11


def test_new_feedback_rescores_its_response_and_no_other(lake):
    put(lake, "interactions", [interaction("a"), interaction("b")])
    put(lake, "feedback", [thumb("a", 1, created_at=NOON)])
    score(lake, HUMAN)
    put(lake, "feedback", [thumb("a", 0, created_at=NOON + timedelta(hours=1))])
    assert score(lake, HUMAN).scored == 1
    assert len(rewards(lake, "rewards")) == 3
    assert by_id(lake)["a"]["reward"] == 0.0


def test_feedback_that_changes_no_reward_rescores_nothing(lake):
    put(lake, "interactions", [interaction("a")])
    score(lake, HUMAN)
    put(lake, "feedback", [thumb("a", 1) | {"kind": "comment", "value": None, "text": "nice"}])
    assert score(lake, HUMAN).scored == 0
    assert score(lake, HUMAN).versions["feedback"] == 1


def test_feedback_that_comes_before_its_interaction_is_joined_late(lake):
    put(lake, "feedback", [thumb("late", 1)])
    assert score(lake, HUMAN).scored == 0
    put(lake, "interactions", [interaction("late")])
    assert score(lake, HUMAN).scored == 1
    assert by_id(lake)["late"]["reward"] == 1.0


def test_another_scorer_scores_everything_anew_under_its_own_name(lake, both):
    put(lake, "interactions", [interaction("a"), interaction("b")])
    first = score(lake, HUMAN)
    second = score(lake, both)
    heavier = score(lake, both.model_copy(update={"human": HumanConfig(weight=2.0)}))
    assert [result.scored for result in (first, second, heavier)] == [2, 2, 2]
    assert len({result.scorer for result in (first, second, heavier)}) == 3
    assert {row["scorer"] for row in rewards(lake)} == {heavier.scorer}
    assert score(lake, HUMAN).scored == 0, "each scorer remembers how far it has come"


def test_the_scorers_name_changes_with_the_rules_source_and_not_with_sizes(tmp_path, monkeypatch, both):
    from feedback.rewards.rules import load_rule

    (tmp_path / "changing_rule.py").write_text("def rule(batch): return [1.0] * batch.num_rows\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = ScoringConfig(rules=RulesConfig(function="changing_rule:rule"))
    before = scoring.scorer_name(config, load_rule("changing_rule:rule"))
    assert before == scoring.scorer_name(config.model_copy(update={"threads": 1}), load_rule("changing_rule:rule"))
    (tmp_path / "changing_rule.py").write_text("def rule(batch): return [0.0] * batch.num_rows\n")
    assert before != scoring.scorer_name(config, load_rule("changing_rule:rule"))


@pytest.mark.parametrize("when", ["before the commit", "after the commit"])
def test_a_run_killed_around_its_commit_and_repeated_scores_each_response_once(lake, both, monkeypatch, when):
    put(lake, "interactions", [interaction(f"r{i}") for i in range(5)])
    commit = DeltaTable.create_write_transaction

    def killed(*args: Any, **kwargs: Any) -> None:
        if when == "after the commit":
            commit(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeltaTable, "create_write_transaction", killed)
        with pytest.raises(KeyboardInterrupt):
            score(lake, both)
    assert score(lake, both).scored == (0 if when == "after the commit" else 5)
    assert len(rewards(lake, "rewards")) == 5


def test_of_two_runs_at_once_one_commits_and_the_other_starts_over(lake, both, monkeypatch):
    put(lake, "interactions", [interaction(f"r{i}") for i in range(5)])
    real_append, others = Lake.append, []

    def append(self: Lake, table: str, *args: Any, **kwargs: Any) -> Any:
        if not others:  # another process is just a little faster
            others.append(None)
            others.append(score(Lake(lake.uri, lake.config), both))
        return real_append(self, table, *args, **kwargs)

    monkeypatch.setattr(Lake, "append", append)
    mine = score(lake, both)
    assert others[1].scored == 5
    assert mine.scored == 0
    assert len(rewards(lake, "rewards")) == 5


def test_a_run_that_never_gets_its_turn_gives_up(lake, monkeypatch):
    put(lake, "interactions", [interaction("a")])

    def conflict(*_: Any, **__: Any) -> None:
        raise LakeConflictError("again")

    monkeypatch.setattr(Lake, "append", conflict)
    with pytest.raises(LakeConflictError):
        score(lake, HUMAN)


def test_a_rule_that_fails_on_a_row_leaves_that_rows_component_missing_never_zero(lake, both):
    put(lake, "interactions", [interaction("bad", response="explode"), interaction("good")])
    result = score(lake, both)
    assert (result.scored, result.missing) == (2, 1)
    found = by_id(lake)
    assert found["bad"]["reward"] is None
    assert "exploded" in found["bad"]["missing"]["rules"]
    assert found["good"]["reward"] == 1.0


def test_a_rule_that_is_not_there_stops_the_run_before_it_writes(lake):
    put(lake, "interactions", [interaction("a")])
    with pytest.raises(RuleError, match="nowhere_at_all"):
        score(lake, ScoringConfig(rules=RulesConfig(function="nowhere_at_all:rule")))
    assert lake.versions()["rewards"] == 0


def test_no_source_at_all_is_an_error(lake):
    with pytest.raises(ValueError, match=r"scoring\.human\.weight"):
        score(lake, ScoringConfig(human=HumanConfig(weight=0)))


def test_compaction_makes_nothing_new(lake, both):
    for number in range(3):
        put(lake, "interactions", [interaction(f"r{number}")])
        put(lake, "feedback", [thumb(f"r{number}", 1)])
    score(lake, both)
    for table in ("interactions", "feedback"):
        lake.table(table).optimize.compact()
    assert score(lake, both).scored == 0


def test_a_log_that_was_cleaned_up_since_the_last_run_loses_no_response(lake, caplog):
    put(lake, "interactions", [interaction("old")])
    score(lake, HUMAN)
    put(lake, "interactions", [interaction("new")])
    put(lake, "feedback", [thumb("old", 1)])
    put(lake, "interactions", [interaction("newer")])
    for table in ("interactions", "feedback"):
        lake.table(table).create_checkpoint()
        for commit in (Path(lake.table_uri(table)) / "_delta_log").glob("*.json"):
            if int(commit.stem) < lake.table(table).version():
                commit.unlink()
    (Path(lake.table_uri("feedback")) / "_delta_log" / f"{1:020d}.json").unlink()
    score(lake, HUMAN)
    found = by_id(lake)
    assert sorted(found) == ["new", "newer", "old"]
    assert found["old"]["reward"] == 1.0
    assert "cleaned up" in caplog.text
    assert score(lake, HUMAN).scored == 0


def test_progress_reaches_the_end_and_scored_at_grows_with_every_run(lake, both, monkeypatch):
    put(lake, "interactions", [interaction(f"r{i}") for i in range(25)])
    seen: list[tuple[int, int]] = []
    score(lake, both.model_copy(update={"batch_rows": 10}), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (25, 25)
    monkeypatch.setattr(scoring, "datetime", type("Stopped", (), {"now": staticmethod(lambda _: NOON)}))
    put(lake, "feedback", [thumb("r0", 0)])
    score(lake, both)
    history = [row for row in rewards(lake, "rewards") if row["response_id"] == "r0"]
    assert [row["reward"] for row in history] == [1.0, 0.75]


vote = st.tuples(st.integers(0, 4), st.sampled_from(["ann", "ben"]), st.sampled_from([0.0, 1.0]), st.integers(0, 50))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.lists(vote, max_size=4)), max_size=4))
def test_however_rows_arrive_current_rewards_are_those_of_all_rows_at_once(tmp_path_factory, steps):
    """Against a plain loop in Python over all interactions and votes."""
    lake = Lake(str(tmp_path_factory.mktemp("lake")), LakeConfig())
    lake.create()
    arrived: set[int] = set()
    latest: dict[tuple[int, str], tuple[int, str, float]] = {}
    runs = 0
    for new, votes in steps:
        fresh = [number for number in dict.fromkeys(new) if number not in arrived]
        arrived.update(fresh)
        if fresh:
            put(lake, "interactions", [interaction(f"r{number}") for number in fresh])
        rows = [
            thumb(f"r{number}", value, source=source, created_at=NOON + timedelta(seconds=second))
            for number, source, value, second in votes
        ]
        for (number, source, value, second), row in zip(votes, rows, strict=True):
            at = (second, row["feedback_id"], value)
            latest[number, source] = max(latest.get((number, source), at), at)
        if rows:
            put(lake, "feedback", rows)
        runs += score(lake, HUMAN).scored

    expected: dict[str, Fraction | None] = {}
    for number in arrived:
        values = [Fraction(value) for (voted, _), (_, _, value) in latest.items() if voted == number]
        expected[f"r{number}"] = sum(values, Fraction(0)) / len(values) if values else None
    found = {row["response_id"]: row["reward"] for row in rewards(lake)}
    assert found == {key: None if value is None else float(value) for key, value in expected.items()}
    assert len(rewards(lake, "rewards")) == runs
