"""What the proof on real traffic counts: each row and each experiment that breaks a promise is found."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from deploy.config.root import Settings
from deploy.examples.live import counts
from deploy.examples.live.trial import Trial
from serve.generation.interaction_rows import BLOCK, DRAW
from serve.policies.experiments import Experiments, unit_of
from tests.feedback.feedback_rows import interaction, put, said
from tests.serve.experiment_records import experiment_record


def test_rows_that_are_not_labelled_as_was_drawn_or_as_the_user_was_told_are_counted(settings: Settings) -> None:
    lake, experiments = settings.lake(), Experiments(settings.policy_store().root)
    lake.create()
    turns, users = experiment_record(), experiment_record(number=2, unit="user")
    experiments.begin(turns)
    experiments.change(1, lambda one: replace(one, state="ended"))
    experiments.begin(users)
    at = datetime.now(UTC)
    turn = turns.turn(3)
    drawn = users.assign(unit_of("default", user="ann", session=None, request="r"), at.timestamp())

    def row(name: str, version: int, draw: tuple[str, str] | None = None, **labels: Any) -> dict[str, Any]:
        metadata = dict([draw]) if draw else {}
        spans = [{"start": 0, "policy_version": version}]
        return interaction(name, user="ann", created_at=at, metadata=metadata, policy_spans=spans, **labels)

    of_turn = {"experiment": 1, "variant": turn.variant, "propensity": turn.propensity}
    of_user = {"experiment": 2, "variant": drawn.variant, "propensity": drawn.propensity}
    rows = [
        row("turn", turn.version, (BLOCK, "3"), **of_turn),
        row("user", drawn.version, (DRAW, drawn.draw), **of_user),
        row("other policy", 3 - turn.version, (BLOCK, "3"), **of_turn),
        row("other share", turn.version, (BLOCK, "3"), **of_turn | {"propensity": 0.4}),
        row("other user", drawn.version, (DRAW, "0" * 32), **of_user),
        row("waited", 1, (BLOCK, "3")),
        row("outside", 1, (DRAW, drawn.draw), experiment=2, variant="fallback"),
        row("before", 1),
    ]
    put(lake, "interactions", rows)
    put(lake, "feedback", [said("f1", "turn", "thumb", value=1.0), said("f2", "user", "thumb", value=1.0, source="bo")])
    told = [("turn", turn.version), ("before", 2)]
    account = [{"kind": "generate", "ok": True, "ids": [name], "policy_version": version} for name, version in told]
    assert counts.labels(settings, account) == {
        "labelled": 5,
        "unlabelled": 1,
        "fallbacks": 1,
        "wrong_labels": 3,
        "wrong_versions": 1,
        "wrong_sources": 1,
    }


TRIAL = Trial(1, 2, 1, "roll back", ("start", "end"), 60, 30, 0, 0.0, 60.0)
A_A = {"experiments": 20, "most_false_commits": 4, "most_false_rollbacks": 4}
KEPT = {
    "a_a": A_A | {"false_commits": 4, "false_rollbacks": 0},
    "harm": [{"noise": 0.2, "decision": "roll back"}],
    "wrong": [],
    **dict.fromkeys(counts.MUST_BE_0, 0),
}


def test_figures_that_keep_the_promises_have_no_problem() -> None:
    assert counts.problems(KEPT, [TRIAL]) == []


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"a_a": A_A | {"false_commits": 5, "false_rollbacks": 0}}, "5 false commits in 20 experiments"),
        ({"a_a": A_A | {"false_commits": 0, "false_rollbacks": 5}}, "5 false rollbacks in 20 experiments"),
        ({"harm": [{"noise": 0.2, "decision": "expired"}]}, "noise of 0.2 was not rolled back, but expired"),
        ({"wrong": ["the ledger"]}, "the ledger"),
        *(({name: 2}, f"2 {name.replace('_', ' ')}") for name in counts.MUST_BE_0),
    ],
)
def test_each_broken_promise_is_named(changed: dict[str, Any], found: str) -> None:
    [problem] = counts.problems(KEPT | changed, [TRIAL])
    assert problem.startswith(found)


def test_an_end_that_is_on_record_twice_is_named() -> None:
    twice = replace(TRIAL, events=("start", "end", "end"))
    assert counts.problems(KEPT, [twice]) == ["experiment 1 has the entries start, end, end"]


def test_the_bar_of_false_decisions_is_passed_by_chance_once_in_a_hundred_times() -> None:
    """P(X <= 3) of 20 trials at 5 % is 0.984, P(X <= 4) is 0.9974, by the binomial table."""
    assert counts.most_errors(20, 0.05) == 4
    assert counts.most_errors(0, 0.05) == 0
