"""The verdict: every rule, and how often it is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from evaluation.statistics.guardrails import Evidence, Metric, observe
from evaluation.statistics.verdict import decide

REWARD = Metric("reward", "success", -1, 1)
LENGTH = Metric("length", "guardrail", -1, 1, margin=0.1, better="lower")
ALPHA = 0.001


def values(mean, n=1000, seed=0):
    ups, downs = round(n * (0.1 + mean / 2)), round(n * (0.1 - mean / 2))
    drawn = np.concatenate([np.ones(ups), -np.ones(downs), np.zeros(n - ups - downs)])
    return np.random.default_rng(seed).permutation(drawn)


def evidence(**means):
    metrics = {"reward": REWARD, "other": Metric("other", "success", -1, 1), "length": LENGTH}
    return {name: observe(metrics[name], Evidence.none(), values(mean)) for name, mean in means.items()}


def test_a_gain_with_all_guardrails_shown_passes():
    decision = decide([REWARD, LENGTH], evidence(reward=0.1, length=0.0), alpha=ALPHA)
    assert decision.verdict == "pass"
    assert decision.needs is None
    assert decision.e_value >= 1 / ALPHA
    assert [standing.state for standing in decision.standings] == ["shown", "shown"]
    assert decision.reasons[0].startswith("reward is +0.1000 on 1000 items")


def test_a_gain_does_not_outweigh_a_guardrail_that_is_worse():
    decision = decide([REWARD, LENGTH], evidence(reward=0.15, length=0.19), alpha=ALPHA)
    assert decision.verdict == "refuse"
    assert decision.reasons == (decision.reasons[0],)
    assert decision.reasons[0].startswith("length is +0.1900")


def test_a_gain_waits_for_a_guardrail_that_is_open():
    decision = decide([REWARD, LENGTH], evidence(reward=0.15), alpha=ALPHA, items_left=40)
    assert decision.verdict == "undecided"
    assert decision.needs is None
    assert decision.reasons[-1] == "needs more items than can be foreseen; the bank has 40"
    assert decision.standings[1].state == "open"


def test_an_undecided_candidate_is_told_how_many_items_it_needs():
    decision = decide([REWARD], evidence(reward=0.03), alpha=ALPHA, items_left=0)
    assert decision.verdict == "undecided"
    assert 300 < decision.needs < 20_000
    assert decision.reasons[-1] == f"needs about {decision.needs} more items; the bank has 0"


def test_a_candidate_that_is_worse_is_refused():
    decision = decide([REWARD], evidence(reward=-0.1), alpha=ALPHA)
    assert decision.verdict == "refuse"
    assert "no worthwhile gain" in decision.reasons[0]


def test_a_spent_budget_refuses_whatever_was_gained():
    decision = decide([REWARD], evidence(reward=0.2), alpha=0.0)
    assert decision.verdict == "refuse"
    assert "budget is spent" in decision.reasons[0]


def test_the_most_items_that_a_candidate_may_use_end_the_race():
    assert decide([REWARD], evidence(reward=0.03), alpha=ALPHA, max_items=1001).verdict == "undecided"
    assert decide([REWARD], evidence(reward=0.03), alpha=ALPHA, max_items=1000).verdict == "refuse"
    assert decide([REWARD], evidence(reward=0.2), alpha=ALPHA, max_items=1000).verdict == "pass"


def test_one_success_metric_is_enough_and_the_level_is_shared():
    other = Metric("other", "success", -1, 1)
    decision = decide([REWARD, other], evidence(reward=-0.1, other=0.1), alpha=ALPHA)
    assert decision.verdict == "pass"
    assert [standing.level for standing in decision.standings] == [ALPHA / 2, ALPHA / 2]
    assert len(decision.reasons) == 1


def test_without_evidence_nothing_passes_and_nothing_is_refused():
    decision = decide([REWARD, LENGTH], {}, alpha=ALPHA)
    assert decision.verdict == "undecided"
    assert decision.needs is None


def test_metrics_without_a_success_metric_or_of_one_name_are_no_rule():
    with pytest.raises(ValueError, match="0 success metrics of 1"):
        decide([LENGTH], {}, alpha=ALPHA)
    with pytest.raises(ValueError, match="no name twice"):
        decide([REWARD, REWARD], {}, alpha=ALPHA)


def verdicts(draw, runs, *, guardrail_draw, alpha, cuts=(100, 300, 600)):
    """The last verdict of each run, looking after each of ``cuts``."""
    found = []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        seen = {"reward": Evidence.none(), "length": Evidence.none()}
        at = 0
        for cut in cuts:
            seen["reward"] = observe(REWARD, seen["reward"], draw(rng, cut - at))
            seen["length"] = observe(LENGTH, seen["length"], guardrail_draw(rng, cut - at))
            at = cut
            verdict = decide([REWARD, LENGTH], seen, alpha=alpha).verdict
            if verdict != "undecided":
                break
        found.append(verdict)
    return found


def points(mean):
    return lambda rng, n: rng.choice([-1.0, 0.0, 1.0], n, p=[0.15 - mean / 2, 0.7, 0.15 + mean / 2])


def test_no_better_a_candidate_passes_at_most_as_often_as_the_level_says():
    assert verdicts(points(0.0), 100, guardrail_draw=points(-0.05), alpha=0.05).count("pass") <= 10


def test_a_candidate_that_breaks_a_guardrail_seldom_passes_whatever_it_gains():
    assert verdicts(points(0.25), 100, guardrail_draw=points(0.1), alpha=0.05).count("pass") <= 10


def test_an_honest_gain_is_seldom_refused_and_mostly_passes():
    found = verdicts(points(0.15), 100, guardrail_draw=points(0.0), alpha=0.001)
    assert found.count("refuse") <= 10
    assert found.count("pass") >= 75
