"""Users of an experiment in a fleet: one row each from the lake, what looks make of them, and their draws verified."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.config import ErrorsConfig, ExperimentConfig, FeedbackOutcomeConfig, OutcomesConfig, SessionEndConfig
from evaluation.decisions.ledger import Ledger
from evaluation.experiments import looks
from evaluation.experiments.blocks import Block, Observed, observe
from evaluation.experiments.plan import ExperimentPlan
from evaluation.experiments.verification import verify
from evaluation.statistics.experiment import sample_ratio
from feedback.config import HumanConfig, KindsConfig, LakeConfig
from feedback.events import ANYBODY
from feedback.lake.tables import Lake
from serve.generation.interaction_rows import DRAW
from serve.policies.experiments import FALLBACK, Experiment, Phase, unit_of
from tests.feedback.feedback_rows import interaction, put, reward, said
from tests.serve.experiment_records import experiment_record

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
WINDOW_S = 600.0
EXPERIMENT = experiment_record(
    number=3, started_at=NOON.timestamp(), phases=(Phase(0, 0.1), Phase(10, 0.5)), unit="user"
)


def plan_of(*, before_seconds: float = 0.0, **outcomes: Any) -> ExperimentPlan:
    found = {"feedback": FeedbackOutcomeConfig(), "errors": ErrorsConfig(role="guardrail", margin=0.5)} | outcomes
    config = ExperimentConfig(
        feedback_window_seconds=WINDOW_S, outcomes=OutcomesConfig(**found), before_seconds=before_seconds
    )
    return ExperimentPlan.of(config, HumanConfig(), KindsConfig(), unit="user")


PLAN = plan_of()
counter = itertools.count()


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path / "lake"), LakeConfig())
    made.create()
    return made


def asked(user: str, second: float, **columns: Any) -> dict[str, Any]:
    """A response to a user, labelled as that was drawn."""
    at = NOON + timedelta(seconds=second)
    drawn = EXPERIMENT.assign(unit_of("acme", user=user, session=None, request=""), at.timestamp())
    labels = {"experiment": 3, "variant": drawn.variant, "propensity": drawn.propensity, "user": user}
    labels |= {"created_at": at, "completed_at": at, "metadata": {DRAW: drawn.draw}, "tenant": "acme"}
    return interaction(f"r{next(counter)}", **(labels | columns))


def thumb(response: str, second: float, value: float, source: str = "ann") -> dict[str, Any]:
    at = NOON + timedelta(seconds=second)
    return said(f"f{next(counter)}", response, "thumb", value=value, source=source, created_at=at, tenant="acme")


def seen(lake: Lake, *, after_s: float = 1e6, known: Sequence[Block] = (), plan: ExperimentPlan = PLAN) -> Observed:
    journal = Path(lake.uri).parent / "journal"
    return observe(lake, journal, EXPERIMENT, plan, now=NOON.timestamp() + after_s, known=known)


def drawn_as(variants: tuple[str, str]) -> str:
    """A user who is drawn for these in the two phases."""
    for number in itertools.count():
        unit = unit_of("acme", user=f"user {number}", session=None, request="")
        found = tuple(EXPERIMENT.assign(unit, NOON.timestamp() + second).variant for second in (0, 600))
        if found == variants:
            return f"user {number}"
    raise AssertionError


STAYS, CROSSES, TRIED = (
    drawn_as(("control", "control")),
    drawn_as(("control", "candidate")),
    drawn_as(("candidate", "candidate")),
)


def test_a_user_is_one_row_however_many_requests_and_thumbs(lake: Lake) -> None:
    rows = [asked(STAYS, second) for second in range(5)] + [asked(TRIED, 7.5)]
    put(lake, "interactions", rows)
    loud = [thumb(row["response_id"], 20 + i, 0.0, "loud") for i, row in enumerate(rows[:4])]
    put(lake, "feedback", [*loud, thumb(rows[4]["response_id"], 30, 1.0, "quiet"), thumb(rows[5]["response_id"], 9, 1)])
    found = seen(lake)
    assert [(user.requests, user.voices, user.candidate, user.propensity) for user in found.blocks] == [
        (5, 2, False, 0.9),
        (1, 1, True, 0.1),
    ]
    assert [user.values["feedback"] for user in found.blocks] == [0.5, 1.0]
    assert [user.first_at for user in found.blocks] == [NOON.timestamp(), NOON.timestamp() + 7.5]
    statistics = found.rows(PLAN)
    assert statistics.propensities == pytest.approx([0.1, 0.1])  # the candidate's
    assert (found.late, found.mislabelled, found.fallbacks) == (0, 0, 0)


def test_a_row_closes_a_window_behind_the_first_request_and_stays_as_it_was(lake: Lake) -> None:
    row = asked(STAYS, 10)
    put(lake, "interactions", [row])
    put(lake, "feedback", [thumb(row["response_id"], 600, 1.0), thumb(row["response_id"], 620, 0.0, "bob")])
    assert seen(lake, after_s=611).blocks == ()
    assert seen(lake, after_s=611).pending == 1
    found = seen(lake, after_s=613)
    assert [user.values["feedback"] for user in found.blocks] == [1.0]
    assert found.late == 1
    put(lake, "interactions", [asked(STAYS, 5), asked(TRIED, 4), asked(CROSSES, 11)])  # two behind its time
    after = seen(lake, known=found.blocks)
    assert after.blocks[0] == found.blocks[0]
    assert [user.first_at for user in after.blocks] == [NOON.timestamp() + 10, NOON.timestamp() + 11]
    assert after.pending == 0


def test_the_requests_of_a_users_first_phase_count_whether_the_next_one_changes_the_policy_or_not(lake: Lake) -> None:
    rows = [asked(user, second) for user in (STAYS, CROSSES, TRIED) for second in (590.0, 605.0)]
    put(lake, "interactions", rows)
    found = seen(lake)
    assert [(user.requests, user.block) for user in found.blocks] == [(1, 9)] * 3
    assert found.mislabelled == 0
    assert sorted(user.candidate for user in found.blocks) == [False, False, True]


def test_what_was_answered_outside_of_the_draw_and_what_is_not_as_it_was_drawn_does_not_count(lake: Lake) -> None:
    rows = [asked(STAYS, 3), asked(STAYS, 1, variant=FALLBACK, propensity=None), asked(STAYS, 2, variant="candidate")]
    rows += [asked(TRIED, 4, propensity=0.5), asked(TRIED, 5, metadata={}), asked(TRIED, 6, metadata={DRAW: "x"})]
    rows += [asked(TRIED, 7, experiment=2), asked(TRIED, 8, experiment=None)]
    put(lake, "interactions", rows)
    found = seen(lake)
    assert [(user.requests, user.first_at) for user in found.blocks] == [(1, NOON.timestamp() + 3)]
    assert (found.mislabelled, found.fallbacks) == (4, 1)
    told = looks.to_json(PLAN, looks.look(PLAN, found), found)
    assert (told["mislabelled"], told["fallbacks"]) == (4, 1)


def test_a_user_is_compared_less_what_that_user_did_before(lake: Lake) -> None:
    def earlier(user: str | None, **columns: Any) -> dict[str, Any]:
        at = NOON - timedelta(hours=1)
        labels = {"user": user, "tenant": "acme", "created_at": at, "completed_at": at}
        return interaction(f"r{next(counter)}", **(labels | columns))

    before = [earlier(STAYS, status="error"), earlier(STAYS), earlier(TRIED), earlier("else", status="error")]
    put(lake, "interactions", [*before, earlier(CROSSES, tenant="other", status="error"), earlier(None)])
    put(
        lake,
        "feedback",
        [thumb(row["response_id"], -60, value, ANYBODY) for row, value in zip(before, (0, 0, 1), strict=False)],
    )
    rows = [asked(STAYS, 1), asked(TRIED, 2), asked(CROSSES, 3), asked(STAYS, 4), asked(TRIED, 700)]
    put(lake, "interactions", rows)
    put(lake, "feedback", [thumb(row["response_id"], 20, 1.0, ANYBODY) for row in rows[:3]])
    plan = plan_of(before_seconds=7200)
    first = seen(lake, plan=plan, after_s=603.5).blocks  # TRIED has not closed yet
    assert [user.covariates for user in first] == [{"feedback": -0.5, "errors": pytest.approx(0.5 - 2.5 / 4)}]
    found = seen(lake, plan=plan, known=first)
    assert found.blocks[0] == first[0]
    assert [user.covariates for user in found.blocks[1:]] == [
        {"feedback": 0.5, "errors": pytest.approx(0.0 - 2.5 / 4)},
        {"feedback": None, "errors": None},  # another tenant's user of that name was there
    ]
    assert found.rows(plan).covariates["feedback"] == pytest.approx([-0.5, 0.5, np.nan], nan_ok=True)


def test_a_user_without_a_name_was_not_there_before(lake: Lake) -> None:
    at = NOON + timedelta(seconds=1)
    drawn = EXPERIMENT.assign(unit_of("acme", user=None, session="s", request=""), at.timestamp())
    labels = {"user": None, "variant": drawn.variant, "propensity": drawn.propensity, "metadata": {DRAW: drawn.draw}}
    put(lake, "interactions", [asked(STAYS, -60, experiment=None), asked(STAYS, 1) | labels])
    [unit] = seen(lake, plan=plan_of(before_seconds=7200)).blocks
    assert unit.covariates == {"feedback": None, "errors": None}


def test_a_user_has_the_scores_of_all_responses_and_of_those_with_feedback(lake: Lake) -> None:
    rows = [asked(STAYS, second) for second in (1, 2, 3)] + [asked(TRIED, 4), asked(TRIED, 5)]
    put(lake, "interactions", rows)
    at, components = NOON + timedelta(seconds=9), ("components", "missing")
    scores = zip(rows, (0.9, 0.6, 0.3, 0.8), strict=False)  # the last response has none
    put(
        lake,
        "rewards",
        [
            reward(row["response_id"], 0.9, scored_at=at, **dict(zip(components, ({"model": score}, {}), strict=True)))
            for row, score in scores
        ],
    )
    put(lake, "feedback", [thumb(rows[index]["response_id"], 20, 1.0, ANYBODY) for index in (0, 1, 3)])
    plan = plan_of(feedback=FeedbackOutcomeConfig(predicted_by="model"))
    assert [user.predictions["feedback"] for user in seen(lake, plan=plan).blocks] == [
        pytest.approx((0.6, 0.75)),
        None,
    ]


def test_a_session_counts_for_a_user_by_the_responses_that_leave_its_wait_before_the_close(lake: Lake) -> None:
    def session_end(user: str, *seconds: float, experiment: int | None = 3) -> None:
        rows = [asked(user, second, session_id=user, experiment=experiment) for second in seconds]
        put(lake, "interactions", rows)

    session_end(STAYS, 1, 90, 180, 270, 360, 450, 540)  # closes at 601, so 540 could not show that it goes on
    session_end(CROSSES, 2, 300)  # it paused for longer than 100 s
    session_end(TRIED, 3)
    session_end(TRIED, 80, experiment=None)  # whoever answered
    plan = plan_of(session_end=SessionEndConfig(after_seconds=100.0))
    assert [user.values["session_end"] for user in seen(lake, plan=plan).blocks] == [0.0, 1.0, 0.0]


# What looks make of them


def users(likes: dict[str, float], number: int = 300, *, start: float = 0.0, share: float = 0.5) -> Observed:
    """Users as they were drawn, with the feedback that each variant gets."""
    experiment = Experiment(**{**vars(EXPERIMENT), "started_at": start, "phases": (Phase(0, share),), "block_s": 1e-3})
    rows = []
    for index in range(number):
        at = start + index * 1e-5
        drawn = experiment.assign(unit_of("acme", user=f"u{index}", session=None, request=""), at)
        rows.append(
            Block(
                block=experiment.block_at(at),
                candidate=drawn.variant == "candidate",
                propensity=drawn.propensity,
                requests=2,
                voices=1,
                responded=1.0,
                values={"feedback": likes[drawn.variant], "errors": 0.0},
                draw=drawn.draw,
                first_at=at,
            )
        )
    return Observed(blocks=tuple(rows))


def test_users_commit_and_roll_back(lake: Lake) -> None:
    assert looks.look(PLAN, users({"candidate": 0.9, "control": 0.4})).decision == "commit"
    assert looks.look(PLAN, users({"candidate": 0.3, "control": 0.8})).decision == "roll back"
    assert looks.look(PLAN, users({"candidate": 0.5, "control": 0.5})).decision == "hold"


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.3])
def test_users_who_are_drawn_as_declared_are_no_sample_ratio_mismatch(share: float) -> None:
    """A control's propensity is 1 - share, and 1 - (1 - 0.1) is not 0.1 in floating point."""
    found = users({"candidate": 0.5, "control": 0.5}, 1000, share=share)
    decision = looks.look(PLAN, found)
    assert decision.holds == ()
    exact = sample_ratio(found.rows(PLAN).candidate, np.full(1000, share))
    assert decision.sample_ratio == pytest.approx(exact.max(initial=1.0))


def test_users_that_are_lost_on_the_way_hold_it() -> None:
    """Of the candidate's users, half get no row."""
    rng = np.random.default_rng(0)
    found = users({"candidate": 0.9, "control": 0.4}, 2000)
    kept = [user for user in found.blocks if not user.candidate or rng.random() < 0.5]
    decision = looks.look(PLAN, Observed(blocks=tuple(kept)))
    assert decision.decision == "hold"
    assert any("sample-ratio mismatch" in why for why in decision.holds)


def test_a_watch_counts_those_who_first_came_since_the_commit() -> None:
    good, bad = users({"candidate": 0.9, "control": 0.4}), users({"candidate": 0.2, "control": 0.9}, 400)
    watch_from = good.blocks[-1].block + 1
    after = [
        user.model_copy(update={"block": user.block + watch_from, "first_at": (user.first_at or 0) + watch_from * 1e-3})
        for user in bad.blocks
    ]
    both = Observed(blocks=(*good.blocks, *after))
    assert looks.look(PLAN, both, watched_from=watch_from).decision == "roll back"
    assert looks.look(PLAN, good, watched_from=watch_from).decision == "hold"


# What verification makes of them


def ledger_with(folder: Path, found: Observed, started_at: float, **changed: Any) -> list[str]:
    """The problems of a ledger whose experiment began then and ended by these users."""
    ledger, policies = Ledger(folder), ({"version": 2, "sha256": "c" * 64}, {"version": 1, "sha256": "b" * 64})
    plan = PLAN.model_copy(update={"window_s": 0.0})
    common = {
        "number": 3,
        "candidate": policies[0],
        "control": policies[1],
        "phases": [{"from_block": 0, "share": 0.5}],
    }
    start = {"seed": "seed", "started_at": started_at, "block_s": 1e-3, "plan": plan.to_json(), "why": "test"}
    start |= {"verdict_entry": None, "override": True, "objection": "none", "unit": "user"}
    ledger.append("experiment", {**common, **start, "event": "start"}, who="test")
    why = "; ".join(looks.look(plan, found).reasons)
    evidence = ledger.keep({"experiment": 3, "observed": found.model_dump(mode="json")})
    end = {"event": "end", "decision": "roll back", "evidence": evidence, "why": why}
    ledger.append("experiment", {**common, **end, **changed}, who="experiment")
    return verify(ledger)


def harm(started_at: float) -> Observed:
    return users({"candidate": 0.3, "control": 0.8}, start=started_at)


def test_users_as_they_were_drawn_are_in_order(tmp_path: Path) -> None:
    started_at = time.time() - 60
    assert ledger_with(tmp_path, harm(started_at), started_at) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda users: [_other(users[0]), *users[1:]], "was drawn for the"),
        (lambda users: [users[0].model_copy(update={"propensity": 0.9}), *users[1:]], "with probability 0.5"),
        (lambda users: [users[1], users[0], *users[2:]], "not in order"),
        (lambda users: [users[0], *users], "stand in it twice"),
        (lambda users: [users[0].model_copy(update={"block": 5}), *users[1:]], "came in block 0, and not 5"),
        (lambda users: [users[0].model_copy(update={"draw": None}), *users[1:]], "it draws for users"),
        (lambda users: [*users[:-1], users[-1].model_copy(update={"first_at": 1e10})], "had not closed"),
    ],
)
def test_users_that_were_changed_are_named(tmp_path: Path, change: Any, problem: str) -> None:
    started_at = time.time() - 60
    changed = Observed(blocks=tuple(change(list(harm(started_at).blocks))))
    assert any(problem in one for one in ledger_with(tmp_path, changed, started_at))


def _other(user: Block) -> Block:
    return user.model_copy(update={"candidate": not user.candidate})
