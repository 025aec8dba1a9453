"""Blocks of an experiment, from rows in a lake."""

from __future__ import annotations

from datetime import timedelta

import pytest

from evaluation.config import ErrorsConfig, FeedbackOutcomeConfig, OutcomeConfig, SessionEndConfig
from evaluation.experiments import looks
from evaluation.experiments.blocks import BadEvidence
from evaluation.experiments.plan import ExperimentPlan
from feedback.config import HumanConfig
from feedback.events import ANYBODY
from feedback.lake.tables import Lake
from tests.evaluation.experiments.experiment_rows import EXPERIMENT, NOON, asked, plan_of, seen, thumb
from tests.feedback.feedback_rows import put, reward, said


def test_a_block_is_one_row_and_a_source_is_one_voice_of_it(lake: Lake) -> None:
    put(lake, "interactions", [asked(f"r{i}", 0) for i in range(5)] + [asked("s", 1), asked("unsaid", 1)])
    loud = [thumb(i, f"r{i}", 0, 0.0, "loud") for i in range(4)]
    put(lake, "feedback", [*loud, thumb(4, "r4", 0, 1.0, "quiet"), thumb(5, "s", 1, 1.0, "quiet")])
    found = seen(lake, plan_of())
    assert [(block.block, block.requests, block.voices) for block in found.blocks] == [(0, 5, 2), (1, 2, 1)]
    assert [block.values["feedback"] for block in found.blocks] == [0.5, 1.0]
    assert [block.responded for block in found.blocks] == [1.0, 0.5]
    turns = [EXPERIMENT.turn(block) for block in (0, 1)]
    assert [block.candidate for block in found.blocks] == [turn.variant == "candidate" for turn in turns]


def test_a_block_with_too_few_voices_says_nothing(lake: Lake) -> None:
    put(lake, "interactions", [asked(f"r{i}", 0) for i in range(100)])
    put(lake, "feedback", [thumb(i, f"r{i}", 0, 1.0, "one") for i in range(100)])
    [block] = seen(lake, plan_of(min_voices=2)).blocks
    assert (block.voices, block.values["feedback"]) == (1, None)


def test_where_no_source_is_named_the_users_of_the_requests_are_the_voices(lake: Lake) -> None:
    put(lake, "interactions", [asked(f"r{i}", 0, user=f"user-{i // 2}") for i in range(4)] + [asked("nobody", 0)])
    put(lake, "feedback", [thumb(i, f"r{i}", 0, float(i < 2), ANYBODY) for i in range(4)])
    put(lake, "feedback", [thumb(9, "nobody", 0, 1.0, ANYBODY)])
    [block] = seen(lake, plan_of()).blocks
    assert (block.voices, block.values["feedback"]) == (3, pytest.approx(2 / 3))


def test_a_block_closes_and_never_changes(lake: Lake) -> None:
    put(lake, "interactions", [asked("r", 0), asked("slow", 0, completed_at=NOON + timedelta(seconds=161))])
    put(lake, "feedback", [thumb(1, "r", 0, 1.0, "ann", second=159), thumb(2, "r", 0, 0.0, "bob", second=161)])
    assert seen(lake, plan_of(), after_s=159).blocks == ()
    assert seen(lake, plan_of(), after_s=159).pending == 1
    [block] = seen(lake, plan_of(), after_s=163).blocks
    assert (block.requests, block.values["feedback"]) == (1, 1.0)
    assert seen(lake, plan_of(), after_s=163).late == 1
    assert seen(lake, plan_of(), after_s=1e6).blocks == (block,)


def test_what_was_looked_at_stays_whatever_comes_or_goes_behind_its_time(lake: Lake) -> None:
    put(lake, "interactions", [asked("r", 1)])
    put(lake, "feedback", [thumb(1, "r", 1, 1.0, "ann")])
    before = seen(lake, plan_of())
    put(lake, "interactions", [asked("sealed late", 1), asked("earlier block", 0), asked("new", 2)])
    put(lake, "feedback", [thumb(2, "sealed late", 1, 0.0, "bob"), thumb(3, "earlier block", 0, 0.0, "bob")])
    after = seen(lake, plan_of(), known=before.blocks)
    assert after.blocks[0] == before.blocks[0]
    assert [block.block for block in after.blocks] == [1, 2]


def test_a_choice_between_two_blocks_that_is_late_for_one_counts_for_neither(lake: Lake) -> None:
    put(lake, "interactions", [asked("a", 0), asked("b", 2)])
    put(lake, "feedback", [thumb(1, "a", 0, 1.0, "ann"), thumb(2, "b", 2, 1.0, "ann")])
    late = NOON + timedelta(seconds=170)  # block 0 has closed, block 2 has not
    choice = said("p", "b", "preference", rejected_response_id="a", source="bob", created_at=late)
    before = seen(lake, plan_of()).blocks
    put(lake, "feedback", [choice])
    assert seen(lake, plan_of()).blocks == before


def test_equal_names_in_two_tenants_are_two_voices(lake: Lake) -> None:
    put(lake, "interactions", [asked("a", 0), asked("b", 0, tenant="other")])
    put(lake, "feedback", [thumb(1, "a", 0, 1.0, "ann"), {**thumb(2, "b", 0, 0.0, "ann"), "tenant": "other"}])
    [block] = seen(lake, plan_of(min_voices=2)).blocks
    assert (block.voices, block.values["feedback"]) == (2, 0.5)


def test_what_a_vote_is_worth_is_settled_with_the_plan(lake: Lake) -> None:
    plan = ExperimentPlan.model_validate(plan_of().to_json())
    assert plan == plan_of()
    assert plan.human == HumanConfig()


def test_what_is_not_labelled_as_it_was_drawn_does_not_count(lake: Lake) -> None:
    turn = EXPERIMENT.turn(0)
    other = "control" if turn.variant == "candidate" else "candidate"
    rows = [asked("right", 0), asked("wrong", 0, variant=other), asked("share", 0, propensity=0.9)]
    rows += [
        asked("no block", 0, metadata={}),
        asked("of another", 0, experiment=2),
        asked("of none", 0, experiment=None),
    ]
    put(lake, "interactions", rows)
    put(lake, "feedback", [thumb(i, name, 0, 1.0, "ann") for i, name in enumerate(("right", "wrong", "share"))])
    found = seen(lake, plan_of())
    assert [block.requests for block in found.blocks] == [1]
    assert found.mislabelled == 3


def test_errors_latency_and_length_are_means_over_requests(lake: Lake) -> None:
    long = {"response_token_ids": [1] * 50, "logprobs": [-1.0] * 50, "timings": {"total_ms": 9000.0}}
    put(lake, "interactions", [asked("a", 0, status="error"), asked("b", 0), asked("c", 0, **long), asked("d", 0)])
    outcomes = {
        "feedback": FeedbackOutcomeConfig(),
        "errors": ErrorsConfig(margin=0.1),
        "latency_s": OutcomeConfig(role="guardrail", margin=1.0, bounds=(0.0, 4.0)),
        "length": OutcomeConfig(role="guardrail", margin=1.0, bounds=(0.0, 10.0)),
    }
    [block] = seen(lake, plan_of(outcomes=outcomes)).blocks
    assert block.values["feedback"] is None
    assert block.values["errors"] == 0.25
    assert block.values["latency_s"] == pytest.approx((3 * 0.009 + 4.0) / 4)
    assert block.values["length"] == pytest.approx((3 * 2 + 10) / 4)


SESSION_END = {"feedback": FeedbackOutcomeConfig(), "session_end": SessionEndConfig(after_seconds=30.0)}


def test_a_session_ends_in_a_block_if_no_further_request_comes_in_time(lake: Lake) -> None:
    put(lake, "interactions", [asked("a1", 0, session_id="a"), asked("a2", 0, second=20, session_id="a")])
    put(lake, "interactions", [asked("a3", 0, second=49, session_id="a")])  # and then no more: a has ended
    put(lake, "interactions", [asked("b1", 0, second=50, session_id="b"), asked("b2", 1, second=5, session_id="b")])
    put(lake, "interactions", [asked("c1", 0, second=1, session_id="c"), asked("c2", 0, second=40, session_id="c")])
    put(lake, "interactions", [asked("c3", 1, second=1, session_id="c")])  # c paused for longer than half a minute
    put(lake, "interactions", [asked("d1", 0, second=50, session_id="d")])
    put(lake, "interactions", [asked("d2", 1, second=5, session_id="d", tenant="other"), asked("none", 0)])
    put(lake, "interactions", [asked("e1", 0, second=9, session_id="e"), asked("e2", 0, second=9, session_id="e")])
    of_nobody = {"experiment": None, "variant": None, "propensity": None}
    put(lake, "interactions", [asked("f1", 0, session_id="f"), asked("f2", 0, second=9, session_id="f", **of_nobody)])
    first, second = seen(lake, plan_of(outcomes=SESSION_END)).blocks
    ended = {"a": True, "b": False, "c": True, "d": True, "e": True, "f": False}
    assert first.values["session_end"] == pytest.approx(sum(ended.values()) / len(ended))
    assert second.values["session_end"] == 1.0  # b, c, and d of the other tenant
    assert seen(lake, plan_of()).blocks[0].values == {"feedback": None}


def test_a_wait_for_a_further_request_begins_with_the_response_and_ends_with_its_block(lake: Lake) -> None:
    def ended(block: int, done_after: float, further_at: float) -> float | None:
        at = NOON + timedelta(seconds=60 * block + 1)
        slow = asked(f"s{block}", block, session_id=f"s{block}", completed_at=at + timedelta(seconds=done_after))
        further = asked(f"t{block}", block, second=1 + further_at, session_id=f"s{block}", experiment=None)
        put(lake, "interactions", [slow, further])
        return seen(lake, plan_of(outcomes=SESSION_END)).blocks[-1].values["session_end"]

    assert ended(0, done_after=50, further_at=75) == 0.0
    assert ended(1, done_after=50, further_at=85) == 1.0
    assert ended(2, done_after=150, further_at=165) == 1.0  # the block closed 159 s after the request
    assert ended(3, done_after=150, further_at=155) == 0.0


def test_a_candidate_that_drives_people_away_is_rolled_back(lake: Lake) -> None:
    rows = []
    for block in range(120):
        for i in range(4):
            leaves = i < (3 if EXPERIMENT.turn(block).variant == "candidate" else 1)
            rows.append(asked(f"r{block}-{i}", block, session_id=f"s{block}-{i}"))
            rows += (
                [] if leaves else [asked(f"t{block}-{i}", block, second=9, session_id=f"s{block}-{i}", experiment=None)]
            )
    put(lake, "interactions", rows)
    plan = plan_of(outcomes=SESSION_END)
    decision = looks.look(plan, seen(lake, plan))
    assert decision.decision == "roll back"
    assert decision.reasons[0].startswith("session_end is shown to be worse: +0.5")


def test_a_session_can_not_end_after_its_block_has_closed() -> None:
    with pytest.raises(ValueError, match=r"after_seconds=1800: a block waits only .*feedback_window_seconds=100 after"):
        plan_of(outcomes={"feedback": FeedbackOutcomeConfig(), "session_end": SessionEndConfig()})


def test_a_reward_outside_its_bounds_names_the_response(lake: Lake) -> None:
    outcomes = {"reward": OutcomeConfig(bounds=(-1.0, 1.0))}
    put(lake, "interactions", [asked("r", 0), asked("s", 0)])
    put(lake, "rewards", [reward("r", 0.5), reward("s", 1.0, scored_at=NOON + timedelta(hours=1))])
    [block] = seen(lake, plan_of(outcomes=outcomes)).blocks
    assert block.values["reward"] == 0.5  # the other one came too late
    put(lake, "rewards", [reward("s", 1.5, minute=1)])
    with pytest.raises(BadEvidence, match=r"response s has reward 1\.5, outside .*\[-1, 1\]"):
        seen(lake, plan_of(outcomes=outcomes))


def test_without_traffic_nothing_is_decided(lake: Lake) -> None:
    plan = plan_of()
    found = seen(lake, plan)
    decision = looks.look(plan, found)
    assert (found.blocks, decision.decision) == ((), "hold")
    assert looks.to_json(plan, decision, found)["differences"][0]["value"] is None


def test_ten_thousand_thumbs_of_one_source_promote_nothing(lake: Lake) -> None:
    rows, thumbs = [], []
    for block in range(100):
        liked = EXPERIMENT.turn(block).variant == "candidate"
        for i in range(100):
            rows.append(asked(f"r{block}-{i}", block))
            thumbs.append(thumb(100 * block + i, f"r{block}-{i}", block, float(liked), "one"))
    put(lake, "interactions", rows)
    put(lake, "feedback", thumbs)
    plan = plan_of(min_voices=2)
    decision = looks.look(plan, seen(lake, plan))
    assert decision.decision == "hold"
    assert decision.differences[0].candidates == decision.differences[0].controls == 0
