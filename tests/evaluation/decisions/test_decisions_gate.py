"""Pass, refuse, undecided: worlds whose truth is known, through what production calls."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from evaluation.decisions import gate
from evaluation.decisions.gate import State, advance, replay
from evaluation.decisions.observations import Look, Observation
from evaluation.decisions.plan import Compared, Plan
from evaluation.statistics.betting import OutOfBounds
from tests.evaluation.decisions.worlds import COMPARED, compared, config, in_looks, items, planned, raced, seen


def test_a_candidate_that_is_better_passes_as_soon_as_it_is_shown() -> None:
    state, verdict, reasons = raced(planned(), items(1000, gain=0.2))
    assert verdict == "pass"
    assert 50 <= state.items < 400
    assert reasons[0].startswith("reward is +0.")
    assert "better, at level 0.02" in reasons[0]


def test_a_candidate_that_is_no_better_is_refused_when_a_worthwhile_gain_is_ruled_out_or_its_items_are_used_up() -> (
    None
):
    _, verdict, reasons = raced(planned(), items(1000, gain=0.0))
    assert verdict == "refuse"
    assert "no worthwhile gain" in reasons[0] or "gate.max_items is 1000" in reasons[-1]
    same, verdict, reasons = raced(planned(), tuple(seen(str(i), 1.0, 1.0) for i in range(1000)))
    assert (verdict, same.items < 500) == ("refuse", True)
    assert "no worthwhile gain" in reasons[0]
    _, verdict, reasons = raced(planned(config(worthwhile=None)), items(1000, gain=0.0))
    assert verdict == "refuse"
    assert reasons[-1] == "1000 items were looked at, gate.max_items is 1000"


def test_what_is_neither_shown_nor_ruled_out_is_undecided_and_the_looks_go_on_where_they_were() -> None:
    every = items(600, gain=0.08)
    of = planned()
    half, decision, _ = replay(of, in_looks(every[:100]))
    assert decision.verdict == "undecided"
    assert gate.needs(of, half, decision) > 50
    at_once, alone, taken = replay(of, in_looks(every))
    going_on, then, more = replay(of, in_looks(every[100:]), half)
    assert taken == 2 + more
    assert (then.verdict, then.reasons, then.e_value) == (alone.verdict, alone.reasons, alone.e_value)
    assert going_on.gains.tolist() == at_once.gains.tolist()


@pytest.mark.parametrize(
    ("guardrail", "fields"),
    [
        ("length", {"length": (15, 5)}),
        ("truncation", {"truncated": (1, 0)}),
        ("distinct_n", {"distinct": (0.4, 1)}),
        ("repetition", {"repeated": (0.5, 0)}),
    ],
)
def test_a_better_reward_does_not_buy_harm_that_a_guardrail_names(guardrail: str, fields: dict[str, Any]) -> None:
    better = items(1000, gain=0.25, **fields)
    _, verdict, reasons = raced(planned(), better)
    assert verdict == "refuse"
    assert reasons == (next(one for one in reasons if one.startswith(guardrail)),)
    assert "worse than its margin allows" in reasons[0]
    _, verdict, _ = raced(planned(config(guardrails={guardrail: None})), better)
    assert verdict == "pass"


MILLISECONDS = (
    *((2.41, 1.98), (2.38, 2.02), (2.44, 1.95), (2.52, 2.40), (2.39, 1.97), (2.36, 1.99), (2.47, 2.01), (3.90, 1.96)),
    *((2.40, 2.03), (2.43, 1.94), (2.35, 2.88), (2.42, 2.00), (2.37, 1.98), (2.46, 1.97), (2.41, 2.05), (2.39, 1.99)),
)
"""Of a token, of a policy with three layers and of one with two, as a busy machine timed them."""


def timed(times: float, n: int) -> tuple[Observation, ...]:
    """A better candidate, of whose items the first n were timed; its tokens take so many times what was recorded."""
    seconds = [(times * new / 1000, old / 1000) for new, old in MILLISECONDS]
    return tuple(
        one.model_copy(update={"latency": seconds[i % len(seconds)]}) if i < n else one
        for i, one in enumerate(items(1000, gain=0.2))
    )


def test_a_token_that_takes_much_longer_keeps_a_better_candidate_from_passing() -> None:
    of = planned(timed=True)
    assert of.margins["latency"] == 0.5
    state, verdict, _ = raced(of, timed(1, 50))
    assert verdict == "pass"
    assert state.evidence["latency"].shown.n == 50
    assert 0.15 < state.evidence["latency"].shown.mean < 0.25
    _, verdict, reasons = raced(of, timed(3.5, 50))
    assert (verdict, "latency is +0.7" in reasons[0]) == ("refuse", True), "all its items go by, and it is not shown"
    _, verdict, reasons = raced(of, timed(3.5, 1000))
    assert (verdict, reasons[0].endswith("worse than its margin allows")) == ("refuse", True)
    assert raced(of, timed(1, 0))[1] == "refuse", "what was to be timed and was not shows nothing"


def test_where_a_token_takes_the_same_time_by_construction_nothing_is_timed_and_length_guards() -> None:
    of = planned()
    assert "latency" not in of.margins
    assert "latency" not in {metric.name for metric in of.metrics}
    assert "length" in of.margins
    assert "latency" not in planned(config(guardrails={"latency": None}), timed=True).margins


def test_one_segment_that_loses_refuses_and_so_does_a_rare_one_where_its_harm_is_shown() -> None:
    def world(share: int, loss: float) -> tuple[Any, ...]:
        good = items(1000, gain=0.25, segment="de")
        bad = items(1000, gain=loss, segment="fr", name="f", seed=1)
        return tuple(bad[i] if i % share == 0 else good[i] for i in range(1000))

    of = planned(fresh_segments={"de": 500, "fr": 500})
    assert (of.segments, of.watched) == (("de", "fr"), ())
    _, verdict, reasons = raced(of, world(2, -0.3))
    assert verdict == "refuse"
    assert reasons[0].startswith("reward[fr]")
    rare = planned(fresh_segments={"de": 900, "fr": 100})
    assert (rare.segments, rare.watched) == (("de",), ("fr",))
    watched = tuple(seen(f"f{i}", 0.0, 1.0, segment="fr") for i in range(50))
    state, _, _ = replay(rare, [Look(fresh=watched)])
    assert gate.decide(rare, state).reasons[0].startswith("reward[fr]")


def test_a_rare_segment_that_loses_nothing_keeps_nobody_from_passing() -> None:
    """However large the bank: that it loses nothing can't be shown by the few items that it has."""
    of = planned(fresh_segments={"de": 99_990, "fr": 10}, fresh=100_000)
    better = (*items(999, gain=0.25, segment="de"), seen("rare", 1.0, 1.0, segment="fr"))
    assert raced(of, better)[1] == "pass"


def test_items_that_decided_before_guard_against_relapse() -> None:
    of = planned(decided=900)
    assert of.regression == "guardrail"
    fresh, old = items(1000, gain=0.25), items(1000, gain=-0.25, name="old", seed=2)
    looks = [Look(fresh=a.fresh, regression=b.fresh) for a, b in zip(in_looks(fresh), in_looks(old), strict=True)]
    _, decision, _ = replay(of, looks)
    assert decision.verdict == "refuse"
    assert decision.reasons[0].startswith("regression is -0.")
    assert planned(decided=20).regression == "watch"
    assert planned(decided=0).regression is None


def test_kl_is_a_guardrail_and_one_that_could_not_be_measured_refuses() -> None:
    of = planned(config(max_kl=0.1))
    assert raced(of, items(1000, gain=0.25, kl=0.02))[1] == "pass"
    _, verdict, reasons = raced(of, items(1000, gain=0.25, kl=0.6))
    assert verdict == "refuse"
    assert reasons[0].startswith("kl is +0.6")
    _, verdict, reasons = raced(of, items(1000, gain=0.25))
    assert (verdict, reasons) == ("refuse", ("gate.max_kl is set, and KL could not be measured",))


def test_a_candidate_that_rises_by_what_training_saw_and_falls_by_what_it_did_not_see_is_refused() -> None:
    of = planned(rewards=COMPARED)
    both = {"proxy": (3.5, 3.0), "holdout": (0.4, 0.7)}
    _, verdict, reasons = raced(of, items(1000, gain=0.25, **both))
    assert verdict == "refuse"
    assert reasons[0].startswith("holdout_reward is -0.3000 on")
    assert reasons[1] == (
        "over-optimised: the reward that training saw (proxy@1) rises by 0.5000, the reward that it did not see "
        "(holdout@1) falls by 0.3000"
    )
    _, verdict, reasons = raced(of, items(1000, gain=0.25, proxy=(2.9, 3.0), holdout=(0.4, 0.7)))
    assert (verdict, "does not rise (-0.1000)" in reasons[1]) == ("refuse", True)
    _, verdict, reasons = raced(of, items(1000, gain=0.25, holdout=(0.4, 0.7)))
    assert (verdict, "is not known" in reasons[1]) == ("refuse", True)
    assert raced(of, items(1000, gain=0.25, proxy=(3.5, 3.0), holdout=(0.68, 0.7)))[1] == "pass", "within the margin"
    alone = planned(rewards=Compared(None, "holdout@1"))
    _, verdict, reasons = raced(alone, items(1000, gain=0.25, holdout=(0.4, 0.7)))
    assert (verdict, reasons[1].startswith("the reward that training saw can't be had; ")) == ("refuse", True)
    assert raced(planned(config(guardrails={"holdout_reward": None}), rewards=COMPARED), items(1000, 0.25, **both))[
        1
    ] == ("pass")


def test_an_answer_that_the_held_out_reward_can_not_score_counts_as_its_worst() -> None:
    of = planned(rewards=COMPARED)
    assert raced(of, items(1000, gain=0.25, holdout=(None, 0.7)))[1] == "refuse"
    some = (*items(900, gain=0.25, holdout=(0.7, 0.7)), *items(100, gain=0.25, name="j", holdout=(0.1, None)))
    state, verdict, _ = raced(of, some[450:])
    assert verdict == "pass"
    assert state.evidence["holdout_reward"].shown.n <= 450, "without the incumbent's there is nothing to compare"


def test_without_a_reward_to_compare_by_the_plan_says_why() -> None:
    of = planned(rewards=Compared(None, "holdout@1", missing="nothing rewards training's responses"))
    assert "holdout_reward" not in of.margins
    assert of.not_compared == "nothing rewards training's responses"
    assert raced(of, items(1000, gain=0.25))[1] == "pass"
    scaled = planned(rewards=Compared("p", "h", bounds=(-5.0, 5.0)))
    assert scaled.margins["holdout_reward"] == pytest.approx(1.0)


def test_kl_to_the_first_policy_is_a_guardrail_beside_that_to_the_incumbent() -> None:
    of = planned(config(guardrails={"kl_v1": 0.1}, max_kl=0.5))
    assert raced(of, items(1000, gain=0.25, kl=0.3, kl_v1=0.02))[1] == "pass"
    _, verdict, reasons = raced(of, items(1000, gain=0.25, kl=0.3, kl_v1=7.0))
    assert (verdict, reasons[0].startswith("kl_v1 is +1")) == ("refuse", True), reasons
    _, verdict, reasons = raced(of, items(1000, gain=0.25, kl=0.3))
    assert (verdict, reasons) == ("refuse", ("gate.guardrails.kl_v1 is set, and KL could not be measured",))


def test_a_budget_that_is_spent_refuses_before_anything_is_looked_at() -> None:
    _, decision, taken = replay(planned(level=0.0), [])
    assert (decision.verdict, decision.reasons, taken) == ("refuse", (gate.SPENT,), 0)


def test_one_prompt_a_thousand_times_is_one_voice() -> None:
    same = tuple(seen(f"i{i}", 1.0, 0.0, prompt="p") for i in range(1000))
    state = advance(planned(), State(), Look(fresh=same))
    assert len(state.gains) == 1
    assert gate.decide(planned(config(max_items=5000)), state).verdict == "undecided"


def test_of_a_judge_s_missing_scores_silence_is_never_to_the_candidate_s_good() -> None:
    settings = config().model_copy(update={"scorer": "judge"})
    of = planned(settings)
    assert (of.judged, of.max_missing) == (True, 0.05)
    assert [of.gain(seen("a", *pair)) for pair in ((None, 0.5), (0.5, None), (None, None))] == [-0.5, -0.5, -1.0]
    rule = planned()
    assert [rule.gain(seen("a", *pair)) for pair in ((None, 0.5), (0.5, None))] == [None, None]


def by_pairs(**of_gate: Any) -> Plan:
    return planned(config(**of_gate).model_copy(update={"scorer": "pairwise"}))


def test_a_candidate_that_a_judge_prefers_for_its_quality_passes_and_says_by_how_much_of_answers_of_one_length() -> (
    None
):
    of = by_pairs()
    assert (of.compared, planned().compared) == (True, False)
    _, verdict, reasons = raced(of, compared(1000, better=0.8, longer=0.8, ratio=1.0))
    assert verdict == "pass"
    assert reasons[0].startswith("reward is +0.")
    assert reasons[-1].startswith("of answers of one length it wins ")


def test_a_candidate_that_a_judge_prefers_for_its_length_alone_does_not_pass() -> None:
    """Its answers are a fifth longer, and the judge takes the longer of two equal ones nine times in ten."""
    pairs = compared(1000, better=0.0, longer=2.2, ratio=1.2)
    of = by_pairs()
    alone = gate.replay(of.model_copy(update={"compared": False}), in_looks(pairs))[1]
    assert alone.verdict == "pass"
    state, verdict, reasons = raced(of, pairs)
    assert (verdict, state.items) == ("refuse", 1000)
    assert reasons[0].startswith("of answers of one length it wins ")
    assert "the judge takes the longer of two equal ones" in reasons[0]


def test_where_length_can_not_be_told_from_quality_it_does_not_pass() -> None:
    pairs = compared(200, better=2.0, longer=0.0, ratio=1.2, spread=0.0)
    state, verdict, reasons = raced(by_pairs(max_items=200), pairs)
    assert (verdict, state.items) == ("refuse", 200)
    assert "for their length can't be told" in reasons[0]


def test_equal_texts_are_half_a_win_and_a_missing_verdict_is_a_loss() -> None:
    same = tuple(seen(f"i{i}", 0.5, 0.5) for i in range(50))
    none = tuple(seen(f"n{i}", None, None) for i in range(50))
    of = by_pairs()
    shown, what = gate._wins(advance(of, State(), Look(fresh=same)))
    assert (shown, "it wins 50.0% [50.0%, 50.0%]" in what) == (False, True)
    shown, what = gate._wins(advance(of, State(), Look(fresh=(*same, *none))))
    assert shown is False
    assert 0.25 <= float(what.split("it wins ")[1].split("%")[0]) / 100 <= 0.3


def test_items_without_a_score_are_counted_over_all_looks() -> None:
    """Three in the first look alone: their share of all looks is what must be small."""
    of = planned(config(max_missing=0.02))
    better = list(items(1000, gain=0.3, differing=0.6))
    for i in range(6):
        better[i] = better[i].model_copy(update={"candidate": None})
    state, decision, taken = replay(of, in_looks(tuple(better)))
    assert decision.verdict == "pass"
    assert state.items == taken * 50 >= 300
    assert state.missing == 6
    strict, decision, _ = replay(planned(config(max_items=500)), in_looks(tuple(better)))
    assert (strict.items, decision.verdict) == (500, "refuse")
    assert "6 of 500 items (1.2%) have no score, gate.max_missing allows 0.0%" in decision.reasons


def test_a_pass_rests_on_min_items() -> None:
    of = planned(config(min_items=400))
    state, verdict, _ = raced(of, items(1000, gain=0.5, differing=0.6))
    assert (verdict, state.items) == ("pass", 400)


@pytest.mark.parametrize("value", [1.5, -0.1])
def test_a_reward_outside_the_declared_bounds_names_its_item(value: float) -> None:
    wrong = Look(fresh=(seen("fine", 1.0, 0.0), seen("item 7", 0.5, value)))
    with pytest.raises(OutOfBounds, match=r"item 'item 7' has the value .* \[0, 1\] of evaluation.gate.reward_bounds"):
        advance(planned(), State(), wrong)
    wide = config(reward_bounds=(-1, 2))
    assert len(advance(planned(wide), State(), wrong).gains) == 2


def test_a_forecast_says_how_many_items_the_smallest_worthwhile_gain_needs_where_nothing_was_seen() -> None:
    of = planned()
    decision = gate.decide(of, State())
    few, many = (gate.needs(planned(config(worthwhile=gain)), State(), decision) for gain in (0.2, 0.05))
    assert few is not None
    assert many is not None
    assert 20 < few < many
    assert gate.needs(planned(config(worthwhile=0.001)), State(), decision) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_bounds": (1, 0)}, "reward_bounds are the least and the greatest"),
        ({"min_items": 2000}, r"gate.min_items=2000 is more than gate.max_items=1000"),
        ({"worthwhile": 1.0}, r"gate.worthwhile=1 can't be reached"),
        ({"reward_bounds": (0, 0.01)}, r"gate.worthwhile=0.02 can't be reached"),
    ],
)
def test_settings_that_nothing_can_meet_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**settings)


def test_blocks_have_whole_voices() -> None:
    assert gate.blocks([1] * 5, 2) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert gate.blocks([3, 1, 1], 2) == [slice(0, 1), slice(1, 3)]
    assert gate.blocks([], 2) == []
